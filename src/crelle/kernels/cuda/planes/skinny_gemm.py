"""Launches skinny_gemm.cu: GEMM for a few dozen tokens, x as it lies in memory, one launch.

    y = product(permuted_rows(x, w), w, bias, residual)

Tokens beyond a tile of them take the weights again, so this is for up to SKINNY_ROWS. Needs Hopper or newer for its
pipelines of weights. Launches on the current stream, allocates only through torch, and can be captured in a graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.kernels.cuda.dispatch import SKINNY_ROWS
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.planes.weight_layout import BLOCK, ROWS, CudaWeight

_SHARED = 226 * 1024  # bytes of shared memory of a multiprocessor
_WARP_TILES = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2))  # tiles of a warp, warps along the rows


@dataclass(frozen=True, slots=True)
class SkinnyTileConfig:
    """Tile config of skinny_gemm.cu; its template parameters."""

    tokens: int  # of a tile: a multiple of 8
    tiles: int  # of 16 rows that a warp has
    warps_n: int  # warps along N
    warps_k: int  # warps that split K
    stages: int = 1  # of 256 inputs, of the load pipeline
    occupancy: int = 1  # thread blocks that a multiprocessor holds


def variant(w: CudaWeight, s: SkinnyTileConfig, dtype: torch.dtype) -> tuple[str, str]:
    arguments = f"{w.P}, crelle::{w.kind.name}, {w.groups}"
    pieces = f"{s.tokens}, {s.tiles}, {s.warps_n}, {s.warps_k}, {s.stages}, {s.occupancy}"
    return (
        "planes/skinny_gemm.cu",
        f"crelle::skinny_gemm<{arguments}, {pieces}, {C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}>",
    )


def permute_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "planes/skinny_gemm.cu", f"crelle::permute_x<{C_TYPES[dtype]}>"


def permuted_rows(x: Tensor, w: CudaWeight) -> Tensor:
    """Return x [M, K] as `product` takes it: itself, or a copy in the weight's order with zeros in its gaps."""
    x = x.contiguous()
    M, K = x.shape
    if w.perm is None and K % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    out = torch.empty(M, w.blocks * BLOCK, dtype=x.dtype, device=x.device)
    load(*permute_variant(x.dtype))((w.blocks, M, 1), BLOCK, x, w.perm, out, K, pdl=True)
    return out


def product(
    x: Tensor,
    w: CudaWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: SkinnyTileConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [M, N] for x as `permuted_rows` gives it."""
    M, K = x.shape
    y = torch.empty(M, w.N, dtype=x.dtype, device=x.device) if out is None else out
    key = ("skinny_gemm", M, K, x.dtype, config)
    if (plan := w.plans.get(key)) is None:
        s = config or choose(w, M)
        grid = (-(-w.N // (ROWS * s.tiles * s.warps_n)), -(-M // s.tokens), 1)
        sizes = (w.N, M, K, w.blocks, w.words.shape[2], w.blocks_per_scale)
        plan = w.plans[key] = variant(w, s, x.dtype), grid, 32 * s.warps_n * s.warps_k, sizes, shared_bytes(w, s)
    kernel, grid, threads, sizes, shared = plan
    load(*kernel)(grid, threads, w.words, w.scales, x, bias, residual, y, *sizes, shared=shared, pdl=True)
    return y


def shared_bytes(w: CudaWeight, s: SkinnyTileConfig) -> int:
    """Dynamic shared memory: the pipelines of weights, then the partial sums of all warps; as in skinny_gemm.cu."""
    block = w.P * 512 + w.scales[0, 0].numel() * w.scales.element_size()  # of 16 rows and 256 inputs
    stages = s.stages * s.tiles
    queue = stages * (block + 8) + (stages & 1) * 8
    return s.warps_n * s.warps_k * queue + s.warps_k * s.tokens * (s.warps_n * s.tiles * ROWS + 4) * 4


def choose(w: CudaWeight, tokens: int, processors: int | None = None) -> SkinnyTileConfig:
    """Return the tile config that was fastest on an H200: rows are shared out evenly among the processors."""
    at_a_time = min(-(-tokens // 8) * 8, SKINNY_ROWS)
    warps = 16 if at_a_time <= 16 else 8  # with 128 or 255 registers a thread: one thread block a multiprocessor
    row_tiles = -(-w.N // ROWS)

    def cost(pieces: tuple[int, int]) -> float:  # rounds, each the time of a thread block's rows and of taking x
        mine = pieces[0] * pieces[1]
        return -(-row_tiles // (mine * (processors or multiprocessors()))) * (mine + 0.7)

    tiles, warps_n = min(_WARP_TILES, key=cost)
    warps_k = warps // warps_n
    while warps_k > max(w.blocks, 1) or (_room(w, at_a_time, tiles, warps_n, warps_k) > _SHARED and warps_k > 1):
        warps_k //= 2
    while _room(w, at_a_time, tiles, warps_n, warps_k) > _SHARED:  # many planes, long scales
        tiles, warps_n = (tiles - 1, warps_n) if tiles > 1 else (tiles, warps_n - 1)
    return SkinnyTileConfig(at_a_time, tiles, warps_n, warps_k)


def _room(w: CudaWeight, *pieces: int) -> int:
    return shared_bytes(w, SkinnyTileConfig(*pieces))
