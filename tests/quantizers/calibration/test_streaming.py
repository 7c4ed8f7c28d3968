"""Calibration within a memory budget: the same results wherever hidden states are and whatever is computed again."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import write_random
from torch import Tensor

from crelle.errors import CapacityError, FormatError
from crelle.formats.storage.open import open_weights
from crelle.models import builder, decoder
from crelle.models.calibration_model import CalibrationModel, open_model
from crelle.models.read_ahead import ReadAhead
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers.calibration import layer_api
from crelle.quantizers.calibration.calibrate import Calibrator, memory_for
from crelle.quantizers.calibration.half_stats import HalfStatsCollector
from crelle.quantizers.calibration.hidden_states import Store, allocate, load
from crelle.quantizers.calibration.memory_plan import CalibrationMemory, plan_host_memory, plan_memory
from crelle.quantizers.calibration.stats import StatsCollector
from crelle.quantizers.schemes.gptq import GPTQ

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TEXT = "The quick brown fox jumps over the lazy dog. " * 60
LLAMA3_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
LLAMA3_70B = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)]
needs_gpu = pytest.mark.gpu


def tokens(count: int = 12, length: int = 32) -> Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(0))


def calibrated(path: Path, device: torch.device, memory: CalibrationMemory) -> list[Tensor]:
    """Quantize all layers; return their codes and both hidden states behind them."""
    model = CalibrationModel(open_weights(path), device)
    calibrator, found = Calibrator(model, tokens(), device=device, memory=memory), []
    for _ in range(model.layers):
        layer = calibrator.begin()
        fitted = layer.fit(lambda name, weight, stats: GPTQ(bits=3, group=24).fit(weight, stats))
        layer.end()
        found += [t.cpu() for w in fitted.values() for t in w.tensors().values()]
    return [*found, calibrator.hidden.full.float().cpu(), calibrator.hidden.quantized.float().cpu()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_products_that_are_computed_again_are_the_same(tiny_model: Path) -> None:
    plain = CalibrationMemory(batch=5)
    assert same(calibrated(tiny_model, CPU, plain), calibrated(tiny_model, CPU, replace(plain, keep=False)))


@pytest.mark.parametrize("family", ["Gemma2", "OPT", "GPT2"])
def test_so_are_norms_wherever_they_stand(tmp_path: Path, family: str) -> None:
    model = write_random(tmp_path / "model", family)
    plain = CalibrationMemory(batch=5)
    assert same(calibrated(model, CPU, plain), calibrated(model, CPU, replace(plain, keep=False)))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where there are no such products, torch has another way
def test_so_are_products_of_rounded_inputs(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_api, "has_half_products", lambda device: True)
    plain = CalibrationMemory(batch=5)
    kept = calibrated(tiny_model, CPU, plain)
    assert same(kept, calibrated(tiny_model, CPU, replace(plain, keep=False)))
    monkeypatch.setattr(layer_api, "has_half_products", lambda device: False)
    assert not same(kept, calibrated(tiny_model, CPU, plain))


@pytest.mark.parametrize(("keep", "norms", "rotations", "inner"), [(True, 4, 4, 2), (False, 16, 16, 4)])
def test_what_is_kept_is_not_computed_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, norms: int, rotations: int, inner: int
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # with AMX our kernels do all of these
    counts = {"norm": 0, "rotate": 0, "inner": 0}
    norm, rotate = builder.RMSNorm.forward, decoder.rotate

    def counted(name: str, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object) -> Tensor:
            counts[name] += 1
            return f(*args)

        return call

    monkeypatch.setattr(builder.RMSNorm, "forward", counted("norm", norm))
    monkeypatch.setattr(decoder, "rotate", counted("rotate", rotate))
    monkeypatch.setattr(decoder.Compute, "inner", counted("inner", decoder.Compute.inner))
    model = CalibrationModel(open_weights(tiny_model))
    layer = Calibrator(model, tokens(), half=False, memory=CalibrationMemory(batch=12, keep=keep)).begin()
    layer.fit(lambda name, weight, stats: GPTQ(bits=3, group=24).fit(weight, stats))
    layer.end()
    assert counts == {"norm": norms, "rotate": rotations, "inner": inner}


@pytest.mark.parametrize("K", [5, 40])
def test_half_stats_are_those_of_rounded_inputs(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crelle.quantizers.calibration.half_stats._SLAB", 16)
    x = torch.randn(90, K)
    full = x + 0.1 * torch.randn(90, K)
    plain, half = StatsCollector(K, cross=True), HalfStatsCollector(K)
    for part in (slice(0, 50), slice(50, 90)):
        plain.add(x[part].bfloat16(), full[part])
        half.add(x[part], full[part])
    wanted, found = plain.stats(), half.stats()
    torch.testing.assert_close(found.hessian, wanted.hessian)
    assert torch.equal(found.hessian, found.hessian.T)
    exact = (full - x).bfloat16().float().T @ x.bfloat16().float() / 90 + wanted.hessian
    torch.testing.assert_close(found.cross, exact)
    torch.testing.assert_close(found.absmean, x.abs().mean(0))
    assert found.tokens == 90


def test_equal_inputs_have_no_difference_between_the_models() -> None:
    collector, x = HalfStatsCollector(8), torch.randn(30, 8)
    collector.add(x, x.clone())
    stats = collector.stats()
    assert torch.equal(stats.hessian, stats.cross)


def test_batches_are_not_kept_for_the_sake_of_a_sample() -> None:
    collector = HalfStatsCollector(8)
    for _ in range(3):
        collector.add(torch.randn(4096, 8))
    kept = sum(t.untyped_storage().nbytes() for t in collector._sample)
    assert kept <= 3 * 4 * 8 * 130  # f32, about 128 inputs of a batch


def test_calibrating_in_bf16_costs_little(tiny_model: Path) -> None:
    """Relative errors of the last hidden states: with bf16 states and Hessians, and in f32."""
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        *_, full, here = calibrated(tiny_model, CPU, CalibrationMemory(states=dtype))
        errors.append(float((here - full).square().sum() / full.square().sum()))
    assert errors[1] < 1.05 * errors[0]


def test_the_twin_of_a_block_shares_weights_but_not_norms(tiny_model: Path) -> None:
    block = open_model(open_weights(tiny_model)).block(0)
    twin, x = block.twin(), torch.randn(2, 7, 72)
    assert torch.equal(block(x), twin(x))
    for name, linear in block.linears().items():
        assert twin.linears()[name] is not linear
        assert twin.linears()[name].weight.data_ptr() == linear.weight.data_ptr()
    before = block(x)
    for v in twin.vectors().values():
        v.mul_(2)
    twin.linears()[next(iter(twin.linears()))].weight = torch.zeros(72, 72)
    assert torch.equal(block(x), before)


def test_reading_ahead_gives_the_same_and_raises_when_asked(tiny_model: Path) -> None:
    weights = open_weights(tiny_model)
    ahead = ReadAhead(weights)
    module = "model.layers.1.mlp.up_proj"
    ahead.begin([module, "model.layers.1.mlp.nothing"])
    for _ in range(2):  # ahead, then as ever
        assert torch.equal(ahead.matrix(module).dequantize(), weights.matrix(module).dequantize())
    with pytest.raises(FormatError, match="nothing"):
        ahead.matrix("model.layers.1.mlp.nothing")


def test_states_are_stored_and_loaded_batch_by_batch() -> None:
    x = torch.randn(7, 3, 4)
    for dtype in (torch.float32, torch.bfloat16):
        room = allocate(7, 3, 4, dtype, CPU, on_device=False)
        with Store(room, CPU) as store:
            for part in torch.split(x, 3):
                store.put(part)
        parts = list(load(room, 2, CPU))
        assert [len(p) for p in parts] == [2, 2, 2, 1]
        assert torch.equal(torch.cat(parts), x.to(dtype).float())


class FakeStream:
    """A stream that notes what waits for it; copies on a CPU are done when they are begun."""

    def __init__(self, device: object = None) -> None:
        self.waits = 0

    def wait_stream(self, other: object) -> None:
        self.waits += 1

    def synchronize(self) -> None:
        self.waits += 1


def test_copies_beside_the_computation_keep_their_order(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of states in host memory, with streams that do nothing: every batch comes once, in order, and back."""
    memory = CalibrationMemory(batch=5, states=torch.bfloat16, keep=False)
    wanted = calibrated(tiny_model, CPU, memory)
    current = FakeStream()
    monkeypatch.setattr("crelle.quantizers.calibration.hidden_states._in_host_memory", lambda x, device: True)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    assert same(wanted, calibrated(tiny_model, CPU, memory))
    assert current.waits > 0


