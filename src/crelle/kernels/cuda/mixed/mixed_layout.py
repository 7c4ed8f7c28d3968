"""Mixed 2/4-bit weights (crelle.formats.mixed) as mixed_gemv.cu reads them: what a warp takes lies in one piece.

Inputs are permuted: 2-bit groups first, in units of 256 inputs, then 4-bit groups, in units of 128, each padded.
Outputs are padded to tiles of 16. Lane 4g + t of a warp has rows g and g + 8.
    tiles      uint8 [tiles, U2 units of 1264 bytes, then U4 units of 1024 bytes]
      2 bits     codes   [half][lane][row g: set 0, 1; row g + 8: set 0, 1]     16 bytes a lane for 128 inputs
                           set s of 64 inputs: 16 of them to each t, in a word; pair i of it at bits 2i and 16 + 2i
                 scales  [lane] u32, 4 bits at 16 row + 4 set        zeros  [lane] u16, 2 bits at 8 row + 2 set
                 second  [t][set] f16 second-order scales, then [t][set] u8 second-order zeros
      4 bits     codes   [row half][lane][4 words]: 32 inputs to each t, pair i of a word at bits 4i and 16 + 4i
    rows       f16 [16 tiles, 2]   scale and zero of the 4-bit groups
    outliers   int32 [runs, 4]   where x is, f16 value in the high half (`outlier_words`); a run is of one row
               outlier_rows  uint8 [runs]   its row (+ 16 tile_base) mod 256    starts  int32 [tiles + 1]   of the tiles
               (every tile has as many runs, filled up with zeros, unless that were half as many again)
    perm       int32 [256 U2 + 128 U4]   which input stands where, -1 for none
    spans      int32 [16 U2 + 8 U4]   where each 16 inputs stand, in 16 places; then what is padding
    block_outliers, block_starts         the outliers once more, by blocks of 256 inputs (mixed_gemm_layout.py)

Groups of 8 have two sets of scales for the 16 inputs of a t (`subs`); those of 32 and 64 repeat theirs for every 16.
That is 2.47 bits a weight in 2-bit groups of 16, where the format has 2.45. Nothing here needs a GPU.

x is multiplied in the same order, scaled so that codes need no shift (`pair_scale`): a code at bit 2i of a half is the
denormal fp16 value q 4^i 2^-24, and x in that place is stored times 4^-i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.mixed import MixedTensor
from crelle.formats.packing.mixed import MixedCodes
from crelle.kernels.cuda.mixed.mixed_gemm_layout import by_block
from crelle.kernels.cuda.runtime.plans import Plans

ROWS = 16  # outputs of a tile
UNIT2, UNIT4 = 256, 128  # inputs of a unit
RUN = 4  # outliers of a row that lie together
_SLAB = 1 << 25  # weights that are laid out at one time


@dataclass(frozen=True, slots=True, eq=False)
class MixedWeight:
    """A prepared matrix."""

    N: int
    K: int
    U2: int  # units of 2-bit inputs
    U4: int
    subs: int  # sets of scales for 16 inputs: 2 for groups of 8, else 1
    tiles: Tensor
    rows: Tensor
    perm: Tensor
    outliers: Tensor | None = None
    outlier_rows: Tensor | None = None
    starts: Tensor | None = None
    tile_base: int = 0  # the first tile's number in outlier_rows, where this is a part of a joined matrix
    spans: Tensor | None = None  # for mixed_decode.cu; None for groups of 8
    runs: int = 0  # of outliers, where every tile has as many
    outlier_exponent: int = 0  # outliers are stored times 2^-outlier_exponent, so that none overflows
    block_outliers: Tensor | None = None
    block_starts: Tensor | None = None
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def places(self) -> int:
        """Inputs of x in the weight's order, padding counted."""
        return UNIT2 * self.U2 + UNIT4 * self.U4

    @property
    def blocks(self) -> int:
        """Blocks of 256 inputs, as mixed_gemm.cu counts: units of 2 bits, then pairs of units of 4 bits."""
        return self.U2 + -(-self.U4 // 2)

    @property
    def order(self) -> int:
        """Return how inputs are paired, for kernels that pack x (x_layout.cuh)."""
        return 2 + self.U2

    @property
    def x_bytes(self) -> int:
        """Of one encoded token: values, sums of 2-bit groups, of 4-bit inputs, and a factor (mixed_encode.cu)."""
        return 2 * self.places + 128 * self.subs * self.U2 + -(-self.U4 // 2) * 16 + 16

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        parts = (self.tiles, self.rows, self.outliers, self.outlier_rows, self.starts)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def unit2_bytes(subs: int) -> int:
    """Bytes of a unit of 2-bit inputs and 16 rows."""
    return 1024 + 240 * subs


def lay_out(w: MixedTensor) -> MixedWeight:
    """Lay a matrix out anew, on the device it is on."""
    if w.block % ROWS:
        raise UnsupportedError(
            f"kernel 'cuda-mixed' needs second-order scales of a multiple of {ROWS} rows, not of {w.block}: "
            "slice matrices at such rows"
        )
    s, subs = w.sizes(), 2 if w.G < 16 else 1
    U2, U4 = -(-s.C2 * w.G // UNIT2), -(-s.C4 * w.G // UNIT4)
    tiles = -(-w.N // ROWS)
    perm = _perm(w, U2, U4, subs)
    codes = w.codes()
    step = max(1, _SLAB // (w.K * ROWS))
    parts = []
    for first in range(0, tiles, step):
        rows = slice(first * ROWS, min((first + step) * ROWS, w.N))
        count = min(step, tiles - first)
        two = _units2(w, codes, first, count, U2, subs)
        four = _units4(codes.codes4[rows], count, U4)
        parts.append(torch.cat([two, four], 1))
    grid = torch.zeros(tiles * ROWS, 2, dtype=torch.float16, device=w.device)
    if w.row_scale is not None and w.row_zero is not None:
        grid[: w.N] = torch.stack([w.row_scale.half(), w.row_zero.half()], -1)
    laid = MixedWeight(w.N, w.K, U2, U4, subs, torch.cat(parts), grid, perm, spans=_spans(perm) if subs == 1 else None)
    return _with_outliers(laid, w) if w.outlier_values is not None else laid


def same_inputs(a: MixedWeight, b: MixedWeight) -> bool:
    """Whether x encoded for a serves b: the same groups have 4 bits."""
    if (a.K, a.U2, a.U4, a.subs) != (b.K, b.U2, b.U4, b.subs):
        return False
    return a.perm is b.perm or torch.equal(a.perm, b.perm)


def join(parts: list[MixedWeight]) -> tuple[MixedWeight, list[MixedWeight]] | None:
    """Return matrices of the same inputs as one of all their rows, and each again as a part of it; None if unlike."""
    first = parts[0]
    if any(w.N % ROWS for w in parts[:-1]) or not all(same_inputs(first, w) for w in parts):
        return None
    if any((w.outliers is None, w.outlier_exponent) != (first.outliers is None, first.outlier_exponent) for w in parts):
        return None
    counts = [w.tiles.shape[0] for w in parts]
    tiles, rows = torch.cat([w.tiles for w in parts]), torch.cat([w.rows for w in parts])
    whole = replace(first, N=sum(w.N for w in parts), tiles=tiles, rows=rows)
    starts: Sequence[Tensor | None] = [None] * len(parts)
    block_starts = starts
    if first.outliers is not None:
        every, starts = _joined([w.starts for w in parts])
        blocks, block_starts = _joined([w.block_starts for w in parts])
        whole = replace(whole, outliers=_runs(parts), outlier_rows=_rows(parts), starts=every, tile_base=0)
        even = first.runs if len({w.runs for w in parts}) == 1 else 0
        whole = replace(whole, runs=even, block_outliers=_block_runs(parts), block_starts=blocks)
    bases = [sum(counts[:i]) for i in range(len(counts))]
    pieces = zip(parts, tiles.split(counts), rows.split([n * ROWS for n in counts]), starts, bases, strict=True)  # type: ignore[no-untyped-call]
    common = replace(
        first,
        outliers=whole.outliers,
        outlier_rows=whole.outlier_rows,
        runs=whole.runs,
        block_outliers=whole.block_outliers,
    )
    each = [replace(common, N=w.N, tiles=t, rows=r, starts=s, tile_base=b) for w, t, r, s, b in pieces]
    return whole, [replace(w, block_starts=s) for w, s in zip(each, block_starts, strict=True)]


def _joined(parts: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
    """Return where the outliers of all matrices begin, counted behind one another, and each matrix's part of that."""
    found, total = list[Tensor](), 0
    for starts in parts:
        assert starts is not None
        found.append(starts - starts[0] + total)
        total = int(found[-1][-1])
    every, at = torch.cat([*(f[:-1] for f in found), found[-1][-1:]]), [0]
    for f in found:
        at.append(at[-1] + len(f) - 1)
    return every, [every[begin : end + 1] for begin, end in pairwise(at)]


def _block_runs(parts: list[MixedWeight]) -> Tensor:
    found = []
    for w in parts:
        assert w.block_outliers is not None
        assert w.block_starts is not None
        found.append(w.block_outliers[int(w.block_starts[0]) : int(w.block_starts[-1])])
    return torch.cat(found)


def _slice(w: MixedWeight) -> slice:
    """Return which runs of outliers are the weight's: it may be a part of a joined matrix already."""
    assert w.starts is not None
    return slice(int(w.starts[0]), int(w.starts[-1]))


def _runs(parts: list[MixedWeight]) -> Tensor:
    return torch.cat([w.outliers[_slice(w)] for w in parts if w.outliers is not None])


def _rows(parts: list[MixedWeight]) -> Tensor:
    """Return the rows of all outliers, counted in the joined matrix."""
    found, base = [], 0
    for w in parts:
        assert w.outlier_rows is not None
        found.append(w.outlier_rows[_slice(w)] + (base - w.tile_base) % 16 * ROWS)  # uint8: mod 256
        base += w.tiles.shape[0]
    return torch.cat(found)


def pair_scale(w: MixedWeight) -> Tensor:
    """Return the factor of x in each place, f32 [places]: what undoes the place of its code in a half."""
    two = torch.tensor([4.0 ** -(i % 5) for i in range(8)]).repeat_interleave(2).repeat(UNIT2 // 16 * w.U2)
    four = torch.tensor([1, 1 / 16]).repeat_interleave(2).repeat(UNIT4 // 4 * w.U4)
    return torch.cat([two, four]).to(w.perm.device)


def outlier_words(place: Tensor, values: Tensor, U2: int) -> tuple[Tensor, int]:
    """Return outliers in given places as mixed_outliers.cuh reads them, and their exponent.

    Low half: 16 times the span of 16 places, plus the byte of the span's digits (mixed_digits.cuh) that is of this
    place. High half: the value, times 4 where those digits are of x / 4, and times 2^-exponent, so that none overflows.
    """
    pair, two = place // 2 % 8, place < UNIT2 * U2
    byte = torch.where(two, pair % 4 * 4 + pair // 4, pair // 4 * 8 + pair % 2 * 4 + pair // 2 % 2) + place % 2 * 2
    value = torch.where(two & (pair % 2 == 1), 4.0, 1.0) * values.float()
    exponent = max(0, int(value.abs().max().clamp(min=1).log2().ceil()) - 15)
    high = (value * 2.0**-exponent).half().view(torch.int16).to(torch.int32) << 16
    return high | (place // 16 * 16 + byte).to(torch.int32), exponent


def _order2(subs: int) -> Tensor:
    """Return which of 16 inputs stands in each half of each of 8 pairs."""
    i, high = torch.arange(8)[:, None], torch.arange(2)
    return (i + 8 * high if subs == 1 else i // 4 * 8 + i % 4 + 4 * high).flatten()


def _perm(w: MixedTensor, U2: int, U4: int, subs: int) -> Tensor:
    inputs = torch.arange(len(w.four) * w.G, device=w.device).view(-1, w.G)
    inputs = torch.where(inputs < w.K, inputs, -1)
    mask = w.four.bool()
    two, four = inputs[~mask].flatten(), inputs[mask].flatten()
    two = torch.nn.functional.pad(two, (0, UNIT2 * U2 - len(two)), value=-1).view(-1, 16)
    four = torch.nn.functional.pad(four, (0, UNIT4 * U4 - len(four)), value=-1).view(-1, 8)
    pairs4 = (torch.arange(4)[:, None] + 4 * torch.arange(2)).flatten()
    ordered = two[:, _order2(subs).to(w.device)].flatten(), four[:, pairs4.to(w.device)].flatten()
    return torch.cat(ordered).to(torch.int32)


def _spans(perm: Tensor) -> Tensor:
    first = perm.view(-1, 16)[:, 0]
    index = torch.arange(len(first), device=perm.device, dtype=torch.int32)
    spans = torch.cat([index[first >= 0], index[first < 0]])
    spans[first[first >= 0].long() // 16] = index[first >= 0]
    return spans


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]))


def _words(codes: Tensor, shifts: Tensor) -> Tensor:
    """Return codes uint8 [..., n] as int32 [...], code i at bit shifts[i]."""
    word = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for i, shift in enumerate(shifts.tolist()):
        word |= codes[..., i].to(torch.int32) << shift
    return word


def _units2(w: MixedTensor, codes: MixedCodes, first: int, count: int, U2: int, subs: int) -> Tensor:
    """Return the 2-bit units uint8 [count, U2 * bytes] of some tiles."""
    R, device, rows = count * ROWS, w.device, slice(first * ROWS, (first + count) * ROWS)
    if U2 == 0:
        return torch.empty(count, 0, dtype=torch.uint8, device=device)
    order = _order2(subs)
    shifts = torch.empty(16, dtype=torch.int64)
    shifts[order] = (2 * torch.arange(8)[:, None] + 16 * torch.arange(2)).flatten()
    spans = _padded(codes.codes2[rows].flatten(1), R, U2 * UNIT2).view(R, U2, 4, 4, 16)
    words = _words(spans, shifts).view(count, 2, 8, U2, 2, 2, 4)  # tile, r, g, unit, half, set, t
    laid = words.permute(0, 3, 4, 2, 6, 1, 5).reshape(count, U2, -1)  # half, g, t, r, set

    repeat = max(1, w.G // 16)
    groups = U2 * 16 * subs

    def per_lane(t: Tensor, width: int) -> Tensor:
        """[R, C2] codes as [count, U2, 32, subs] words: `width` bits at (4 r + set) width."""
        each = _padded(t.repeat_interleave(repeat, 1), R, groups).view(count, 2, 8, U2, 4, 4, subs)
        fields = each.permute(0, 3, 2, 5, 6, 1, 4).reshape(count, U2, 32, subs, 8)  # g, t, sub; r, set
        return _words(fields, torch.arange(8) * width)

    blocks = (torch.arange(first, first + count, device=device) * ROWS) // w.block

    def per_group(t: Tensor) -> Tensor:
        """[B, C2] as [count, U2, 4 t, subs, 4 sets]."""
        each = _padded(t[blocks].repeat_interleave(repeat, 1), count, groups).view(count, U2, 4, 4, subs)
        return each.permute(0, 1, 3, 4, 2).reshape(count, U2, -1)

    parts = [
        _bytes(laid),
        _bytes(per_lane(codes.scale_codes[rows], 4).flatten(2)),
        _bytes(per_lane(codes.zeros[rows], 2).to(torch.int16).flatten(2)),
        _bytes(per_group(w.second_scale.half())),
        _bytes(per_group(codes.second_zeros)),
    ]
    return torch.cat(parts, -1).flatten(1)


def _units4(codes4: Tensor, count: int, U4: int) -> Tensor:
    """Return the 4-bit units uint8 [count, U4 * 1024] of some tiles."""
    R = count * ROWS
    spans = _padded(codes4.flatten(1), R, U4 * UNIT4).view(R, U4, 4, 4, 8)
    words = _words(spans, torch.arange(8) * 4).view(count, 2, 8, U4, 4, 4)  # tile, r, g, unit, t, word
    return _bytes(words.permute(0, 3, 1, 2, 4, 5).reshape(count, -1))


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.numel() else t.new_empty(t.shape, dtype=torch.uint8)


def _with_outliers(laid: MixedWeight, w: MixedTensor) -> MixedWeight:
    assert w.outlier_values is not None
    if laid.places > 1 << 16:
        raise UnsupportedError(f"kernel 'cuda-mixed' takes outliers of up to 65536 inputs, padding counted, not {w.K}")
    rows, columns = w.outlier_places()
    place = torch.empty(w.K, dtype=torch.int64, device=w.device)
    inside = laid.perm >= 0
    place[laid.perm[inside].long()] = inside.nonzero()[:, 0]
    at = place[columns]
    words, exponent = outlier_words(at, w.outlier_values, laid.U2)
    counts = torch.bincount(rows, minlength=laid.tiles.shape[0] * ROWS)
    slot = torch.arange(len(rows), device=w.device) - (counts.cumsum(0) - counts)[rows]  # within its row
    runs = -(-counts // RUN)
    in_tile = runs.view(-1, ROWS).sum(1)
    most = int(in_tile.max())
    even = 2 * most * len(in_tile) <= 3 * int(in_tile.sum())
    if even:  # so that nobody has to look up where a tile's runs begin
        runs[ROWS - 1 :: ROWS] += most - in_tile
    begin = torch.nn.functional.pad(runs.cumsum(0), (1, 0))  # of each row
    out = torch.zeros(int(begin[-1]), RUN, dtype=torch.int32, device=w.device)
    out[begin[rows] + slot // RUN, slot % RUN] = words
    which = torch.arange(len(runs), device=w.device).repeat_interleave(runs) % 256
    starts = begin[::ROWS].to(torch.int32)
    more = {"outliers": out, "outlier_rows": which.to(torch.uint8), "starts": starts}
    blocks = by_block(rows, at, w.outlier_values.half(), laid.U2, laid.tiles.shape[0], laid.blocks)
    more |= {"block_outliers": blocks[0], "block_starts": blocks[1]}
    return replace(laid, **more, runs=most if even else 0, outlier_exponent=exponent)  # type: ignore[arg-type]
