"""Launches embed_argmax.cu: the first and the last kernel of a decode step.

    x = embed(ids, table)
    …
    made = Argmax(rows, device)(logits)

A token is NOT_FINITE where the largest logit of its row is NaN or infinite: what follows it means nothing.
"""

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES

NOT_FINITE = -1  # instead of a token
_THREADS = 256
_PIECES = 32  # thread blocks that share a row of logits, at most; as in embed_argmax.cu


def embed_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "step/embed_argmax.cu", f"crelle::embed<{C_TYPES[dtype]}>"


def embed(
    ids: Tensor,
    table: Tensor,
    position: Tensor | None = None,
    positions: Tensor | None = None,
    first: int = 2,
    out: Tensor | None = None,
    source: Tensor | None = None,
    sampled: Tensor | None = None,
) -> Tensor:
    """Return table[ids] as [B, width]; with learned `positions`, plus their rows position + first (OPT: 2).

    A row with position -1 is padding. Where `source` i64 [B] is not below 0, the id is sampled[source] instead.
    """
    B, width = ids.shape[0], table.shape[1]
    y = torch.empty(B, width, dtype=table.dtype, device=table.device) if out is None else out
    if B == 0:
        return y
    grid, tokens = (-(-width // (8 * _THREADS)), B, 1), (ids, source, sampled)
    load(*embed_variant(table.dtype))(grid, _THREADS, *tokens, table, position, positions, y, width, first, pdl=True)
    return y


def greedy_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "step/embed_argmax.cu", f"crelle::greedy<{C_TYPES[dtype]}>"


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
            counters = self.ids, self.made, self._best, self._arrived
            load(*greedy_variant(logits.dtype))((_PIECES, B, 1), _THREADS, logits, *counters, V)
        return self.made[:B]
