"""Executors of the models as they are: each runs a batch of chunks over the pages of one runner.

CudaGraphs   a GPU: CUDA graphs for one token each, prompts as they come (crelle.models.batched_cuda)
FusedStep    a CPU: the C++ step, up to 16 tokens of any sequences in one call (crelle.kernels.cpu.decoder)
Eager        any device: layer by layer in torch (crelle.models.batched)
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from crelle.formats.kv import KVPages
from crelle.kernels.cpu.decoder import MAX_ROWS, Decoder, Paged
from crelle.kernels.executor import Chunk
from crelle.models.batched import Batched, View
from crelle.models.batched_cuda import CudaBatch
from crelle.models.step_buffers import Drawn, Part

Centers = Sequence[Tensor | None]


class CudaGraphs:
    """Runs on a GPU; can sample the likeliest tokens there."""

    prefill_differs = False

    def __init__(self, batch: CudaBatch) -> None:
        self.batch = batch

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return logits f32 [wanted chunks, V]; the next call overwrites them."""
        return self.batch([Part(c.ids, c.start, c.pages, c.wanted, c.token_source) for c in chunks])

    def sample(self, logits: Tensor) -> Drawn:
        """Take the likeliest token of each row; the next call may refer to them (`Chunk.token_source`)."""
        return self.batch.draw(logits)


class FusedStep:
    """Runs one C++ call for every 16 tokens."""

    prefill_differs = False

    def __init__(self, decoder: Decoder, layers: Sequence[KVPages], centers: Centers) -> None:
        self._decoder, self._layers = decoder, layers
        self._centers = [c for c in centers if c is not None]

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return logits f32 [wanted chunks, V]."""
        if len(chunks) <= MAX_ROWS and all(len(c.ids) == 1 for c in chunks):
            return self._step(chunks)
        pieces = list[Chunk]()  # of at most 16 tokens, in order
        for c in chunks:
            for at in range(0, len(c.ids), MAX_ROWS):
                ids = c.ids[at : at + MAX_ROWS]
                pieces.append(Chunk(ids, c.start + at, c.pages, c.wanted and at + MAX_ROWS >= len(c.ids)))
        found, batch, tokens = list[Tensor](), list[Chunk](), 0
        for piece in pieces:
            if tokens + len(piece.ids) > MAX_ROWS:
                found.append(self._step(batch))
                batch, tokens = [], 0
            batch.append(piece)
            tokens += len(piece.ids)
        return torch.cat([*found, self._step(batch)])

    def _step(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run at most 16 tokens."""
        if len(chunks) == 1 and len(chunks[0].ids) == 1:
            c = chunks[0]
            ids, at = torch.tensor(c.ids), torch.tensor([c.start])
            want = None if c.wanted else torch.empty(0, dtype=torch.long)
            return self._decoder.step(ids, at, self._paged([c.pages]), want=want)
        ids = torch.tensor([i for c in chunks for i in c.ids])
        at = torch.tensor([p for c in chunks for p in range(c.start, c.end)])
        rows = torch.tensor([row for row, c in enumerate(chunks) for _ in c.ids])
        ends = accumulate(len(c.ids) for c in chunks)
        want = torch.tensor([end - 1 for c, end in zip(chunks, ends, strict=True) if c.wanted], dtype=torch.long)
        return self._decoder.step(ids, at, self._paged([c.pages for c in chunks]), rows=rows, want=want)

    def _paged(self, pages: Sequence[Sequence[int]]) -> Paged:
        return Paged(self._layers, block_table(pages), self._centers)


class Eager:
    """Runs layer by layer."""

    prefill_differs = False

    def __init__(self, batched: Batched, layers: Sequence[KVPages], centers: Centers) -> None:
        self._batched, self._layers, self._centers = batched, layers, centers

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return logits f32 [wanted chunks, V]."""
        starts = [0, *accumulate(len(c.ids) for c in chunks)]
        table = block_table([c.pages for c in chunks]).to(self._batched.model.device)
        before = [c.start for c in chunks]
        view = View(self._layers, table, starts, before, self._centers, self._batched.exact)
        wanted = [end - 1 for c, end in zip(chunks, starts[1:], strict=True) if c.wanted]
        return self._batched([i for c in chunks for i in c.ids], view, wanted)


def block_table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return int32 [B, max_pages]; behind a row's last page stands 0, which is never read."""
    if len(rows) == 1:
        return torch.from_numpy(np.array(rows, dtype=np.int32))
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int32)
