"""Launches fp4_gemm.cu: products of many rows with four-bit floats, made operands in registers.

    xs = gemm.pack(x, w)                    # serves every weight with as many inputs (planes/gemm.py)
    y = product(xs, w, bias, residual)
    y = invariant_product(xs, w, bias)      # a row's bits do not depend on the number of rows: a fixed split of K
    y = matmul(x, w, bias)                  # the GEMV or one of these, by the number of rows

All launch on the current stream, allocate only through torch, and can be captured in a graph.
"""

from dataclasses import replace

import torch
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.fp4 import fp4_gemv
from crelle.kernels.cuda.fp4.fp4_layout import ROWS, Fp4Weight
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.planes.gemm import (
    _SHARED,
    _SIZES,
    GemmSm80TileConfig,
    GemmTileConfig,
    PackedX,
    _cost,
    _tiles,
    stream_k_schedule,
)

_SM80_INVARIANT = GemmSm80TileConfig(16, 2, 4, 2, 2)
_INVARIANT_SIZES = (16, 32, 64, 128, 192, 256)  # tokens of a tile


def variant(w: Fp4Weight, s: GemmTileConfig | GemmSm80TileConfig, dtype: torch.dtype) -> tuple[str, str]:
    if isinstance(s, GemmSm80TileConfig):
        kernel, pieces = "fp4_gemm_sm80", f"{s.tokens}, {s.tiles}, {s.warps_n}, {s.warps_k}, {s.stages}"
    else:
        kernel = "fp4_gemm_sm90"
        pieces = f"{s.tokens}, {s.warpgroups}, {s.x_chunks}, {s.x_stages}, {s.w_stages}, {s.occupancy}, {s.split_k}"
    return "fp4/fp4_gemm.cu", f"crelle::{kernel}<{w.kind}, {pieces}, {C_TYPES[dtype]}>"


