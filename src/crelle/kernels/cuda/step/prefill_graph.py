"""Prefill as CUDA graphs: the host's work for a chunk of a prompt does not grow with the number of layers.

A graph is captured for a bucket of rows, of sequences and of keys; what a step has less of is padding:

    rows        new tokens of all prompts, ROWS; rows of padding belong to one more sequence, at position -1
    sequences   prompts, SEQUENCES; those that are not there have no tokens
    keys        tokens that these prompts have in all, which attention reads: as many as rows for fresh prompts

Longer prefills run without a graph: the GPU takes longer for them than the host does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from crelle.kernels.cuda.step.graphs import capture
from crelle.kernels.executor import Chunk

ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
SEQUENCES = (1, 16)
KEYS = 4096  # that a bucket has where prompts are not fresh, or as many as the longest sequence has
CAPTURED_AT = 2  # uses of a bucket: a graph costs what some prefills cost


@dataclass(frozen=True, slots=True)
class PrefillBucket:
    """What a graph is captured for."""

    rows: int
    sequences: int
    keys: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], longest: int) -> "PrefillBucket | None":
        """Return the smallest bucket for some chunks, or None if they run without a graph; longest: see KEYS."""
        new = sum(len(c.ids) for c in chunks)
        total = new + sum(c.start for c in chunks)
        rows = next((n for n in ROWS if n >= new), None)
        sequences = next((n for n in SEQUENCES if n >= len(chunks)), None)
        if rows is None or sequences is None:
            return None
        keys = rows if total <= rows else min(KEYS, longest)  # for more no memory was planned
        return cls(rows, sequences, keys) if total <= keys else None


class PrefillInputs:
    """What prefill reads, on the device; `fill` copies it there from pinned memory."""

    def __init__(self, bucket: PrefillBucket, width: int, device: torch.device) -> None:
        n, s = bucket.rows, bucket.sequences
        sizes = {
            "positions": n,
            "before": s + 1,
            "offsets": s + 2,
            "new": s + 1,
            "all": s + 1,
            "table": (s + 1) * width,
        }
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32).pin_memory()
        self._ids = torch.zeros(n + s, dtype=torch.int64).pin_memory()
        on_device, ids = self._host.to(device), self._ids.to(device)
        self._to = on_device, ids
        views, self._views = (
            dict(zip(sizes, torch.split(t, list(sizes.values())), strict=True)) for t in (on_device, self._host)
        )
        self.ids, self.last = ids[:n], ids[n:]
        self.positions, self.before, self.offsets = views["positions"], views["before"], views["offsets"]
        self.new, self.all, self.table = views["new"], views["all"], views["table"].view(s + 1, width)
        self._bucket, self._width, self._copied = bucket, width, torch.cuda.Event()  # type: ignore[no-untyped-call]

    def by_rows(self) -> tuple[Tensor, Tensor]:
        """Return each row's pages int32 [rows, width] and tokens int32 [rows], as if it were a sequence of its own."""
        row = torch.arange(self._bucket.rows, dtype=torch.int32, device=self.offsets.device)
        owner = torch.searchsorted(self.offsets[1:-1], row, right=True)  # padding: the sequence behind all others
        return self.table[owner], (self.positions + 1).masked_fill(owner == self._bucket.sequences, 0)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Copy what some chunks need to the device; the rest is padding."""
        self._copied.synchronize()  # the host's side is free
        n, s, mine = self._bucket.rows, self._bucket.sequences, {k: v.numpy() for k, v in self._views.items()}
        ids, lengths = self._ids.numpy(), [len(c.ids) for c in chunks]
        ends, totals = list(accumulate(lengths)), list(accumulate(c.start + len(c.ids) for c in chunks))
        used, missing = ends[-1], s - len(chunks)
        ids[:used], ids[used:n] = [i for c in chunks for i in c.ids], 0
        ids[n:], ids[n : n + len(chunks)] = 0, [end - 1 for end in ends]
        mine["positions"][:used], mine["positions"][used:] = [c.start + i for c in chunks for i in range(len(c.ids))], 0
        mine["before"][:] = [*(c.start for c in chunks), *[0] * missing, -1]
        mine["offsets"][:] = [0, *ends, *[used] * missing, n]
        mine["new"][:] = [0, *ends, *[used] * missing]
        mine["all"][:] = [0, *totals, *[totals[-1]] * missing]
        table = mine["table"].reshape(s + 1, self._width)
        for row, c in zip(table, chunks, strict=False):
            row[: len(c.pages)] = c.pages
        for to, host in zip(self._to, (self._host, self._ids), strict=True):
            to.copy_(host, non_blocking=True)
        self._copied.record()


class PrefillGraph:
    """One bucket: run kernel by kernel at first, then captured. Shapes, and so the bits, are the same either way."""

    def __init__(self, bucket: PrefillBucket, width: int, device: torch.device, logits: Tensor) -> None:
        """logits: f32 [sequences, V], outside of any graph's memory: a later graph must not overwrite them."""
        self.inputs, self._logits = PrefillInputs(bucket, width, device), logits[: bucket.sequences]
        self.graph: torch.cuda.CUDAGraph | None = None
        self._uses = 0

    def run(self, chunks: Sequence[Chunk], compute: Callable[[PrefillInputs], Tensor], pool: Any) -> Tensor:
        """Return logits f32 [chunks, V] of their last tokens; the next prefill overwrites them.

        compute(inputs) -> logits [sequences, V]; pool: of graphs, whose memory this one shares.
        """
        self.inputs.fill(chunks)
        self._uses += 1
        if self.graph is not None:
            self.graph.replay()
        elif self._uses < CAPTURED_AT:
            self._logits.copy_(compute(self.inputs))
        else:  # which computes, too
            self.graph, _ = capture(lambda: self._logits.copy_(compute(self.inputs)), pool=pool)
        return self._logits[: len(chunks)]
