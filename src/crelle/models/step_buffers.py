"""What the graphs of batched_cuda.py read and write, on the device and on the host: who runs, and what was drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.kernels.cuda.embed_argmax import Argmax

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)
DRAWS = 1024  # tokens that `CudaBatch.draw` can take at a time


def bucket_of(rows: int) -> int:
    """Return the smallest bucket for so many rows, or the largest one."""
    return next((b for b in BUCKETS if b >= rows), BUCKETS[-1])


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence has in a pass: `ids` behind the `before` tokens that are in its pages."""

    ids: Sequence[int]
    before: int
    pages: Sequence[int]
    wanted: bool  # whether the logits of its last token are
    follows: int = -1  # 0 …: its one id is this row of what `draw` found last, which the host need not know yet


class Drawn:
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


class Buffers:
    """What the graphs of all buckets read, on the device and as it is filled on the host."""

    def __init__(self, rows: int, width: int, vocabulary: int, device: torch.device) -> None:
        def both(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype).pin_memory()

        self.ids, self._ids = both(rows, dtype=torch.int64)
        self.follows, self._follows = both(rows, dtype=torch.int64)
        self.argmax = Argmax(DRAWS, device)
        self.logits = torch.empty(rows, vocabulary, device=device)  # of the graph that ran last
        self.told = torch.zeros(2, DRAWS, dtype=torch.int64).pin_memory()  # two steps may be under way
        self.at, self._at = both(2, rows, dtype=torch.int32)  # position; length: one more, or 0
        self.table, self._table = both(rows, width, dtype=torch.int32)
        self._rows: list[Sequence[int]] = [()] * rows  # what the host's table holds
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, parts: Sequence[Part], bucket: int) -> None:
        """Copy what a step is about to the device; rows behind the parts, up to the bucket, are nobody."""
        self._copied.synchronize()  # the host's side is free
        n = len(parts)
        ids, at, table = self._ids.numpy(), self._at.numpy(), self._table.numpy()
        ids[:n], ids[n:bucket] = [part.ids[0] for part in parts], 0
        self._follows.numpy()[:n] = [part.follows for part in parts]
        self._follows.numpy()[n:bucket] = -1
        before = [part.before for part in parts]
        at[0, :n], at[0, n:bucket], at[1, n:bucket] = before, -1, 0
        at[1, :n] = at[0, :n] + 1
        for i, part in enumerate(parts):
            if part.pages != self._rows[i]:
                table[i, : len(part.pages)] = part.pages
                self._rows[i] = list(part.pages)
        self.ids[:bucket].copy_(self._ids[:bucket], non_blocking=True)
        self.follows[:bucket].copy_(self._follows[:bucket], non_blocking=True)
        self.at.copy_(self._at, non_blocking=True)
        self.table[:n].copy_(self._table[:n], non_blocking=True)
        self._copied.record()