def test_the_goals_fit_their_memory() -> None:
    """8B in 16 GB, states in host memory; 70B in 60 GB, states on the device; more memory: nothing computed twice."""
    small = plan_memory(LLAMA3_8B, 128, 2048, 4096, budget=16 * 10**9, free=140 * 10**9)
    assert (small.batch, small.states_on_device, small.keep) == (8, False, False)
    assert small.device_bytes < 14.4e9
    assert small.host_bytes == 3 * 128 * 2048 * 4096 * 2
    large = plan_memory(LLAMA3_70B, 128, 2048, 8192, budget=60 * 10**9, free=140 * 10**9)
    assert (large.batch, large.states_on_device, large.keep) == (8, True, False)
    whole = plan_memory(LLAMA3_8B, 128, 2048, 4096, budget=150 * 10**9, free=140 * 10**9)
    assert whole.keep


def test_a_batch_depends_on_the_budget_and_not_on_what_is_free() -> None:
    plans = [plan_memory(LLAMA3_8B, 128, 2048, 4096, budget=12 * 10**9, free=free) for free in (12 * 10**9, 10**9)]
    assert plans[0].batch == plans[1].batch < 8


def test_too_little_memory_is_a_sentence(tiny_model: Path) -> None:
    with pytest.raises(CapacityError, match="`memory`"):
        plan_memory(LLAMA3_8B, 128, 2048, 4096, budget=4 * 10**9, free=10**11)
    with pytest.raises(CapacityError, match="`rows`"):
        memory_for(open_model(open_weights(tiny_model)), tokens(), CPU, budget=1000)
    few = plan_host_memory([(72, 72)], 4, 32, 72, 950_000)
    assert not few.keep
    assert plan_host_memory([(72, 72)], 4, 32, 72, 10**9).keep


