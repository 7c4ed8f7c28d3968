"""Launches tiles.cu: x is put into the order of the matrix instructions once, then any number of matrices multiply it.

    xs = arrange(x, w)                    # serves every weight like it: blocks, order of inputs, `far`
    y = product(xs, w, bias)
    y = matmul(x, w, bias)                # both; up to 32 rows dozens.py instead, which takes x as it lies

Any number of rows of x; below 5 decode.py is faster. Both launch on the current stream, allocate only through torch,
and can be captured in a graph.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from crelle.kernels.cuda import dispatch, dozens
from crelle.kernels.cuda.decode import C_TYPES
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.layout import ROWS, CudaWeight

_RESIDENT = 4  # at most so many thread blocks of a product on a multiprocessor
_SHARED = 227 * 1024 - 1024  # bytes that they have together on Hopper, less the barriers
_COST = {16: 0.45, 32: 0.46, 64: 0.52, 128: 0.65, 192: 0.84, 256: 1.0}  # measured time of a tile, by its tokens
_SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)  # tokens of a tile


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """Tokens as tiles.cu reads them."""

    tokens: int
    dtype: torch.dtype
    xs: Tensor  # [4 blocks, tokens rounded up to 8, 64], swizzled
    flags: Tensor  # int32, zero between launches: thread blocks that share a tile signal each other

    @classmethod
    def empty(cls, tokens: int, w: CudaWeight, x: Tensor) -> Self:
        """Room for so many tokens like x; who fills it sets the flags to zero."""
        xs = torch.empty(4 * w.blocks, -(-tokens // 8) * 8, 64, dtype=x.dtype, device=x.device)
        flags = torch.empty(_RESIDENT * multiprocessors(), dtype=torch.int32, device=x.device)
        return cls(tokens, x.dtype, xs, flags)


@dataclass(frozen=True, slots=True)
class Shape:
    """How tiles_hopper.cuh cuts a product into pieces; its template parameters."""

    tokens: int  # of a tile: a multiple of 16 up to 256
    warpgroups: int  # of 64 rows
    x_chunks: int  # times 64 inputs: a stage of x
    x_stages: int
    w_stages: int  # times 256 inputs under way
    resident: int = 1  # thread blocks that a multiprocessor holds
    shares: int = 1  # of K: thread blocks that have a tile together (a cluster); 1: tiles are cut where they must be


@dataclass(frozen=True, slots=True)
class OldShape:
    """The same for tiles_ampere.cuh."""

    tokens: int  # of a tile: 8, 16, 32, 64
    tiles: int  # of 16 rows that a warp has
    along: int  # warps side by side along the rows
    teams: int  # of warps that share K
    stages: int  # times 256 inputs


def arrange_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "tiles.cu", f"crelle::arrange<{C_TYPES[dtype]}>"


def product_variant(w: CudaWeight, shape: Shape | OldShape, dtype: torch.dtype) -> tuple[str, str]:
    s = shape
    numbers = f"{w.P}, crelle::{w.kind.name}, {w.groups}"
    if isinstance(s, OldShape):
        kernel, pieces = "ampere", f"{s.tokens}, {s.tiles}, {s.along}, {s.teams}, {s.stages}"
    else:
        kernel = "hopper"
        pieces = f"{s.tokens}, {s.warpgroups}, {s.x_chunks}, {s.x_stages}, {s.w_stages}, {s.resident}, {s.shares}"
    return "tiles.cu", f"crelle::{kernel}<{numbers}, {pieces}, {C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}>"


def arrange(x: Tensor, w: CudaWeight) -> Arranged:
    """Put x [M, K] into the order in which w's matrix instructions take it."""
    M, K = x.shape
    to = Arranged.empty(M, w, x)
    kernel = load(*arrange_variant(x.dtype))
    grid = (2 * w.blocks, -(-to.xs.shape[1] // 32), 1)
    kernel(grid, 256, x.contiguous(), w.order, to.xs, to.flags, to.flags.numel(), M, K, w.far, overlap=True)
    return to


def product(
    x: Arranged,
    w: CudaWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    shape: Shape | OldShape | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) as [M, N]."""
    s = shape or choose(w, x.tokens, x.dtype)
    y = torch.empty(x.tokens, w.N, dtype=x.dtype, device=x.xs.device) if out is None else out
    kernel = load(*product_variant(w, s, x.dtype))
    if isinstance(s, OldShape):
        blocks = (-(-w.N // (ROWS * s.tiles * s.along)), -(-x.tokens // s.tokens), 1)
        sizes = (w.N, x.tokens, w.blocks, w.words.shape[2], w.span)
        threads = 32 * s.along * s.teams
        kernel(blocks, threads, w.words, w.scales, x.xs, bias, y, *sizes, shared=old_bytes(w, s), overlap=True)
        return y
    grid, whole = cut(w, x.tokens, s, multiprocessors())
    parts = s.shares == 1 and whole < _tiles(w, x.tokens, s.tokens, s.warpgroups)
    sums = grid * s.tokens * 64 * s.warpgroups if parts else 0
    partial = torch.empty(sums, dtype=torch.float32, device=x.xs.device)
    kernel(
        (grid, 1, 1),
        s.warpgroups * 128 + (128 if s.tokens > 128 else 32),
        w.words,
        w.scales,
        x.xs,
        bias,
        y,
        partial,
        x.flags,
        w.N,
        x.tokens,
        w.blocks,
        w.words.shape[2],
        w.span,
        whole,
        shared=shared_bytes(w, s),
        overlap=True,
    )
    return y


def matmul(x: Tensor, w: CudaWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) for x [M, K], accumulated in fp32."""
    if x.shape[0] == 0:
        return x.new_empty(0, w.N) if out is None else out
    if dispatch.gemm_route(x.shape[0]) == "skinny_gemm":
        return dozens.product(dozens.rows(x, w), w, bias, None, out)
    return product(arrange(x, w), w, bias, out)


def variants(w: CudaWeight, tokens: int, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Return the kernels that `matmul` launches for so many tokens."""
    if dispatch.gemm_route(tokens) == "skinny_gemm":
        return [dozens.variant(w, dozens.choose(w, tokens), dtype)]
    return [arrange_variant(dtype), product_variant(w, choose(w, tokens, dtype), dtype)]


def cut(w: CudaWeight, tokens: int, s: Shape, processors: int) -> tuple[int, int]:
    """Return (thread blocks, tiles that are not cut along K).

    Where tiles do not come out even, those of the last round, and a round before it, are shared by all. Adding the
    parts of a tile costs about 6 us for 256 tokens; where the last round is nearly full, idling costs less.
    """
    tiles = _tiles(w, tokens, s.tokens, s.warpgroups)
    if s.shares > 1:
        return tiles * s.shares, tiles
    grid = min(processors * s.resident, tiles * w.blocks)
    rounds, left = divmod(tiles, grid)
    if left == 0:
        return grid, tiles
    idle = (1 - left / grid) * w.blocks * 2.8 * _cost(s.tokens)  # us: a block of 256 inputs takes 2.8
    if s.tokens >= 128 and idle < s.tokens * 6 / 256:
        return min(grid, tiles), tiles
    return grid, max(rounds - 1, 0) * grid


def shared_bytes(w: CudaWeight, s: Shape) -> int:
    """Dynamic shared memory: x and the queues of weights; as in tiles_hopper.cuh."""
    queue = s.w_stages * (_block_bytes(w) + 8) + (s.w_stages & 1) * 8
    return 1024 + s.x_stages * s.x_chunks * s.tokens * 128 + 4 * s.warpgroups * queue


def old_bytes(w: CudaWeight, s: OldShape) -> int:
    """The same for tiles_ampere.cuh, where sums take the place of x and weights at the end."""
    stage = s.tokens * 512 + s.along * s.tiles * _block_bytes(w)
    return max(s.teams * s.stages * stage, s.teams * s.tokens * (s.along * s.tiles * ROWS + 4) * 4)


def _block_bytes(w: CudaWeight) -> int:
    """Of a tile of 16 rows and 256 inputs: planes and scales."""
    return w.P * 512 + w.scales[0, 0].numel() * w.scales.element_size()


def _cost(tokens: int) -> float:
    """The time of a tile of so many tokens, between those measured."""
    below, above = next((a, b) for a, b in pairwise(_COST) if tokens <= b)
    return _COST[below] + (_COST[above] - _COST[below]) * (tokens - below) / (above - below)


def _tiles(w: CudaWeight, tokens: int, of_tokens: int, warpgroups: int) -> int:
    return -(-w.N // (64 * warpgroups)) * -(-tokens // of_tokens)


def choose(
    w: CudaWeight,
    tokens: int,
    dtype: torch.dtype,
    processors: int | None = None,
    capability: tuple[int, int] | None = None,
) -> Shape | OldShape:
    """Return the cut that was fastest on an H200 for problems like this one (docs/kernels/bcq.md has the table)."""
    if (capability or torch.cuda.get_device_capability()) != (9, 0):
        return _choose_old(w, tokens)
    processors = processors or multiprocessors()
    few = _tiles(w, tokens, 256, 2) < 0.4 * processors  # large tiles would be cut too often
    fitting = w.P <= 2 and 0.85 * processors < _tiles(w, tokens, 128, 2) <= processors  # unpacked twice, but none cut
    sizes = [t for t in _SIZES if t <= 128 or not (few or fitting)]
    at_a_time = min(sizes, key=lambda t: (-(-tokens // t) * _cost(t), t))
    s = _shape(w, at_a_time, dtype, processors)
    while shared_bytes(w, s) > _SHARED // s.resident:  # long scales, many planes
        if s.x_stages > 2:
            s = replace(s, x_stages=s.x_stages - 1)
        elif s.w_stages > 2:
            s = replace(s, w_stages=s.w_stages - 1)
        elif s.resident > 1:
            s = replace(s, resident=s.resident - 1)
        else:
            s = replace(s, tokens=s.tokens // 32 * 16)
    even = s.tokens >= 128 and 0.85 * processors < 2 * _tiles(w, tokens, s.tokens, 2) <= processors and w.blocks > 1
    if even and s.x_chunks * s.x_stages >= 4:  # whose place the sums take
        return replace(s, shares=2)  # two thread blocks that add up at once are faster than a chain
    return s


def _shape(w: CudaWeight, tokens: int, dtype: torch.dtype, processors: int) -> Shape:
    """The best of those measured for tiles of so many tokens."""
    rows = _tiles(w, 1, 1, 2) / processors  # tiles of 128 rows
    large = w.P > 4 or dtype == torch.bfloat16  # needs more registers than two times two warpgroups have
    narrow = rows < 0.4 or large
    if tokens == 16:
        return Shape(16, 1, 2, 4, 3, 3) if narrow else Shape(16, 2, 2, 4, 3, 2)
    if tokens == 32:
        return Shape(32, 1, 2, 4, 3, 3) if narrow or w.P == 3 else Shape(32, 2, 2, 4, 3, 2)
    if tokens <= 64:
        return Shape(tokens, 2 if rows < 0.7 or large else 3, 2, 4, 2)
    if tokens <= 128:
        return Shape(tokens, 2, 2, 4, 2)
    return Shape(tokens, 2, 1, 5, 2) if w.P <= 2 else Shape(tokens, 2, 1, 4, 3)


def _choose_old(w: CudaWeight, tokens: int, room: int | None = None) -> OldShape:
    if room is None:
        room = int(getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 99 * 1024))
    shapes = (OldShape(64, 2, 4, 1, 2), OldShape(32, 2, 4, 1, 2), OldShape(16, 2, 4, 2, 2), OldShape(8, 1, 2, 2, 2))
    useful = [s for s in shapes if s.tokens < 2 * tokens or s.tokens == 8]
    return next(s for s in useful if old_bytes(w, s) <= room)
