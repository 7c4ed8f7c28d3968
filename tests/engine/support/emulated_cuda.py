"""The engine's CUDA path on a CPU: everything of it but the kernels, which a CPU's executor stands in for.

    host      ModelRunner.start, CudaExecutor.run and sample, GraphInputs, PendingTokens: as on a GPU
    decode    a graph that reads nothing but GraphInputs' buffers: ids, token sources, positions, page tables
    prefill   the chunks, as they come
    greedy    torch.argmax in place of embed_argmax.cu; like the driver, it refuses an empty grid

So tokens must be those of the CPU's own executor, and whatever the host does wrong between steps shows in them.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_gpu import Event
from torch import Tensor

from crelle.engine import model_runner
from crelle.engine.speculation import draft_model
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.step import embed_argmax
from crelle.kernels.cuda.step.graph_inputs import bucket_of
from crelle.kernels.executor import Chunk, Executor
from crelle.models.cache import key_centers_of
from crelle.models.executors import make_executor


class _Graph:
    """A decode step of up to `bucket` sequences, over what the buffers hold."""

    def __init__(self, executor: "EmulatedExecutor", bucket: int) -> None:
        self._executor, self._bucket = executor, bucket

    def run_padding(self) -> None:
        self._executor._inputs.fill([], self._bucket)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        inputs, page = self._executor._inputs, self._executor.pages[0].format.page
        inputs.fill(chunks, self._bucket)
        seen = []
        for i, chunk in enumerate(chunks):
            source, start = int(inputs.token_source[i]), int(inputs.at[0, i])
            token = int(inputs.argmax.ids[source] if source >= 0 else inputs.ids[i])
            pages = inputs.table[i, : start // page + 1].tolist()
            seen.append(replace(chunk, ids=[token], start=start, pages=pages, token_source=-1, wanted=True))
        pairs = pairwise(seen)  # where some are of one sequence, a GPU appends all before any attends
        several = any(b.start == a.start + 1 and b.pages[: len(a.pages)] == a.pages for a, b in pairs)
        found = [self._executor.on_cpu.run([one]) for one in seen] if several else [self._executor.on_cpu.run(seen)]
        inputs.logits[: len(chunks)] = torch.cat(found)
        return inputs.logits[: len(chunks)]


class EmulatedExecutor(CudaExecutor):
    """A CudaExecutor whose layers run on the CPU."""

    def __init__(self, on_cpu: Executor, model: Any, layers: Sequence[KVPages], centers: Any, **options: Any) -> None:
        step: Any = SimpleNamespace(before=lambda: None, streams=None)  # nothing is packed
        super().__init__(model, layers, centers, step=step, **options)
        self.on_cpu, self.prefill_differs = on_cpu, on_cpu.prefill_differs

    def graph(self, rows: int, verifies: bool = False) -> Any:
        return _Graph(self, bucket_of(rows))

    def _prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, list[int]]:
        assert all(chunk.token_source < 0 for chunk in chunks)
        return self.on_cpu.run(chunks), [i for i, chunk in enumerate(chunks) for _ in range(chunk.rows)]


def _load(file: str, expression: str) -> Any:
    assert expression.startswith("crelle::greedy")

    def greedy(grid: tuple[int, int, int], block: int, logits: Tensor, ids: Tensor, *others: Any) -> None:
        if min(grid) < 1:
            raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: {expression} with grid {grid}")
        made, *_ = others
        largest, best = logits.max(-1)
        ids[: grid[1]] = best
        made[: grid[1]] = torch.where(largest.isfinite(), best, embed_argmax.NOT_FINITE)

    return greedy


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that are made from now on believe that they run on a GPU."""

    def make(model: Any, layers: Sequence[KVPages], kv: KVFormat, *, batch_invariant: bool) -> EmulatedExecutor:
        on_cpu = make_executor(model, layers, kv, batch_invariant=batch_invariant)
        centers = key_centers_of(model.key_centers if kv.centered else None, layers)
        return EmulatedExecutor(on_cpu, model, layers, centers, batch_invariant=batch_invariant)

    for module in (model_runner, draft_model):
        monkeypatch.setattr(module, "make_executor", make)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(embed_argmax, "load", _load)
