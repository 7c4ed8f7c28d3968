"""What the graphs of executor.py read and write, on the device and on the host: token ids, positions, page tables."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from crelle.kernels.cuda.step.embed_argmax import Argmax
from crelle.kernels.executor import Chunk

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)
MAX_POSITIONS = 1 << 22  # of the tables of angles, which are made for the whole context: 2 GiB for heads of 128
MAX_SAMPLES = 1024  # tokens that `CudaExecutor.sample` can take at a time


def bucket_of(rows: int) -> int:
    """Return the smallest bucket for so many rows, or the largest one."""
    return next((b for b in BUCKETS if b >= rows), BUCKETS[-1])


class PendingTokens:
    """Tokens on their way to the host; below 0 where logits were not finite."""

    def __init__(self, found: Tensor, to: Tensor) -> None:
        """Have int64 `found` copied to pinned memory."""
        self._tokens, self._there = to[: len(found)], torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._tokens.copy_(found, non_blocking=True)
        self._there.record()

    def tokens(self) -> list[int]:
        """Wait for them."""
        self._there.synchronize()
        return self._tokens.tolist()


class GraphInputs:
    """What the graphs of all buckets read, on the device and as it is filled on the host."""

    def __init__(self, rows: int, width: int, vocabulary: int, device: torch.device) -> None:
        # One buffer on each side, so that a step's inputs are one copy: ids, token sources, positions, page tables.
        self._table_at, i64, i32 = rows * (8 + 8 + 4 + 4), torch.int64, torch.int32
        self._device = torch.zeros(self._table_at + 4 * rows * width, dtype=torch.uint8, device=device)
        self._host = torch.zeros_like(self._device, device="cpu").pin_memory()

        def both(at: int, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            part = slice(at, at + prod(shape) * dtype.itemsize)
            return tuple(t[part].view(dtype).view(shape) for t in (self._device, self._host))  # type: ignore[return-value]

        self.ids, self._ids = both(0, rows, dtype=i64)
        self.token_source, self._token_source = both(8 * rows, rows, dtype=i64)
        self.at, self._at = both(16 * rows, 2, rows, dtype=i32)  # position; length: one more, or 0
        self.table, self._table = both(self._table_at, rows, width, dtype=i32)
        self.argmax = Argmax(MAX_SAMPLES, device)
        self.logits = torch.empty(rows, vocabulary, device=device)  # of the graph that ran last
        self.sampled = torch.zeros(2, MAX_SAMPLES, dtype=torch.int64).pin_memory()  # two steps may be under way
        self._rows: list[Sequence[int]] = [()] * rows  # what the host's table holds
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, chunks: Sequence[Chunk], bucket: int) -> None:
        """Copy a step's inputs to the device; rows behind the chunks, up to the bucket, are padding (position -1)."""
        self._copied.synchronize()  # the host's side is free
        n = len(chunks)
        ids, at, table = self._ids.numpy(), self._at.numpy(), self._table.numpy()
        ids[:n], ids[n:bucket] = [c.ids[0] for c in chunks], 0
        self._token_source.numpy()[:n] = [c.token_source for c in chunks]
        self._token_source.numpy()[n:bucket] = -1
        before = [c.start for c in chunks]
        at[0, :n], at[0, n:bucket], at[1, n:bucket] = before, -1, 0
        at[1, :n] = at[0, :n] + 1
        for i, c in enumerate(chunks):
            if c.pages != self._rows[i]:
                table[i, : len(c.pages)] = c.pages
                self._rows[i] = list(c.pages)
        used = self._table_at + 4 * n * table.shape[1]
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        self._copied.record()
