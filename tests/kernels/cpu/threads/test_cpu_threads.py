"""Threads that share a decoder, a weight or activations: right results, and nothing is ever written outside a cache.

Every cache here is a view into a larger buffer whose other elements hold a sentinel. `make sanitize` and `make tsan`
run this file on builds of the C++ core that watch memory and races themselves.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_model
from sampled_cases import share_of
from torch import Tensor

from crelle.formats.bcq import UniformTensor
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cpu import available
from crelle.kernels.cpu.kernel import Cpu

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from cpu_models import open_model, quantize, some_tokens, take_apart

from crelle.kernels.cpu import core
from crelle.kernels.cpu.fused_decoder import Cache, FusedDecoder, Paged
from crelle.models.decoder import DecoderModel

pytestmark = pytest.mark.usefixtures("threads_as_before")

PAD = 4096  # elements of sentinel on either side of an array
SENTINEL = 77  # a value of any dtype that no test writes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    to = tmp_path_factory.mktemp("threads")
    path = quantize(
        write_tiny_model(to / "m"),
        to / "q",
        "bcq:bits=2,group=24",
        {"*.q_proj": "rtn:bits=4,group=72", "*.o_proj": "mixed", "*.gate_proj": "mixed"},
    )
    return open_model(path)


class Guarded:
    """Arrays between sentinels."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        n = torch.Size(shape).numel()
        buffer = torch.full((n + 2 * PAD,), SENTINEL, dtype=dtype)
        buffer[PAD : PAD + n] = 0
        self._buffers.append((buffer, n))
        return buffer[PAD : PAD + n].view(shape)

    def overwritten(self) -> int:
        """Elements outside of all arrays that do not hold the sentinel any more."""
        ends = [end for buffer, n in self._buffers for end in (buffer[:PAD], buffer[PAD + n :])]
        return sum(int((end != SENTINEL).sum()) for end in ends)

    def blocks(self, model: DecoderModel, capacity: int, dtype: torch.dtype, rows: int = 1) -> list[Tensor]:
        c = model.spec
        return [self.new((2, rows, c.kv_heads, capacity, c.head_size), dtype) for _ in c.layers]

    def pages(self, model: DecoderModel, text: str, tokens: int) -> Paged:
        fmt, c = KVFormat.parse(text), model.spec
        count = -(-tokens // fmt.page)
        layers = []
        for _ in c.layers:
            like = KVPages.new(fmt, count, c.kv_heads, c.head_size, torch.float16, "cpu")
            parts = dict(zip(("codes", "words"), like.tensors(), strict=False))
            layers.append(replace(like, **{n: self.new(tuple(t.shape), t.dtype) for n, t in parts.items()}))
        table = torch.arange(count, dtype=torch.int32).flip(0).repeat(2, 1).contiguous()  # of two rows that are one
        return Paged(layers, table)


def sequence(decoder: FusedDecoder, kv: Cache, tokens: Tensor, prompt: int) -> Tensor:
    """Logits of a prompt's last token and of each further one."""
    found = [decoder.prefill(tokens[:prompt], 0, kv)]
    for i in range(prompt, len(tokens)):
        found.append(decoder.step(tokens[i : i + 1], torch.tensor([i]), kv))
    return torch.cat(found)


@pytest.fixture
def together() -> Callable[..., None]:
    """Run functions in threads, again and again for some seconds; the first exception of any of them is raised."""
    seconds = share_of(6) / 3

    def run(*work: Callable[[], Any]) -> None:
        end, failed, begin = time.monotonic() + seconds, threading.Event(), threading.Barrier(len(work))

        def loop(one: Callable[[], Any]) -> None:
            begin.wait()
            try:
                while time.monotonic() < end and not failed.is_set():
                    one()
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(len(work)) as threads:
            for done in [threads.submit(loop, one) for one in work]:
                done.result()

    return run


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_with_caches_of_their_own(threads: int, model: DecoderModel, together: Callable[..., None]) -> None:
    """Steps and prompts over caches of all kinds and sizes at once give what each gives alone."""
    core().set_threads(threads)
    decoder, guarded = FusedDecoder(take_apart(model)), Guarded()
    plans: list[tuple[int, Callable[[], Cache]]] = [
        (9, lambda: guarded.blocks(model, 9, torch.float32)),
        (90, lambda: guarded.blocks(model, 96, torch.float32)),
        (33, lambda: guarded.blocks(model, 40, torch.float16)),
        (70, lambda: guarded.pages(model, "kv16", 70)),
        (50, lambda: guarded.pages(model, "kv8:center=false", 50)),
        (24, lambda: guarded.pages(model, "kv4:center=false,page=5", 24)),
    ]

    def check(kv: Cache, tokens: Tensor, wanted: Tensor) -> Callable[[], None]:
        def one() -> None:
            assert torch.equal(sequence(decoder, kv, tokens, 5), wanted)

        return one

    work = []
    for seed, (length, make) in enumerate(plans):
        tokens, kv = some_tokens(1, length, seed=seed)[0], make()
        work.append(check(kv, tokens, sequence(decoder, kv, tokens, 5)))
    try:
        together(*work)
    finally:
        assert guarded.overwritten() == 0


def test_timing_and_threads_may_change_meanwhile(model: DecoderModel, together: Callable[..., None]) -> None:
    decoder, guarded = FusedDecoder(take_apart(model)), Guarded()
    tokens, kv = some_tokens(1, 20)[0], guarded.blocks(model, 20, torch.float32)
    wanted = sequence(decoder, kv, tokens, 5)
    counts = iter(range(10**9))

    def change() -> None:
        core().set_threads(1 + next(counts) % 3)
        decoder.time_phases(next(counts) % 2 == 0)
        assert min(decoder.phases().values()) >= 0
        assert min(decoder.prefill_phases().values()) >= 0
        time.sleep(0.001)

    def same() -> None:
        assert torch.equal(sequence(decoder, kv, tokens, 5), wanted)

    together(same, change)
    assert guarded.overwritten() == 0


@pytest.mark.parametrize("what", ["table", "position", "token", "row", "want"])
def test_arrays_that_change_during_a_call_lead_nowhere(
    what: str, model: DecoderModel, together: Callable[..., None]
) -> None:
    """A call sees a good value or refuses a bad one; it never acts on one that it did not check."""
    decoder, guarded = FusedDecoder(take_apart(model)), Guarded()
    paged = guarded.pages(model, "kv16", 32)
    kv: Cache = paged if what == "table" else guarded.blocks(model, 32, torch.float32, rows=2)
    given = {
        "token": torch.tensor([3, 4]),
        "position": torch.tensor([17, 18]),
        "row": torch.tensor([1, 1]),
        "want": torch.tensor([1]),
        "table": paged.table,
    }
    good, wild = {  # what lies beyond is within the sentinels, so that a run without the checks fails and lives
        "token": (3, 300),
        "position": (17, 40),
        "row": (1, 2),
        "want": (1, 9),
        "table": (int(paged.table[1, 1]), 3),
    }[what]
    at = (1, 1) if what == "table" else 0
    array, seen = given[what].numpy(), set[str]()

    def flip() -> None:
        for _ in range(1000):
            array[at] = wild
            array[at] = good

    def step() -> None:
        try:
            where = {"rows": given["row"], "want": given["want"]}
            decoder.step(given["token"], given["position"], kv, **where)
            seen.add("taken")
        except ValueError as e:
            seen.add(str(e))

    together(step, flip)
    array[at] = good
    assert guarded.overwritten() == 0
    assert "taken" in seen
    assert len(seen) <= 2


def weight(N: int, K: int, seed: int = 0) -> Any:
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Cpu().prepare(UniformTensor.from_codes(codes, 4, torch.full((N, K // 64), 0.5), None, 64), torch.float32)


def test_products_while_threads_and_instruction_sets_change(together: Callable[..., None]) -> None:
    kernel, w, before = Cpu(), weight(130, 256), core().isa()
    xs = [torch.randn(m, 256) for m in (1, 3, 30)]
    counts = iter(range(10**9))

    def product(x: Tensor, wanted: Tensor) -> Callable[[], None]:
        def one() -> None:
            assert torch.equal(kernel.run(x, w), wanted)

        return one

    def change() -> None:
        core().set_threads(1 + next(counts) % 4)
        core().set_isa(core().isas()[next(counts) % len(core().isas())])
        assert core().threads() >= 1
        time.sleep(0.0005)

    try:
        together(*(product(x, kernel.run(x, w)) for x in xs), change)
    finally:
        core().set_isa(before)


def test_shared_activations(together: Callable[..., None]) -> None:
    """Who prepares them anew waits for those who multiply; a product is one of what was prepared, never a mixture."""
    shared, w = core().Activations(), weight(130, 256)
    xs = [torch.randn(m, 256) for m in (2, 2, 40)]
    wanted = []
    for x in xs:
        shared.prepare(x.numpy(), w.data, "exact")
        wanted.append(torch.empty(len(x), 130))
        shared.matmul(w.data, wanted[-1].numpy())
    shared.prepare(xs[0].numpy(), w.data, "exact")
    counts = iter(range(10**9))

    def prepare() -> None:
        shared.prepare(xs[next(counts) % 3].numpy(), w.data, "exact")

    def multiply(M: int) -> Callable[[], None]:
        def one() -> None:
            y = torch.full((M, 130), float("nan"))
            try:
                shared.matmul(w.data, y.numpy())
            except ValueError:  # prepared for another number of rows
                return
            assert any(torch.equal(y, known) for known in wanted)

        return one

    together(prepare, multiply(2), multiply(40))


def test_a_cache_of_another_model_is_refused(model: DecoderModel, tmp_path: Path) -> None:
    other = open_model(write_tiny_model(tmp_path / "m", num_key_value_heads=3))
    kv = Guarded().blocks(other, 8, torch.float32)
    bound = FusedDecoder(take_apart(other))._core.blocks(kv)
    one = torch.zeros(1, dtype=torch.int64).numpy()
    with pytest.raises(ValueError, match="other sizes"):
        FusedDecoder(take_apart(model))._core.step(bound, one, one, None, None, torch.zeros(1, 259).numpy())
