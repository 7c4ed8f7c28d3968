"""Experts in host memory, on the CPU: the kernels in the emulator, copies by a recorder that checks their order."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from plane_weights import random_weight
from torch import Tensor

from crelle.errors import CapacityError
from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.experts import host_memory, products, streaming
from crelle.kernels.cuda.experts.fused import FusedExperts
from crelle.kernels.cuda.experts.host_memory import ExpertOffload, HostKernel, share_slots, tensors_in
from crelle.kernels.cuda.experts.streaming import INTERVAL, LayerStream
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out
from crelle.kernels.reference import Reference
from crelle.kernels.spec import ExpertsSpec, MlpSpec

HALF, CPU = torch.float16, torch.device("cpu")
COUNT, TOP, WIDTH, INNER = 12, 2, 64, 24


@dataclass
class Fill:
    pairs: Sequence[tuple[Tensor, Tensor]]
    done: bool = False


class Recorder:
    """Transfers that end when a test says so; a slot that the table names is never written."""

    def __init__(self) -> None:
        self.table = torch.empty(0)
        self.fills = list[Fill]()
        self.offload: ExpertOffload | None = None  # as a model keeps it

    def counts(self, counts: Tensor, to: Tensor) -> Fill:
        to.copy_(counts)
        return Fill((), True)

    def fill(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Fill:
        self.check(pairs)  # already when the copy begins
        self.fills.append(Fill(pairs))
        return self.fills[-1]

    def publish(self, table: Tensor, rows: Sequence[int], values: Tensor) -> None:
        table[torch.tensor(rows)] = values

    def done(self, transfer: Fill) -> bool:
        return transfer.done

    def wait(self, transfer: Fill) -> None:
        self.end(transfer)

    def end(self, transfer: Fill) -> None:
        if not transfer.done:
            self.check(transfer.pairs)
            for to, block in transfer.pairs:
                to.copy_(block)
        transfer.done = True

    def check(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for to, _ in pairs:
            begin = to.data_ptr()
            assert not bool(((self.table >= begin) & (self.table < begin + to.numel())).any()), "a step may read it"

    def end_all(self) -> None:
        for transfer in self.fills:
            self.end(transfer)


def linear(w: Any, name: str) -> SimpleNamespace:
    problem = Problem("", w.N, w.K, 4, 128, "cpu", HALF)
    return SimpleNamespace(prepared=Prepared(problem, Reference(), w), bias=None, name=name)


def modules(seed: int, layer: int = 0, offload: ExpertOffload | None = None) -> SimpleNamespace:
    """Return a layer's modules; their experts are given to `offload` one by one, as a model's are."""
    torch.manual_seed(seed)
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    experts = []
    for _ in range(COUNT):
        made = {n: linear(lay_out(random_weight(ScaleKind.UNIFORM, 4, *s, 128)), n) for n, s in shapes.items()}
        experts.append(SimpleNamespace(**made))
        if offload is not None:
            offload.add(layer, COUNT, list(made.values()))
    router = SimpleNamespace(
        prepared=Prepared(Problem("", COUNT, WIDTH, 16, 1, "cpu", HALF), Reference(), torch.randn(COUNT, WIDTH).half()),
        bias=None,
    )
    return SimpleNamespace(router=router, experts=experts, shared=None, shared_gate=None, offload=offload, layer=layer)


def offload_of(room: int, free: int = 1 << 30, disk: Path | None = None) -> ExpertOffload:
    more: dict[str, Any] = {"used": lambda: 1, "pins": False, "reason": "a test", "disk": disk}
    return ExpertOffload(room, CPU, fits=0, host_free=lambda: free, **more)


SPEC = MlpSpec(inner=INNER, activation="silu", gated=True, experts=ExpertsSpec(count=COUNT, top=TOP))


def loaded(offload: ExpertOffload) -> ExpertOffload:
    modules(0, 0, offload)
    offload.finish()
    return offload


def block_bytes() -> int:
    return loaded(offload_of(1 << 30)).layers[0].block_bytes


def streamed(
    monkeypatch: pytest.MonkeyPatch, slots: int, layers: int = 1, disk: Path | None = None
) -> tuple[list[FusedExperts], Recorder]:
    """Return layers with this number of slots each, and with room for two experts in each half of the staging buffer.

    disk: a folder for the experts, for which host memory then has no room.
    """
    size = block_bytes()
    monkeypatch.setattr(host_memory, "STAGED", 2 * size)
    monkeypatch.setattr(host_memory, "SPILLS", disk is not None)
    recorder = Recorder()
    monkeypatch.setattr(streaming, "CudaTransfers", lambda device: recorder)
    offload = offload_of(1 + 4 * size + layers * slots * size, 1 << 30 if disk is None else 0, disk)
    mlps = [modules(10 + i, i, offload) for i in range(layers)]
    offload.finish()
    made = [FusedExperts(mlp, SPEC, HALF) for mlp in mlps]
    recorder.offload, recorder.table = offload, offload.streams.table
    return made, recorder


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (products, streaming, dense):
        monkeypatch.setattr(module, "load", EmulatedKernel)
    monkeypatch.setattr(products, "multiprocessors", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def where(layer: LayerStream) -> dict[int, int]:
    """Return the slot of each expert that the table has in one."""
    addresses = layer.e.table[:, layer._column].tolist()
    begin, size = layer.slots.data_ptr(), layer.block_bytes
    return {e: (a - begin) // size for e, a in enumerate(addresses) if begin <= a < begin + layer.slots.numel()}


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("slots", [0, 3, COUNT])
@pytest.mark.parametrize("rows", [6, 20])
def test_streamed_experts_have_the_bits_of_resident_ones(
    slots: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = FusedExperts(modules(10), SPEC, HALF)
    [experts], recorder = streamed(monkeypatch, slots)
    monkeypatch.setattr(FusedExperts, "takes_few", lambda self, rows: rows == 6)  # one row: not in the emulator
    assert experts.streamed is not None
    assert len(where(experts.streamed)) == slots
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH).half()
    for invariant in (False, True):
        assert torch.equal(experts(x, None, x, invariant), resident(x, None, x, invariant))
    monkeypatch.setattr(streaming, "MOST_GRAPHED", 4)
    with experts.streamed.streams.staging_prompts():  # rows above 4 are staged, two experts at a time
        for invariant in (False, True):
            assert torch.equal(experts(x, None, x, invariant), resident(x, None, x, invariant))
    assert bool(recorder.fills) == (slots < COUNT)


@needs_compiler
def test_experts_that_are_taken_most_get_the_slots_and_bits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run at every moment of an exchange: before, while the copy is under way, after."""
    resident = FusedExperts(modules(10), SPEC, HALF)
    [experts], recorder = streamed(monkeypatch, 2)
    monkeypatch.setattr(FusedExperts, "takes_few", lambda self, rows: True)
    layer = experts.streamed
    assert layer is not None
    torch.manual_seed(1)
    hot = torch.randn(1, WIDTH).half().expand(5, -1).contiguous()  # always the same token, so always the same experts
    chosen = set(products.route(resident._logits(hot, True), resident.experts)[0].flatten().tolist())
    wanted = resident(hot, None, hot)
    seen = list[int]()
    for step in range(40 * INTERVAL):
        layer.streams.before_step()
        seen.append(len(chosen & set(where(layer))))
        assert torch.equal(experts(hot, None, hot), wanted)
        if step % 5 == 4:
            recorder.end_all()
        if seen[-1] == 2:
            break
    assert set(where(layer)) == chosen
    assert seen[0] < 2
    assert layer.streams.swapped == 2 - seen[0]
    streams = layer.streams
    before = streams.uses
    for _ in range(2 * INTERVAL):
        streams.before_step()
        experts(hot, None, hot)
    assert streams.hits > 0
    assert streams.uses > before


