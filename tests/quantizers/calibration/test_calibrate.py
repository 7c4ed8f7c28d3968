"""Sequences that run through the layers: the sums they leave, the hidden states, runs that die and go on."""

from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

import pytest
import safetensors.torch
import torch

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import SchemeError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.kernels import cpu
from crelle.kernels.cpu import i16_gemm
from crelle.kernels.cpu import stats as cpu_stats
from crelle.models.calibration_model import CalibrationModel
from crelle.models.loader import build
from crelle.quantize_job.data import CalibrationData, rows_of, sampled_rows
from crelle.quantize_job.run import quantize
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.half_stats import HalfStatsCollector
from crelle.quantizers.calibration.stats import Stats, StatsCollector
from crelle.quantizers.schemes.rtn import RTN

CPU = torch.device("cpu")
TEXT = "The quick brown fox jumps over the lazy dog. " * 60


def rows(count: int = 6, length: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(seed))


def test_the_open_model_computes_what_the_model_computes(tiny_model: Path) -> None:
    weights, tokens = open_weights(tiny_model), rows()
    opened = CalibrationModel(weights)
    x = opened.embed(tokens)
    for i in range(opened.layers):
        x = opened.block(i)(x)
    model = build(weights, CPU)
    torch.testing.assert_close(opened.logits(opened.finish(x)), model(tokens, model.new_cache(6)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("K", [5, 400])  # more than one block of columns
def test_stats_are_the_sums_of_their_definition(K: int) -> None:
    x, full = torch.randn(40, K), torch.randn(40, K)
    collector = StatsCollector(K, cross=True)
    for part in (slice(0, 7), slice(7, 40)):
        collector.add(x[part], full[part])
    stats = collector.stats()
    torch.testing.assert_close(stats.hessian, x.T @ x / 40)
    torch.testing.assert_close(stats.cross, full.T @ x / 40)
    torch.testing.assert_close(stats.absmean, x.abs().mean(0))
    assert torch.equal(stats.hessian, stats.hessian.T)
    change = torch.randn(3, K)
    assert stats.output_error(change) == pytest.approx(float((x @ change.T).square().sum() / 40), rel=1e-4)


def test_bf16_sums_leave_the_precision_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AMX but no C++ core: factors are rounded to bf16, so entries are within 2^-8 of their scale."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(cpu_stats, "usable", lambda device: False)
    monkeypatch.setattr(i16_gemm, "usable", lambda device: False)
    before = torch.get_float32_matmul_precision()
    x = torch.randn(500, 70)
    collector = StatsCollector(70, cross=True, half=True)
    collector.add(x, 1.1 * x)
    assert torch.get_float32_matmul_precision() == before
    stats = collector.stats()
    torch.testing.assert_close(stats.hessian, x.T @ x / 500, rtol=0, atol=2**-8)
    torch.testing.assert_close(stats.cross, 1.1 * x.T @ x / 500, rtol=0, atol=2**-8)


@pytest.mark.parametrize("make", [partial(StatsCollector, cross=True), HalfStatsCollector])
def test_a_token_has_its_weight_in_all_sums(make: Callable[[int], StatsCollector]) -> None:
    x, full, weight = torch.randn(300, 20), torch.randn(300, 20).bfloat16(), torch.rand(300)
    inside, before = make(20), make(20)
    inside.add(x, full, weight)
    before.add(weight[:, None] * x, weight[:, None] * full)
    found, wanted = inside.stats(), before.stats()
    for name in ("hessian", "cross", "absmean", "sample"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.fixture
def emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine with AMX does, by tiles in plain C++."""
    if cpu.available() is not None:
        pytest.skip("needs the C++ core")
    monkeypatch.setattr(cpu_stats, "usable", lambda device: True)
    monkeypatch.setattr(cpu_stats, "StatsTiles", partial(cpu_stats.StatsTiles, emulate=True))


@pytest.mark.usefixtures("emulated_tiles")
@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_tiles_give_the_stats_of_torch(cross: bool, weighted: bool) -> None:
    """Inputs [1, T, K] in two batches, f32 and bf16; as close as rounding to bf16 leaves them."""
    x, weight = torch.randn(2, 300, 70), torch.rand(2, 300) + 0.5 if weighted else None
    full = x + 0.1 * torch.randn(2, 300, 70)
    tiles, plain = (StatsCollector(70, cross=cross, half=half) for half in (True, False))
    assert tiles._tiles is not None
    assert plain._tiles is None
    for collector in (tiles, plain):
        for i, dtype in enumerate((torch.float32, torch.bfloat16)):
            some = None if weight is None else weight[i]
            collector.add(x[i : i + 1].to(dtype), full[i : i + 1] if cross else None, some)
    found, wanted = tiles.stats(), plain.stats()
    assert found.tokens == wanted.tokens == 600
    assert torch.equal(found.sample, wanted.sample)
    assert torch.equal(found.hessian, found.hessian.T)
    torch.testing.assert_close(found.absmean, wanted.absmean)
    torch.testing.assert_close(found.hessian, wanted.hessian, rtol=0, atol=2**-7)
    if cross:
        torch.testing.assert_close(found.cross, wanted.cross, rtol=0, atol=2**-7)
        change = found.cross - found.hessian
        torch.testing.assert_close(change, wanted.cross - wanted.hessian, rtol=0, atol=2**-10)
    else:
        assert found.cross is None


@pytest.mark.usefixtures("emulated_tiles")
def test_a_layer_is_calibrated_through_tiles_as_through_torch(tiny_model: Path) -> None:
    found = []
    for half in (True, False):
        walk = Calibrator(CalibrationModel(open_weights(tiny_model)), rows(), batch=4, half=half).begin()
        found.append(walk.stats(walk.block.stages()[-1][0]))
    tiles, plain = found
    scale = plain.hessian.diagonal().sqrt()
    assert ((tiles.hessian - plain.hessian).abs() <= 2**-6 * scale[:, None] * scale).all()
    torch.testing.assert_close(tiles.absmean, plain.absmean, rtol=0.02, atol=0.02 * float(plain.absmean.mean()))


def test_the_target_undoes_the_error_that_came_in() -> None:
    """The wanted weight on the inputs as they come is nearer to the full-precision output than the weight itself."""
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(400, 8, generator=generator)
    here = full @ (torch.eye(8) + 0.2 * torch.randn(8, 8, generator=generator))
    collector = StatsCollector(8, cross=True)
    collector.add(here, full)
    weight = torch.randn(4, 8, generator=generator)
    target = collector.stats().target(weight)
    assert (here @ target.T - full @ weight.T).norm() < 0.2 * (here @ weight.T - full @ weight.T).norm()
    without = Stats(collector.stats().hessian, torch.ones(8), 400)
    assert without.target(weight) is weight


def test_the_streams_are_those_of_the_two_models(tiny_model: Path) -> None:
    opened, tokens = CalibrationModel(open_weights(tiny_model)), rows()
    calibrator = Calibrator(opened, tokens, batch=4, half=False)
    quantizer = RTN(bits=2, group=24)
    fitted = []
    for _ in range(opened.layers):
        walk = calibrator.begin()
        fitted.append(walk.fit(lambda name, weight, stats: quantizer.fit(weight, stats)))
        walk.end()
    full = here = opened.embed(tokens)
    for i, matrices in enumerate(fitted):
        full = opened.block(i)(full)
        block = opened.block(i)
        for name, w in matrices.items():
            block.linears()[name].weight = w.dequantize()
        here = block(here)
    torch.testing.assert_close(calibrator.hidden.full, full)
    torch.testing.assert_close(calibrator.hidden.quantized, here)
    assert not torch.allclose(here, full)


def test_each_stage_sees_the_stages_before_it_quantized(tiny_model: Path) -> None:
    walk = Calibrator(CalibrationModel(open_weights(tiny_model)), rows(), half=False).begin()
    o_proj = walk.block.stages()[1][0]
    before = walk.stats(o_proj)
    seen = {}

    def fit(name: str, weight: torch.Tensor, stats: Stats) -> object:
        seen[name] = stats
        return RTN(bits=1, group=24).fit(weight)

    walk.fit(fit)  # type: ignore[arg-type]
    assert not torch.allclose(seen[o_proj].hessian, before.hessian)
    assert seen[o_proj].cross is not None


RESUMED = ("gptq:bits=3,group=24", "hbcq:bits=2,group=24", "auto:bits=3.5,steps=2", "atom:group=16,outliers=4")


@pytest.mark.parametrize("scheme", RESUMED)
@pytest.mark.sample(2)
def test_a_calibrated_run_that_died_ends_in_the_same_bytes(small_model: Path, tmp_path: Path, scheme: str) -> None:
    text = CalibrationData(text=TEXT, rows=4, length=32)
    quantize(small_model, tmp_path / "whole", scheme, text=text, device="cpu")

    def dying(done: int, total: int, note: str) -> None:
        if note == "model.layers.1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(small_model, tmp_path / "again", scheme, text=text, device="cpu", progress=dying)
    assert not (tmp_path / "again").exists()
    report = quantize(small_model, tmp_path / "again", scheme, text=text, device="cpu", resume=True)
    assert report.resumed_units == 4  # head, embedding, two layers
    files = {f.name: f.read_bytes() for f in (tmp_path / "whole").iterdir()}
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "again").iterdir()}


def test_another_text_is_not_the_same_run(tiny_model: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, note: str) -> None:
        raise KeyboardInterrupt

    scheme = "gptq:bits=3,group=24"
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_model, tmp_path / "q", scheme, text=CalibrationData(text=TEXT, rows=4, length=32), progress=stop)
    with pytest.raises(Exception, match="calibration"):
        quantize(tiny_model, tmp_path / "q", scheme, text=CalibrationData(text=TEXT, rows=3, length=32), resume=True)


def test_without_a_text_it_is_pythons_documentation(small_model: Path, tmp_path: Path) -> None:
    report = quantize(small_model, tmp_path / "q", "gptq:bits=3,group=24", device="cpu")
    assert (report.calibration_rows, report.own_sequences, report.effort) == (64, 0, None)


@pytest.mark.parametrize("bits", [1.9, 2.35, 3.1, 4.6])
@pytest.mark.sample(2)
def test_auto_stays_within_its_bits(tiny_model: Path, tmp_path: Path, bits: float) -> None:
    scheme = f"auto:bits={bits},steps=1"
    report = quantize(
        tiny_model, tmp_path / "q", scheme, text=CalibrationData(text=TEXT, rows=4, length=32), device="cpu"
    )
    assert bits - 0.9 < report.bits_per_weight <= bits
    assert Checkpoint(tmp_path / "q").scheme == scheme


def test_rows_of_a_text(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    all_rows = rows_of(tokenizer, TEXT, 40)
    assert all_rows.shape == (len(TEXT) // 39, 40)
    assert (all_rows[:, 0] == tokenizer.bos_id).all()
    some = rows_of(tokenizer, TEXT, 40, limit=5, seed=3)
    assert some.shape == (5, 40)
    assert torch.equal(some, rows_of(tokenizer, TEXT, 40, limit=5, seed=3))
    with pytest.raises(SchemeError, match="one sequence needs 39; use a longer text"):
        rows_of(tokenizer, "short", 40)


def test_the_model_writes_rows_that_a_seed_repeats(tiny_model: Path) -> None:
    model = build(open_weights(tiny_model), CPU)
    opening = rows(3, 4)
    written = sampled_rows(model, opening, 20, seed=5, batch=2)
    assert written.shape == (3, 20)
    assert torch.equal(written[:, :4], opening)
    assert torch.equal(written, sampled_rows(model, opening, 20, seed=5, batch=2))
    assert not torch.equal(written, sampled_rows(model, opening, 20, seed=6, batch=2))


SCHEMES = [
    "rtn:bits=3,group=24",
    "bcq:bits=2,group=24",
    "gptq:bits=3,group=24",
    "gptq:bits=2,group=24,free=true",
    "hbcq:bits=2,group=24",
    "awq:bits=4,group=24",
    "bcq-nested:bits=4,group=24",
    "auto:bits=2.9,steps=1",
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(2)
def test_the_bits_reported_are_the_bytes_on_disk(small_model: Path, tmp_path: Path, scheme: str) -> None:
    report = quantize(
        small_model, tmp_path / "q", scheme, text=CalibrationData(text=TEXT, rows=4, length=32), device="cpu"
    )
    checkpoint = Checkpoint(tmp_path / "q")
    coded = {m: spec for m, spec in checkpoint.specs.items() if spec["format"] != "dense"}
    assert coded.keys() == {m for m in checkpoint.specs if ".layers." in m}
    stored = 0
    for file in (tmp_path / "q").glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(file).items():
            if name.rpartition(".")[0] in coded:
                stored += tensor.numel() * tensor.element_size()
    weights = sum(prod(spec["shape"]) for spec in coded.values())
    assert report.bits_per_weight == pytest.approx(8 * stored / weights, rel=0.01)
