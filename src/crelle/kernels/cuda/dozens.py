"""Launches dozens.cu: a few dozen tokens, x as it lies in memory, one launch.

    y = product(rows(x, w), w, bias, residual)

Tokens beyond a tile of them take the weights again, so this is for up to SKINNY_ROWS. Needs Hopper or newer for its
queues of weights. Launches on the current stream, allocates only through torch, and can be captured in a graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.kernels.cuda.decode import C_TYPES
from crelle.kernels.cuda.dispatch import SKINNY_ROWS
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.layout import BLOCK, ROWS, CudaWeight

_SHARED = 226 * 1024  # bytes of shared memory of a multiprocessor
_PIECES = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2))  # tiles of a warp, warps along the rows


@dataclass(frozen=True, slots=True)
class Shape:
    """How dozens.cu cuts a product into pieces; its template parameters."""

    tokens: int  # of a tile: a multiple of 8
    tiles: int  # of 16 rows that a warp has
    along: int  # warps side by side along the rows
    shares: int  # of K: so many times `along` warps
    ahead: int = 1  # times 256 inputs under way
    resident: int = 1  # thread blocks that a multiprocessor holds


def variant(w: CudaWeight, s: Shape, dtype: torch.dtype) -> tuple[str, str]:
    numbers = f"{w.P}, crelle::{w.kind.name}, {w.groups}"
    pieces = f"{s.tokens}, {s.tiles}, {s.along}, {s.shares}, {s.ahead}, {s.resident}"
    return "dozens.cu", f"crelle::dozens<{numbers}, {pieces}, {C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}>"


def gather_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "dozens.cu", f"crelle::gather<{C_TYPES[dtype]}>"


def rows(x: Tensor, w: CudaWeight) -> Tensor:
    """Return x [M, K] as `product` takes it: itself, or a copy in the weight's order with zeros in its gaps."""
    x = x.contiguous()
    M, K = x.shape
    if w.order is None and K % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    out = torch.empty(M, w.blocks * BLOCK, dtype=x.dtype, device=x.device)
    load(*gather_variant(x.dtype))((w.blocks, M, 1), BLOCK, x, w.order, out, K, overlap=True)
    return out


def product(
    x: Tensor,
    w: CudaWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [M, N] for x as `rows` gives it."""
    M, K = x.shape
    s = shape or choose(w, M)
    y = torch.empty(M, w.N, dtype=x.dtype, device=x.device) if out is None else out
    grid = (-(-w.N // (ROWS * s.tiles * s.along)), -(-M // s.tokens), 1)
    sizes = (w.N, M, K, w.blocks, w.words.shape[2], w.span)
    load(*variant(w, s, x.dtype))(
        grid,
        32 * s.along * s.shares,
        *(w.words, w.scales, x, bias, residual, y, *sizes),
        shared=shared_bytes(w, s),
        overlap=True,
    )
    return y


def shared_bytes(w: CudaWeight, s: Shape) -> int:
    """Dynamic shared memory: the queues of weights, then everybody's sums; as in dozens.cu."""
    block = w.P * 512 + w.scales[0, 0].numel() * w.scales.element_size()  # of 16 rows and 256 inputs
    stages = s.ahead * s.tiles
    queue = stages * (block + 8) + (stages & 1) * 8
    return s.along * s.shares * queue + s.shares * s.tokens * (s.along * s.tiles * ROWS + 4) * 4


def choose(w: CudaWeight, tokens: int, processors: int | None = None) -> Shape:
    """Return the cut that was fastest on an H200: thread blocks of so many rows that all processors have as many."""
    at_a_time = min(-(-tokens // 8) * 8, SKINNY_ROWS)
    warps = 16 if at_a_time <= 16 else 8  # with 128 or 255 registers a thread: one thread block a multiprocessor
    row_tiles = -(-w.N // ROWS)

    def cost(pieces: tuple[int, int]) -> float:  # rounds, each the time of a thread block's rows and of taking x
        mine = pieces[0] * pieces[1]
        return -(-row_tiles // (mine * (processors or multiprocessors()))) * (mine + 0.7)

    tiles, along = min(_PIECES, key=cost)
    shares = warps // along
    while shares > max(w.blocks, 1) or (_room(w, at_a_time, tiles, along, shares) > _SHARED and shares > 1):
        shares //= 2
    while _room(w, at_a_time, tiles, along, shares) > _SHARED:  # many planes, long scales
        tiles, along = (tiles - 1, along) if tiles > 1 else (tiles, along - 1)
    return Shape(at_a_time, tiles, along, shares)


def _room(w: CudaWeight, *pieces: int) -> int:
    return shared_bytes(w, Shape(*pieces))
