"""Threads that share a model: each gets what it gets alone."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.formats.storage.open import open_weights
from crelle.kernels.cpu.executor import CpuExecutor
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.kernels.executor import Chunk
from crelle.models.builder import Builder
from crelle.models.eager_executor import EagerExecutor
from crelle.models.loader import Model, build
from crelle.quantizers.pipeline import quantize


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("shared") / "q"
    quantize(tiny_model, path, "rtn:bits=4,group=24")
    return build(open_weights(path), torch.device("cpu"))


def in_threads(work: list[Callable[[], Any]], rounds: int) -> list[list[Any]]:
    begin = threading.Barrier(len(work))

    def loop(one: Callable[[], Any]) -> list[Any]:
        begin.wait()
        return [one() for _ in range(rounds)]

    with ThreadPoolExecutor(len(work)) as threads:
        return [done.result() for done in [threads.submit(loop, one) for one in work]]


@pytest.mark.parametrize("kv", [16, "kv8", "kv4"])
def test_forward_passes_with_caches_of_their_own(kv: int | str, model: Model) -> None:
    def sequence(length: int) -> Tensor:
        tokens, cache = (torch.arange(length) + 3 * length) % 250, model.new_cache(1, kv=kv)
        first = model(tokens[None, :-6], cache, last=True)
        return torch.cat([first, *(model(t.view(1, 1), cache) for t in tokens[-6:])])

    lengths = [7, 12, 40, 75]
    wanted = [sequence(n) for n in lengths]
    found = in_threads([lambda n=n: sequence(n) for n in lengths], rounds=12)  # type: ignore[misc]
    for one, results in zip(wanted, found, strict=True):
        assert all(torch.equal(one, y) for y in results)


@pytest.mark.parametrize("core", [True, False])
def test_batches_of_one_executor(core: bool, model: Model) -> None:
    s = model.spec
    layers = [KVPages.new(KVFormat(16), 24, s.kv_heads, s.head_size, torch.float32, "cpu") for _ in s.layers]
    none = [None] * len(s.layers)
    if core and not isinstance(model.decoder, FusedDecoder):
        pytest.skip("has no step in C++")
    executor: Any = (
        CpuExecutor(model.decoder, layers)
        if core and isinstance(model.decoder, FusedDecoder)
        else EagerExecutor(model, layers, none)
    )

    def batch(seat: int, length: int) -> Tensor:
        pages = list(range(6 * seat, 6 * seat + 6))
        tokens = [(7 * i + seat) % 250 for i in range(length)]
        first = executor.run([Chunk(tokens, 0, pages, True, prompt=length)])
        then = executor.run([Chunk([5], length, pages, True, prompt=length)])
        return torch.cat([first, then])

    plans = [(0, 5), (1, 18), (2, 60), (3, 33)]
    wanted = [batch(*plan) for plan in plans]
    found = in_threads([lambda p=p: batch(*p) for p in plans], rounds=8)  # type: ignore[misc]
    for one, results in zip(wanted, found, strict=True):
        assert all(torch.equal(one, y) for y in results)


def test_what_precisions_share_is_made_once(tiny_model: Path) -> None:
    """However many threads build precisions of a nested checkpoint at the same time."""
    weights = open_weights(tiny_model)
    builder = Builder(weights, frozenset(weights.names()), torch.float32, torch.device("cpu"), None, made={})
    slow = threading.Barrier(4, timeout=1.0)

    def make() -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            slow.wait()  # for all four, who never come where one makes it for all
        return object()

    found = in_threads([lambda: builder._once("it", make)] * 4, rounds=1)
    assert len({id(one) for (one,) in found}) == 1
