"""Launches embed_argmax.cu: the first and the last kernel of a decode step, with the state that stays on the device.

    state = State.new(batch, steps, device)      # then fill ids and position
    x = embed(state.ids, table)
    …
    greedy(logits, state)                        # ids, position and step are those of the next step

A step captured in a graph is replayed as it is; the host looks at `made` when it wants to. A token is NOT_FINITE there
where the largest logit of its row is NaN or infinite: what follows it means nothing.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from crelle.kernels.cuda.bmma_gemv import C_TYPES
from crelle.kernels.cuda.launch import load

NOT_FINITE = -1  # instead of a token
_THREADS = 256
_PIECES = 32  # thread blocks that share a row of logits, at most; as in embed_argmax.cu


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Where B sequences are."""

    ids: Tensor  # i64 [B], the tokens that come next
    position: Tensor  # i32 [B], where they stand
    step: Tensor  # i32 [1], how many tokens were made
    made: Tensor  # i64 [B, steps], those, or NOT_FINITE
    best: Tensor  # i64 [B, 32], scratch
    semaphores: Tensor  # i32 [1], scratch; 0 between launches

    @classmethod
    def new(cls, batch: int, steps: int, device: torch.device | str) -> Self:
        """All sequences at position 0, with room for so many tokens."""

        def zeros(*shape: int, wide: bool = False) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64 if wide else torch.int32, device=device)

        ids, made, best = zeros(batch, wide=True), zeros(batch, steps, wide=True), zeros(batch, _PIECES, wide=True)
        return cls(ids, zeros(batch), zeros(1), made, best, zeros(1))


def embed_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "embed_argmax.cu", f"crelle::embed<{C_TYPES[dtype]}>"


def embed(
    ids: Tensor,
    table: Tensor,
    position: Tensor | None = None,
    positions: Tensor | None = None,
    first: int = 2,
    out: Tensor | None = None,
) -> Tensor:
    """Return table[ids] as [B, width]; with learned `positions`, plus their rows position + first (OPT: 2).

    A row with position -1 is padding.
    """
    B, width = ids.shape[0], table.shape[1]
    y = torch.empty(B, width, dtype=table.dtype, device=table.device) if out is None else out
    if B == 0:
        return y
    grid = (-(-width // (8 * _THREADS)), B, 1)
    load(*embed_variant(table.dtype))(grid, _THREADS, ids, table, position, positions, y, width, first, pdl=True)
    return y


def greedy_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "embed_argmax.cu", f"crelle::greedy<{C_TYPES[dtype]}>"


def greedy(logits: Tensor, state: State) -> None:
    """Take the likeliest token of each row of logits [B, V], the first among equals; store it, and move on by one."""
    s, (B, V) = state, logits.shape
    kernel = load(*greedy_variant(logits.dtype))
    counters = (s.ids, s.position, s.step, s.made, s.best, s.semaphores)
    kernel((_PIECES, B, 1), _THREADS, logits, *counters, V, s.made.shape[1], pdl=True)


class Argmax:
    """The likeliest tokens of up to `rows` sequences in one launch, as indices and as the host shall see them."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.made = torch.zeros_like(self.ids)
        self._best = torch.zeros(rows, _PIECES, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `made` i64 [B] for logits [B, V]: `ids`, or NOT_FINITE. The next call overwrites both.

        B is 0 in a step that runs only chunks of prompts whose end comes later: nothing is launched.
        """
        B, V = logits.shape
        if B:
            counters = (self.ids, None, None, self.made, self._best, self._arrived)
            load(*greedy_variant(logits.dtype))((_PIECES, B, 1), _THREADS, logits, *counters, V, 1)
        return self.made[:B]
