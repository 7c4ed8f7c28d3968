"""Readable torch kernels over pages of keys and values: the oracle of every other one, and the last resort.

append   writes new tokens into pages: rotates (Hadamard), centres and quantizes them on the way
attend   reads the pages as they are, a slab at a time with a running softmax; the cache is never dequantized as a whole

Both take a batch of sequences of any lengths. N new tokens lie one behind the other, sequence after sequence:

    table    int [B, max_pages]   the pages of each sequence, in order; what lies behind its last page is not looked at
    starts   B+1 integers         tokens starts[b] … starts[b+1]-1 are those of sequence b; None: N/B for each
    position / lengths            tokens of each sequence before / after these new ones

so prompts, chunks of prompts and decode tokens go together. Each sequence is computed by itself, so its values do not
depend on the rest of the batch (batch-invariant).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv.pages import KVPages, hadamard

SLAB = 256  # tokens that `attend` dequantizes at one time

Integers = Tensor | Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class AttendOptions:
    """What attention does in addition to softmax(q K^T / sqrt(D)) V over all tokens so far."""

    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None  # of the scores
    sinks: Tensor | None = None  # f32 [H]: one more score for each head, without a value

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


ATTEND_ALL = AttendOptions()


def append(
    k: Tensor,
    v: Tensor,
    pages: KVPages,
    table: Tensor,
    position: Integers,
    *,
    starts: Integers | None = None,
    center: Tensor | None = None,
) -> None:
    """Store k and v [N, Hkv, D] behind the `position` tokens that each sequence has; center: f32 [Hkv, D] or None."""
    fmt = pages.format
    wanted = (k.shape[0], pages.heads, pages.head_size)
    if k.shape != wanted or v.shape != wanted:
        raise SchemeError(f"keys and values must be {list(wanted)}, got {list(k.shape)} and {list(v.shape)}")
    if center is not None and (not fmt.key.coded or tuple(center.shape) != wanted[1:]):
        raise SchemeError(f"a centre [{pages.heads}, {pages.head_size}] is for coded pages, not for {fmt}")
    at, page = [], []
    for row, before, (begin, end) in zip(table, _ints(position), _spans(k.shape[0], table, starts), strict=True):
        at.append(torch.arange(before, before + end - begin))
        found = _pages(pages, row, before, before + end - begin).repeat_interleave(fmt.page)
        page.append(found[before % fmt.page :][: end - begin])
    which, place = (torch.cat(x).to(pages.codes.device) for x in (page, [t % fmt.page for t in at]))  # [N]
    k = k if center is None else k.float() - center
    for kind, x in enumerate((k, v)):
        code = fmt.code(kind)
        pages.write(kind, which, place, hadamard(x, code) if code.rotate else x)


def attend(
    q: Tensor,
    pages: KVPages,
    table: Tensor,
    lengths: Integers,
    *,
    starts: Integers | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(q K^T * scale) V [N, H, D], in q's dtype, for q [N, H, D] of the last tokens of each sequence.

    H is a multiple of Hkv: head h reads key head h // (H/Hkv). Each token sees itself and those before it, with a
    `window` only so many. `scale` is 1/sqrt(D) unless told; `softcap` bounds scores: softcap * tanh(score / softcap).
    sinks [H]: of the weights of a head, exp(sink) goes nowhere. Sums are in f32.
    """
    N, H, D = q.shape
    if pages.head_size != D or H % pages.heads:
        raise SchemeError(f"{H} heads of {D} cannot read pages of {pages.heads} heads of {pages.head_size}")
    scale = D**-0.5 if scale is None else scale
    rotated = (hadamard(q, pages.format.key) * scale).view(N, pages.heads, H // pages.heads, D)
    parts, reader = [], _Reader(pages)
    for b, ((begin, end), length) in enumerate(zip(_spans(N, table, starts), _ints(lengths), strict=True)):
        if length < end - begin:
            raise SchemeError(f"sequence {b} has {length} tokens in all, but asks for {end - begin} new ones")
        parts.append(_attend_one(rotated[begin:end], reader, table[b], length, AttendOptions(window, softcap, sinks)))
    y = hadamard(torch.cat(parts).flatten(1, 2), pages.format.value)  # [N, H, D]
    return y.to(q.dtype)


class _Reader:
    """Reads slabs of pages and keeps the last one: tokens that are computed one by one read the same pages again."""

    def __init__(self, pages: KVPages) -> None:
        self.pages = pages
        self._kept: tuple[list[int], Tensor] | None = None

    def slabs(self, row: Tensor, first: int, length: int) -> Iterator[tuple[int, int, Tensor]]:
        """Walk through tokens first … length-1 in fixed slabs begin … end-1: begin, end, values [2, Hkv, S, D]."""
        page = self.pages.format.page
        step = max(1, SLAB // page) * page
        for begin in range(first // step * step, length, step):
            end = min(begin + step, length)
            yield begin, end, self._read(_pages(self.pages, row, begin, end))[:, :, : end - begin]

    def _read(self, which: Tensor) -> Tensor:
        names = which.tolist()
        if self._kept is None or self._kept[0] != names:
            self._kept = names, self.pages.read(which.to(self.pages.codes.device))
        return self._kept[1]


def _attend_one(q: Tensor, reader: _Reader, row: Tensor, length: int, how: AttendOptions) -> Tensor:
    """One sequence: q [T, Hkv, R, D], scaled; R query heads for a key head."""
    T, Hkv, R, D = q.shape
    window, softcap = how.window, how.softcap
    q = q.permute(1, 2, 0, 3).reshape(Hkv, R * T, D)
    top = q.new_full((Hkv, R * T, 1), -torch.inf)  # greatest score so far
    weight, total = torch.zeros_like(top), torch.zeros_like(q)  # sums of exp(score - top), and of that times v
    first = 0 if window is None else max(0, length - T - window + 1)
    for begin, end, (k, v) in reader.slabs(row, first, length):  # k, v [Hkv, S, D]
        score = q @ k.mT  # [Hkv, R*T, S]
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        hidden = _hidden(range(begin, end), range(length - T, length), window, q.device)
        hidden = hidden if hidden is None else hidden.repeat(R, 1)
        if not math.isfinite(score.sum() + v.sum()):
            score, v = _poisoned(score, v, hidden)
        if hidden is None:
            now = base = torch.maximum(top, score.amax(-1, keepdim=True))
        else:
            score = score.masked_fill(hidden, -torch.inf)
            now = torch.maximum(top, score.amax(-1, keepdim=True))
            base = now.masked_fill(now == -torch.inf, 0)  # who has seen nothing yet keeps sums of 0
        p, keep = torch.exp(score - base), torch.exp(top - base)
        weight, total, top = weight * keep + p.sum(-1, keepdim=True), total * keep + p @ v, now
    if how.sinks is not None:
        sink = how.sinks.to(top).view(Hkv, R, 1).expand(Hkv, R, T).reshape(Hkv, R * T, 1)
        base = torch.maximum(top, sink)
        keep = torch.exp(top - base)
        weight, total = weight * keep + torch.exp(sink - base), total * keep
    return (total / weight).view(Hkv, R, T, D).permute(2, 0, 1, 3)  # [T, Hkv, R, D]


def _hidden(keys: range, queries: range, window: int | None, device: torch.device) -> Tensor | None:
    """Return which keys each query does not see, bool [T, S], or None where all see all."""
    if keys.stop <= queries.start + 1 and (window is None or keys.start >= queries.stop - window):
        return None
    key, query = (torch.arange(x.start, x.stop, device=device) for x in (keys, queries))
    later = key > query[:, None]
    return later if window is None else later | (key <= query[:, None] - window)


def _poisoned(score: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores and values of a slab in which something is not finite: NaN for who sees it, nothing for who does not.

    A score of -inf would have the weight 0 and be forgotten, and 0 * NaN is NaN for those who do not see the token.
    """
    lost = ~v.isfinite().all(-1)  # [Hkv, S]
    score = score.masked_fill(~score.isfinite() | lost[:, None], torch.nan)
    return score if hidden is None else score.masked_fill(hidden, 0), v.masked_fill(lost[..., None], 0)


def _pages(pages: KVPages, row: Tensor, begin: int, end: int) -> Tensor:
    """Return the pages of tokens begin … end-1 of a sequence, or say that its table has none."""
    if begin == end:
        return row[:0].long()
    last = (end - 1) // pages.format.page
    if last >= len(row):
        raise CapacityError(f"token {end - 1} needs page {last} of a table of {len(row)} pages")
    found = row[begin // pages.format.page : last + 1].long()
    low, high = (int(x) for x in found.aminmax())
    if not 0 <= low <= high < pages.count:
        raise SchemeError(f"a table names page {high if low >= 0 else low} of {pages.count}")
    return found


def _spans(N: int, table: Tensor, starts: Integers | None) -> list[tuple[int, int]]:
    B = table.shape[0]
    if starts is None:
        if N % B:
            raise SchemeError(f"{N} tokens are not the same number for each of {B} sequences: give starts")
        starts = range(0, N + 1, N // B)
    found = _ints(starts)
    if len(found) != B + 1 or found[0] != 0 or found[-1] != N or sorted(found) != found:
        raise SchemeError(f"starts must rise from 0 to {N} in {B + 1} integers, got {found}")
    return list(pairwise(found))


def _ints(x: Integers) -> list[int]:
    return x.tolist() if isinstance(x, Tensor) else list(x)