@needs_compiler
def test_the_next_layer_is_staged_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [FusedExperts(modules(10 + i), SPEC, HALF) for i in range(2)]
    layers, recorder = streamed(monkeypatch, 3, 2)
    monkeypatch.setattr(streaming, "MOST_GRAPHED", 4)
    first, second = layers
    assert first.streamed is not None
    x = torch.randn(20, WIDTH).half() / 64  # random experts make it larger
    with first.streamed.streams.staging_prompts():
        y = first(x, None, x)
        begun = len(recorder.fills)
        assert sum(not fill.done for fill in recorder.fills) == 2  # of the second layer
        z = second(y, None, y)
    assert len(recorder.fills) == begun + 3  # nine experts are missing: five fills, of which two were begun
    assert y.isfinite().all()
    assert z.isfinite().all()
    assert torch.equal(y, resident[0](x, None, x))
    assert torch.equal(z, resident[1](y, None, y))


@needs_compiler
def test_uses_and_hits_are_counted() -> None:
    chosen = torch.tensor([[0, 3], [3, 5], [3, 0]], dtype=torch.int32)
    slots = torch.empty(2, 256, dtype=torch.uint8)
    table = torch.zeros(6, 9, dtype=torch.int64)
    table[3, 2], table[0, 2], table[5, 2] = slots.data_ptr(), slots.data_ptr() + 511, slots.data_ptr() + 512
    counts = torch.zeros(7, dtype=torch.int32)
    for _ in range(2):
        EmulatedKernel(*streaming.COUNT)((1, 1, 1), 256, chosen, table, counts, slots, 6, 6, 9, 2, 2, 256)
    assert counts.tolist() == [4, 0, 0, 6, 0, 2, 10]