@needs_gpu
def test_states_in_host_memory_come_back_as_they_were() -> None:
    x = torch.randn(9, 64, 256, device="cuda")
    room = allocate(9, 64, 256, torch.bfloat16, CUDA, on_device=False)
    assert room.is_pinned()
    for _ in range(3):  # in place, as a layer's end does it
        with Store(room, CUDA) as store:
            for part in torch.split(x, 4):
                store.put(part)
        assert torch.equal(room, x.bfloat16().cpu())
        with Store(room, CUDA) as store:
            for part in load(room, 4, CUDA):
                store.put(2 * part)
        assert torch.equal(room, (2 * x.bfloat16()).cpu())


@needs_gpu
def test_where_states_are_changes_nothing_on_a_gpu(tiny_model: Path) -> None:
    plain = CalibrationMemory(batch=5, states=torch.bfloat16)
    first = calibrated(tiny_model, CUDA, plain)
    for memory in (replace(plain, states_on_device=False), replace(plain, states_on_device=False, keep=False)):
        assert same(first, calibrated(tiny_model, CUDA, memory))


@needs_gpu
def test_half_stats_on_a_gpu_are_those_of_a_cpu() -> None:
    x = torch.randn(5000, 2500)
    full = x + 0.1 * torch.randn(5000, 2500)
    found = []
    for device in (CPU, CUDA):
        collector = HalfStatsCollector(2500, device)
        collector.add(x.to(device), full.to(device))
        found.append(collector.stats())
    for name in ("hessian", "cross", "absmean"):
        on_cpu, on_gpu = (getattr(s, name) for s in found)
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=1e-4)


@needs_gpu
def test_a_run_on_a_gpu_that_died_ends_in_the_same_bytes(small_model: Path, tmp_path: Path) -> None:
    text = CalibrationData(text=TEXT, rows=12, length=32)
    options = {"text": text, "device": "cuda", "memory": 2 * 10**9}
    quantize(small_model, tmp_path / "whole", "gptq:bits=3,group=24", **options)

    def dying(done: int, total: int, note: str) -> None:
        if note == "model.layers.1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(small_model, tmp_path / "again", "gptq:bits=3,group=24", progress=dying, **options)
    quantize(small_model, tmp_path / "again", "gptq:bits=3,group=24", resume=True, **options)
    files = {f.name: f.read_bytes() for f in (tmp_path / "whole").iterdir()}
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "again").iterdir()}