def product(
    x: PackedX,
    w: Fp4Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: GemmTileConfig | GemmSm80TileConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [M, N]; out, a slice of columns or not, and residual lie alike."""
    s = config or choose(w, x.tokens)
    if isinstance(s, GemmSm80TileConfig):
        y = torch.empty(x.tokens, w.N, dtype=x.dtype, device=x.xs.device) if out is None else out
        load(*variant(w, s, x.dtype))(
            (-(-w.N // (ROWS * s.tiles * s.warps_n)), -(-x.tokens // s.tokens), 1),
            32 * s.warps_n * s.warps_k,
            *(w.data, x.xs, bias, residual, y, w.N, x.tokens, w.blocks, y.stride(0)),
            shared=sm80_shared_bytes(w, s),
            pdl=True,
        )
        return y
    grid, whole = stream_k_schedule(w, x.tokens, s, multiprocessors())
    parts = s.split_k == 1 and whole < _tiles(w, x.tokens, s.tokens, s.warpgroups)
    return _launch(x, w, bias, residual, out, s, grid, whole, parts)


def _launch(
    x: PackedX,
    w: Fp4Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    s: GemmTileConfig,
    grid: int,
    whole: int,
    parts: bool,
) -> Tensor:
    y = torch.empty(x.tokens, w.N, dtype=x.dtype, device=x.xs.device) if out is None else out
    sums = grid * s.tokens * 64 * s.warpgroups if parts else 0
    partial = torch.empty(sums, dtype=torch.float32, device=x.xs.device)
    load(*variant(w, s, x.dtype))(
        (grid, 1, 1),
        s.warpgroups * 128 + (128 if s.tokens > 128 else 32),
        *(w.data, x.xs, bias, residual, y, partial, x.semaphores),
        *(w.N, x.tokens, w.blocks, whole, y.stride(0)),
        shared=shared_bytes(w, s),
        pdl=True,
    )
    return y


def invariant_product(x: PackedX, w: Fp4Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) for at most INVARIANT_ROWS rows, with one order of sums for all numbers."""
    assert x.tokens <= dispatch.INVARIANT_ROWS
    if torch.cuda.get_device_capability() != (9, 0):
        return product(x, w, bias, residual, config=_SM80_INVARIANT)
    processors, s = multiprocessors(), invariant_config(w, x.tokens)
    count, splits = -(-w.N // (64 * s.warpgroups)), invariant_splits(w, processors)
    grid = count * splits if splits > 1 else min(count, processors * s.occupancy)
    return _launch(x, w, bias, residual, None, s, grid, 0 if splits > 1 else count, splits > 1)


def invariant_splits(w: Fp4Weight, processors: int) -> int:
    """Return the split of K of a tile of 128 rows with which all thread blocks run at once."""
    return max(1, min(8, w.blocks, processors // -(-w.N // 128)))


def invariant_config(w: Fp4Weight, tokens: int) -> GemmTileConfig:
    """Return the tile config for a tile of 128 rows that holds all tokens."""
    size = next(t for t in _INVARIANT_SIZES if t >= tokens)
    chunks, stages = (2, 4) if size <= 128 else (1, 4)
    return _fitted(w, GemmTileConfig(size, 2, chunks, stages, 2))


def matmul(
    x: Tensor, w: Fp4Weight, bias: Tensor | None = None, residual: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) for x [M, K], accumulated in f32."""
    if x.shape[0] == 0:
        return x.new_empty(0, w.N)
    if batch_invariant:
        rows = range(0, x.shape[0], dispatch.INVARIANT_ROWS)
        each = [slice(at, at + dispatch.INVARIANT_ROWS) for at in rows]
        parts = [
            invariant_product(gemm.pack(x[s], w), w, bias, None if residual is None else residual[s]) for s in each
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if dispatch.fp4_route(x.shape[0]) == "gemv" and fp4_gemv.fits(w):
        return fp4_gemv.product(x, w, bias=bias, residual=residual)
    return product(gemm.pack(x, w), w, bias, residual)


def shared_bytes(w: Fp4Weight, s: GemmTileConfig) -> int:
    """Dynamic shared memory: x stages and the pipelines of weights; as in gemm_sm90.cuh."""
    queue = s.w_stages * (w.block_bytes + 8) + (s.w_stages & 1) * 8
    return 1024 + s.x_stages * s.x_chunks * s.tokens * 128 + 4 * s.warpgroups * queue


def sm80_shared_bytes(w: Fp4Weight, s: GemmSm80TileConfig) -> int:
    """The same for gemm_sm80.cuh, where sums take the place of x and weights at the end."""
    stage = s.tokens * 512 + s.warps_n * s.tiles * w.block_bytes
    return max(s.warps_k * s.stages * stage, s.warps_k * s.tokens * (s.warps_n * s.tiles * ROWS + 4) * 4)


def choose(
    w: Fp4Weight, tokens: int, processors: int | None = None, capability: tuple[int, int] | None = None
) -> GemmTileConfig | GemmSm80TileConfig:
    """Return the tile config that was fastest on an H200 for uniform codes of 4 bits, which take as long (gemm.py)."""
    if (capability or torch.cuda.get_device_capability()) != (9, 0):
        return _choose_sm80(w, tokens)
    processors = processors or multiprocessors()
    few = _tiles(w, tokens, 256, 2) < 0.4 * processors  # large tiles would be split too often
    at_once = min((t for t in _SIZES if t <= 128 or not few), key=lambda t: (-(-tokens // t) * _cost(t), t))
    rows = _tiles(w, 1, 1, 2) / processors  # tiles of 128 rows
    if at_once <= 32:
        s = GemmTileConfig(at_once, 1, 2, 4, 3, 3) if rows < 0.4 else GemmTileConfig(at_once, 2, 2, 4, 3, 2)
    elif at_once <= 128:
        s = GemmTileConfig(at_once, 2, 2, 4, 2)
    else:
        s = GemmTileConfig(at_once, 2, 1, 4, 3)
    s = _fitted(w, s)
    even = s.tokens >= 128 and 0.85 * processors < 2 * _tiles(w, tokens, s.tokens, 2) <= processors and w.blocks > 1
    return replace(s, split_k=2) if even and s.x_chunks * s.x_stages >= 4 else s


def _fitted(w: Fp4Weight, s: GemmTileConfig) -> GemmTileConfig:
    while shared_bytes(w, s) > _SHARED // s.occupancy:
        s = replace(s, x_stages=s.x_stages - 1) if s.x_stages > 2 else replace(s, w_stages=s.w_stages - 1)
    return s


def _choose_sm80(w: Fp4Weight, tokens: int, room: int | None = None) -> GemmSm80TileConfig:
    if room is None:
        room = int(getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 99 * 1024))
    shapes = (
        GemmSm80TileConfig(64, 2, 4, 1, 2),
        GemmSm80TileConfig(32, 2, 4, 1, 2),
        GemmSm80TileConfig(16, 2, 4, 2, 2),
        GemmSm80TileConfig(8, 1, 2, 2, 2),
    )
    useful = [s for s in shapes if s.tokens < 2 * tokens or s.tokens == 8]
    return next(s for s in useful if sm80_shared_bytes(w, s) <= room)