def test_a_model_that_fits_is_not_touched() -> None:
    offload = ExpertOffload(100, CPU, fits=100, host_free=lambda: 0, used=lambda: 100, pins=False)
    mlp = modules(0, 0, offload)
    before = [linear.prepared for expert in mlp.experts for linear in vars(expert).values()]
    offload.finish()
    after = [linear.prepared for expert in mlp.experts for linear in vars(expert).values()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert not offload.active
    assert offload.gpu_bytes == offload.host_bytes == 0


def test_experts_move_to_host_memory_when_the_gpu_is_full_and_keep_their_bytes() -> None:
    size = block_bytes()
    loaded = 0
    offload = ExpertOffload(
        (2 * COUNT + 5) * size,
        CPU,
        fits=3 * size,
        host_free=lambda: 1 << 30,
        used=lambda: 0 if offload.active else loaded * size,
        pins=False,
    )
    wanted = [list(tensors_in(x.prepared.data)) for e in modules(3).experts for x in vars(e).values()]
    mlp = SimpleNamespace(experts=[])
    for expert in modules(3).experts:
        loaded += 1
        offload.add(0, COUNT, list(vars(expert).values()))
        mlp.experts.append(expert)
        assert offload.active == (loaded > 3)
        assert len(offload.layers[0].blocks) == (loaded if loaded > 3 else 0)
    offload.finish()
    found = [x.prepared for e in mlp.experts for x in vars(e).values()]
    assert all(isinstance(p.kernel, HostKernel) for p in found)
    for p, tensors in zip(found, wanted, strict=True):
        for a, b in zip(tensors_in(p.data), tensors, strict=True):
            assert torch.equal(a, b)
            assert a.data_ptr() % host_memory.ALIGNMENT == 0
    addresses = sorted(block.data_ptr() for block in offload.layers[0].blocks)
    assert np.diff(addresses).min() >= size


@pytest.mark.parametrize(
    ("room", "free", "spills", "said"),
    [
        (1 << 30, 10, False, "fit neither the GPU (a test) nor host memory: those of the next layer"),
        (1 << 30, 10, True, "fit neither the GPU (a test) nor host memory nor the disk"),
        (10, 1 << 30, False, "only 1e-08 GB are left for weights"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    room: int, free: int, spills: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "SPILLS", spills)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CapacityError) as error:
        loaded(offload_of(room, free, tmp_path))
    assert said in str(error.value)


def test_slots_are_shared_out_evenly_within_the_room() -> None:
    layers = [(128, 100), (128, 100), (64, 300)]
    for left in (0, 99, 100, 5000, 12345, 44800, 10**6):
        slots = share_slots(left, layers)
        assert sum(n * size for n, (_, size) in zip(slots, layers, strict=True)) <= left
        shares = [n / count for n, (count, _) in zip(slots, layers, strict=True)]
        assert max(shares) - min(shares) <= 1 / 64 + 1 / 128
        assert all(n <= count for n, (count, _) in zip(slots, layers, strict=True))
    assert share_slots(10**6, layers) == [128, 128, 64]


@needs_compiler
def test_tokens_of_a_batch_share_what_is_read_over_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    [experts], _ = streamed(monkeypatch, 3)
    assert [experts.takes_few(rows) for rows in (1, 2, 6)] == [True, False, False]
    assert FusedExperts(modules(10), SPEC, HALF).takes_few(6)


@needs_compiler
@pytest.mark.parametrize("slots", [0, 5])
def test_experts_on_disk_are_read_if_they_are_chosen(
    slots: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resident = FusedExperts(modules(10), SPEC, HALF)
    [experts], recorder = streamed(monkeypatch, slots, disk=tmp_path)
    layer = experts.streamed
    assert layer is not None
    assert layer.streams.on_disk
    assert not list(tmp_path.iterdir())  # the file has no name
    x = torch.randn(5, WIDTH).half()
    chosen = set(products.route(resident._logits(x, True), resident.experts)[0].flatten().tolist())
    for invariant in (False, True):
        recorder.fills.clear()
        assert torch.equal(experts(x, None, x, invariant), resident(x, None, x, True))
        read = [block.data_ptr() for fill in recorder.fills for _, block in fill.pairs]
        assert sorted(read) == sorted(layer.blocks[e].data_ptr() for e in chosen - set(layer.policy.resident))
    assert not experts.takes_few(1)


def test_dropping_a_model_frees_its_slots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    [experts], recorder = streamed(monkeypatch, 3)
    assert experts.streamed is not None
    alive = [weakref.ref(experts.streamed.streams), weakref.ref(experts.streamed), weakref.ref(recorder.offload)]
    gc.disable()
    try:
        recorder.offload = None
        del experts
        assert [ref() for ref in alive] == [None, None, None]
    finally:
        gc.enable()
