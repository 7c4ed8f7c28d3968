"""Launches mixed_gemm.cu: products of many rows with mixed 2/4-bit weights, dequantized in registers.

    xs = pack(x, w)                       # serves every weight with the same 4-bit groups (mixed_layout.same_inputs)
    y = product(xs, w, bias, residual)
    y = invariant_product(xs, w, bias)    # a row's bits do not depend on the number of rows: a fixed split of K

Both launch on the current stream, allocate only through torch, and can be captured in a graph.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from crelle.kernels.cuda.dispatch import INVARIANT_ROWS
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.mixed.mixed_layout import ROWS, MixedWeight
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.planes.gemm import (
    _SHARED,
    _SIZES,
    GemmSm80TileConfig,
    GemmTileConfig,
    PackedX,
    _tiles,
    stream_k_schedule,
)
from crelle.kernels.cuda.step import residual_norm_pack

_CODES, _STAGED, _SCRATCH = 2048, 64, 2048  # as in mixed_source.cuh
_SM80_INVARIANT = GemmSm80TileConfig(16, 1, 4, 2, 2)
_COST = {16: 0.38, 32: 0.41, 64: 0.47, 128: 0.67, 256: 1.0}  # measured time of a tile, by its tokens
_INVARIANT_SIZES = (16, 32, 64, 128, 192, 256)  # tokens of a tile


def variant(subs: int, s: GemmTileConfig | GemmSm80TileConfig, dtype: torch.dtype) -> tuple[str, str]:
    if isinstance(s, GemmSm80TileConfig):
        kernel, pieces = "mixed_gemm_sm80", f"{s.tokens}, {s.tiles}, {s.warps_n}, {s.warps_k}, {s.stages}"
    else:
        kernel = "mixed_gemm_sm90"
        stages = f"{s.x_chunks}, {s.x_stages}, {s.w_stages}"
        pieces = f"{span(s)}, {s.tokens}, {s.warpgroups}, {stages}, {s.occupancy}, {s.split_k}"
    return "mixed/mixed_gemm.cu", f"crelle::{kernel}<{subs}, {pieces}, {C_TYPES[dtype]}>"


def pack(x: Tensor, w: MixedWeight) -> PackedX:
    """Pack x [M, K] for w: whole rows in shared memory where they fit, which is faster than gathering them."""
    if residual_norm_pack.supports(w, x.shape[1]) is None:
        return residual_norm_pack.add_norm_pack(x.contiguous(), w)[0]
    return gemm.pack(x, w)


def product(
    x: PackedX,
    w: MixedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: GemmTileConfig | GemmSm80TileConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [M, N]; out, a slice of columns or not, and residual lie alike."""
    s = config or choose(w, x.tokens)
    if isinstance(s, GemmSm80TileConfig):
        y = torch.empty(x.tokens, w.N, dtype=x.dtype, device=x.xs.device) if out is None else out
        load(*variant(w.subs, s, x.dtype))(
            (-(-w.N // (ROWS * s.tiles * s.warps_n)), -(-x.tokens // s.tokens), 1),
            32 * s.warps_n * s.warps_k,
            *(w.tiles, w.rows, w.block_outliers, w.block_starts, x.xs, bias, residual, y),
            *(w.N, x.tokens, w.U2, w.U4, y.stride(0)),
            shared=sm80_shared_bytes(s),
            pdl=True,
        )
        return y
    grid, whole = stream_k_schedule(w, x.tokens, s, multiprocessors())
    parts = s.split_k == 1 and whole < _tiles(w, x.tokens, s.tokens, s.warpgroups)
    return _launch(x, w, bias, residual, out, s, grid, whole, parts)


def _launch(
    x: PackedX,
    w: MixedWeight,
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
    load(*variant(w.subs, s, x.dtype))(
        (grid, 1, 1),
        s.warpgroups * 128 + (128 if s.tokens > 128 else 32),
        *(w.tiles, w.rows, w.block_outliers, w.block_starts, x.xs, bias, residual, y, partial, x.semaphores),
        *(w.N, x.tokens, w.U2, w.U4, whole, y.stride(0)),
        shared=shared_bytes(s),
        pdl=True,
    )
    return y


def invariant_product(
    x: PackedX, w: MixedWeight, bias: Tensor | None = None, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return x @ W.T (+ bias) for at most INVARIANT_ROWS rows, with one order of sums for any number of them."""
    assert x.tokens <= INVARIANT_ROWS
    if torch.cuda.get_device_capability() != (9, 0):
        return product(x, w, bias, residual, out, _SM80_INVARIANT)
    processors = multiprocessors()
    s = invariant_config(x.tokens)
    count = -(-w.N // (64 * s.warpgroups))
    splits = invariant_splits(w, processors)
    grid = count * splits if splits > 1 else min(count, processors * s.occupancy)
    return _launch(x, w, bias, residual, out, s, grid, 0 if splits > 1 else count, splits > 1)


def products(
    each: Sequence[PackedX],
    weights: Sequence[MixedWeight],
    biases: Sequence[Tensor | None],
    batch_invariant: bool = False,
) -> Tensor:
    """Return the products of several weights side by side, x being packed for each."""
    multiply = invariant_product if batch_invariant else product
    if len(weights) == 1:
        return multiply(each[0], weights[0], biases[0])
    sizes = [w.N for w in weights]
    if any(n % 4 for n in sizes):  # a slice would not begin at a piece of memory that the kernel writes at once
        return torch.cat([multiply(x, w, b) for x, w, b in zip(each, weights, biases, strict=True)], -1)
    y = torch.empty(each[0].tokens, sum(sizes), dtype=each[0].dtype, device=each[0].xs.device)
    for x, w, b, out in zip(each, weights, biases, y.split(sizes, -1), strict=True):  # type: ignore[no-untyped-call]
        multiply(x, w, b, out=out)
    return y


def invariant_splits(w: MixedWeight, processors: int) -> int:
    """Return the split of K of a tile of 128 rows with which all thread blocks run at once."""
    return max(1, min(8, w.blocks, processors // -(-w.N // 128)))


def invariant_config(tokens: int) -> GemmTileConfig:
    """Return the tile config for a tile of 128 rows that holds all tokens."""
    size = next(t for t in _INVARIANT_SIZES if t >= tokens)
    chunks, stages = (2, 4) if size <= 128 else (1, 4)
    return _fitted(GemmTileConfig(size, 2, chunks, stages, 2))


def span(s: GemmTileConfig) -> int:
    """Return for how many chunks of 64 inputs outliers are scattered at a time: as many as there is room for."""
    return next((n for n in (4, 2) if _shared_bytes(s, n) <= _SHARED // s.occupancy), 1)


def shared_bytes(s: GemmTileConfig) -> int:
    """Dynamic shared memory: x stages, the pipelines of weights and the warps' scratch; as in gemm_sm90.cuh."""
    return _shared_bytes(s, span(s))


def _shared_bytes(s: GemmTileConfig, chunks: int) -> int:
    stage = _CODES + 16 + 4 * _STAGED
    queue = s.w_stages * (stage + 8) + (s.w_stages & 1) * 8
    return 1024 + s.x_stages * s.x_chunks * s.tokens * 128 + 4 * s.warpgroups * (queue + chunks * _SCRATCH)


def sm80_shared_bytes(s: GemmSm80TileConfig) -> int:
    """The same for gemm_sm80.cuh, where sums take the place of all at the end."""
    stage, warps = s.tokens * 512 + s.warps_n * s.tiles * _CODES, s.warps_n * s.warps_k
    sums = s.warps_k * s.tokens * (s.warps_n * s.tiles * ROWS + 4) * 4
    return max(s.warps_k * s.stages * stage + warps * _SCRATCH, sums)


def choose(
    w: MixedWeight, tokens: int, processors: int | None = None, capability: tuple[int, int] | None = None
) -> GemmTileConfig | GemmSm80TileConfig:
    """Return the tile config that was fastest on an H200 for problems like this (docs/notes/cuda-kernels.md)."""
    if (capability or torch.cuda.get_device_capability()) != (9, 0):
        return _choose_sm80(tokens)
    processors = processors or multiprocessors()
    rows = _tiles(w, 1, 1, 2)  # tiles of 128
    small = rows * w.blocks < 8 * processors  # little work for each processor: smaller tiles are split less
    most = 64 if small and tokens <= 128 else 128 if small and tokens <= 384 else 256
    at_a_time = min((t for t in _SIZES if t <= most), key=lambda t: (-(-tokens // t) * _cost(t), t))
    if at_a_time > 128:
        s = GemmTileConfig(at_a_time, 2, 1, 4, 2)
    elif at_a_time > 64:
        s = GemmTileConfig(at_a_time, 2, 2, 4, 2)
    elif tokens <= 32 and rows < 0.3 * processors and not small:
        s = GemmTileConfig(at_a_time, 1, 2, 4, 2, 3)
    else:
        s = GemmTileConfig(at_a_time, 2 if small and tokens <= 64 else 3, 2, 4, 3 if tokens <= 32 else 2)
    even = 0.85 * processors < 2 * _tiles(w, tokens, s.tokens, s.warpgroups) <= processors and w.blocks > 1
    if even and s.occupancy == 1 and (tokens <= 16 or tokens > 256):
        s = replace(s, split_k=2)
    return _fitted(s)


def _cost(tokens: int) -> float:
    """The time of a tile of so many tokens, between those measured."""
    below, above = next((a, b) for a, b in pairwise(_COST) if tokens <= b)
    return _COST[below] + (_COST[above] - _COST[below]) * (tokens - below) / (above - below)


def _fitted(s: GemmTileConfig) -> GemmTileConfig:
    while shared_bytes(s) > _SHARED // s.occupancy:
        s = replace(s, x_stages=s.x_stages - 1) if s.x_stages > 2 else replace(s, w_stages=s.w_stages - 1)
    return s


def _choose_sm80(tokens: int, room: int | None = None) -> GemmSm80TileConfig:
    if room is None:
        room = int(getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 99 * 1024))
    shapes = (
        GemmSm80TileConfig(64, 1, 4, 1, 2),
        GemmSm80TileConfig(32, 2, 4, 1, 2),
        GemmSm80TileConfig(16, 1, 4, 2, 2),
        GemmSm80TileConfig(8, 1, 2, 2, 2),
    )
    useful = [s for s in shapes if s.tokens < 2 * tokens or s.tokens == 8]
    return next(s for s in useful if sm80_shared_bytes(s) <= room)
