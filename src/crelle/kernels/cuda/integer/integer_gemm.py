"""Launches integer_gemm.cu: products of integer activations (integer_x.py) and integer weights (integer_layout.py).

    y = product(x, w, bias, residual)

Launches on the current stream, allocates only through torch, and can be captured in a graph.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import cbrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crelle.kernels.cuda.integer.integer_layout import BLOCK, ROWS, IntegerTiles
from crelle.kernels.cuda.integer.integer_x import IntegerX
from crelle.kernels.cuda.launch import ADDRESS, Launch, VaryingBytes, can_bind, load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES

SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)  # tokens of a tile
_SHARED = 227 * 1024 - 1024  # bytes of a multiprocessor of Hopper for thread blocks, less the barriers
_STAGES = 12  # more are of no use


@dataclass(frozen=True, slots=True)
class IntegerTileConfig:
    """Tile config of integer_sm90.cuh; its template parameters."""

    tokens: int  # of a tile: one of SIZES
    warpgroups: int  # of 64 rows
    stages: int  # times 128 inputs
    occupancy: int = 1  # thread blocks that a multiprocessor holds
    split_k: int = 1  # thread blocks of a cluster that share a tile along K; 1: stream-K


@dataclass(frozen=True, slots=True)
class IntegerSm80TileConfig:
    """The same for integer_sm80.cuh."""

    tokens: int  # of a tile: 8, 16, 32, 64, 128
    tiles: int  # of 16 rows that a warp has
    warps_n: int  # warps along N; times tiles 2 or a multiple of 4
    warps_k: int  # groups of warps that split K
    stages: int  # of x, times 128 inputs
    w_stages: int  # of the weights; at least as many
    occupancy: int = 1  # thread blocks that a multiprocessor holds
    half_bytes: bool = True  # the 4-bit instruction where both sides have 4 bits; Hopper has none


def variant(w: IntegerTiles, s: IntegerTileConfig | IntegerSm80TileConfig, dtype: torch.dtype) -> tuple[str, str]:
    scheme = "TWO_LEVEL" if w.two_level else "SIGNED"
    form: list[str | int] = [f"crelle::{scheme}", w.subs, w.segments, w.narrow < w.blocks]
    pieces: list[str | int]
    if isinstance(s, IntegerSm80TileConfig):
        name = "integer_gemm_sm80"
        pieces = [uses_s4(w) and s.half_bytes, s.tokens, s.tiles, s.warps_n, s.warps_k]
        pieces += [s.stages, s.w_stages, s.occupancy]
    else:
        name = "integer_gemm_sm90"
        pieces = [s.tokens, s.warpgroups, s.stages, s.occupancy, s.split_k]
    arguments = ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in (*form, *pieces))
    return "integer/integer_gemm.cu", f"crelle::{name}<{arguments}, {C_TYPES[dtype]}>"


def uses_s4(w: IntegerTiles) -> bool:
    """Return whether chips that have it multiply half bytes: both sides have at most 4 bits."""
    return not w.two_level and w.narrow > 0 and w.activation.bits <= 4 and w.subs <= 2


def product(
    x: IntegerX,
    w: IntegerTiles,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: IntegerTileConfig | IntegerSm80TileConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [M, N]; out, a slice of columns or not, and residual lie alike."""
    y = torch.empty(x.tokens, w.N, dtype=x.dtype, device=x.codes.device) if out is None else out
    if x.tokens == 0 or w.N == 0:
        return y
    assert x.codes.shape == (-(-x.tokens // 8) * 8, w.columns), (x.codes.shape, w.columns)
    assert x.scales.shape == (w.x_groups, len(x.codes)), (x.scales.shape, w.x_groups)
    plan = _plan(w, x.tokens, x.dtype, config)
    added = (w.row_scale, bias, residual, y)
    if plan.box is None:
        tensors: tuple[Any, ...] = (x.codes, w.pieces, x.scales, *added)
    else:
        partial = torch.empty(plan.partial, dtype=torch.float32, device=y.device)
        tensors = (tensor_map(x.codes, plan.box), w.pieces, x.scales, *added, partial, w.semaphores)
    load(*plan.variant)(plan.grid, plan.threads, *tensors, *plan.sizes, y.stride(0), shared=plan.shared, pdl=True)
    return y


class _Plan(NamedTuple):
    """A launch of integer_gemm.cu but for its tensors."""

    variant: tuple[str, str]
    grid: tuple[int, int, int]
    threads: int
    sizes: tuple[bytes | int, ...]
    shared: int
    box: int | None = None  # tokens of a tile that a tensor map copies; None: the kernel takes x itself
    partial: int = 0  # sums of stream-K tiles


def _plan(
    w: IntegerTiles, tokens: int, dtype: torch.dtype, config: IntegerTileConfig | IntegerSm80TileConfig | None
) -> _Plan:
    key = (tokens, dtype, config)
    found: _Plan | None = w.plans.get(key)
    if found is not None:
        return found
    s = config or choose(w, tokens)
    sizes = (w.N, tokens, w.blocks, w.narrow, w.normal, w.x_groups, w.x_subs, w.x_span, w.x_outlier)
    kernel, shape = variant(w, s, dtype), struct.pack("9i", *sizes)
    if isinstance(s, IntegerSm80TileConfig):
        grid = (-(-w.N // (16 * s.tiles * s.warps_n)), -(-tokens // s.tokens), 1)
        found = _Plan(kernel, grid, 32 * s.warps_n * s.warps_k, (shape,), sm80_shared_bytes(w, s))
    else:
        blocks, whole = schedule(w, tokens, s, multiprocessors())
        parts = s.split_k == 1 and whole < _tiles(w, tokens, s)
        partial = blocks * s.tokens * _rows(s) if parts else 0
        shared = shared_bytes(w, s)
        found = _Plan(kernel, (blocks, 1, 1), threads(s), (shape, whole), shared, s.tokens, partial)
    w.plans[key] = found
    return found


class BoundProduct(NamedTuple):
    """`product` for a number of rows, given addresses."""

    launch: Launch
    box: int | None
    partial: int  # floats of scratch memory
    rows: int
    columns: int

    def __call__(self, codes: int, scales: int, y: int, partial: int) -> None:
        if self.box is None:
            self.launch(codes, scales, y)
        else:
            box = memoryview(_tensor_map(codes, self.rows, self.columns, self.box)).cast("Q")
            self.launch(box, scales, y, partial if self.partial else 0)


def bind(w: IntegerTiles, dtype: torch.dtype, tokens: int) -> BoundProduct | None:
    """Return `product` for so many rows of x, without bias and residual; None if not on a GPU."""
    plan = _plan(w, tokens, dtype, None)
    kernel = load(*plan.variant)
    if not can_bind(kernel):
        return None
    tensors: tuple[Any, ...] = (w.pieces, ADDRESS, w.row_scale, None, None, ADDRESS)
    tensors = (ADDRESS, *tensors) if plan.box is None else (VaryingBytes(128), *tensors, ADDRESS, w.semaphores)
    launch = kernel.bind(plan.grid, plan.threads, *tensors, *plan.sizes, w.N, shared=plan.shared, pdl=True)
    return BoundProduct(launch, plan.box, plan.partial, -(-tokens // 8) * 8, w.columns)


def threads(s: IntegerTileConfig) -> int:
    """Return the threads of a block: as integer_sm90_threads."""
    gives = s.tokens >= 96 and s.warpgroups > 1 and s.occupancy == 1
    return s.warpgroups * 128 + (128 if gives else 32)


def tensor_map(codes: Tensor, tokens: int) -> bytes:
    """Return the CUtensorMap by which boxes of so many tokens and 128 channels are copied, swizzled."""
    return _tensor_map(codes.data_ptr(), *codes.shape, tokens)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, rows: int, columns: int, tokens: int) -> bytes:
    from cuda.bindings import driver

    large, small = driver.cuuint64_t, driver.cuuint32_t
    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [large(columns), large(rows)],
        [large(columns)],
        [small(BLOCK), small(tokens)],
        [small(1), small(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise RuntimeError(f"cuTensorMapEncodeTiled: {status.name} for {rows} x {columns} bytes at {address:#x}")
    return struct.pack("16Q", *(int(word) for word in made.opaque))


def schedule(w: IntegerTiles, tokens: int, s: IntegerTileConfig, processors: int) -> tuple[int, int]:
    """Return (grid, data-parallel tiles); the remaining tiles are stream-K.

    Where tiles do not come out even, those of the last round, and a round before it, are shared by all, unless the last
    round is nearly full.
    """
    tiles = _tiles(w, tokens, s)
    if s.split_k > 1:
        return tiles * s.split_k, tiles
    grid = min(processors * s.occupancy, tiles * w.blocks)
    rounds, left = divmod(tiles, grid)
    if left == 0 or (s.tokens >= 96 and left >= 0.85 * grid):
        return min(grid, tiles), tiles
    return grid, max(rounds - 1, 0) * grid


def shared_bytes(w: IntegerTiles, s: IntegerTileConfig) -> int:
    """Dynamic shared memory: stages, and with split_k what other thread blocks send; as in integer_sm90.cuh."""
    stage = s.tokens * BLOCK + _rows(s) // ROWS * _slot(w) + w.subs * s.tokens * 4
    owned = -(-s.tokens // 8 // s.split_k) * s.warpgroups * 2048
    return 1024 + 256 + s.stages * stage + (s.split_k - 1) * owned


def sm80_shared_bytes(w: IntegerTiles, s: IntegerSm80TileConfig) -> int:
    """The same for integer_sm80.cuh."""
    rows = s.warps_n * s.tiles * 16
    stages = s.stages * s.tokens * (BLOCK + 4 * w.subs) + s.w_stages * rows * _slot(w) // ROWS
    return max(s.warps_k * stages, s.warps_k * s.tokens * (rows + 4) * 4)


def _slot(w: IntegerTiles) -> int:
    return (8192 if w.narrow < w.blocks else 4096) + 128 * w.subs


def _rows(s: IntegerTileConfig) -> int:
    return ROWS * s.warpgroups


def _tiles(w: IntegerTiles, tokens: int, s: IntegerTileConfig) -> int:
    return -(-w.N // _rows(s)) * -(-tokens // s.tokens)


def choose(
    w: IntegerTiles, tokens: int, processors: int | None = None, capability: tuple[int, int] | None = None
) -> IntegerTileConfig | IntegerSm80TileConfig:
    """Return the tile config that should be fastest: by `estimate`, and for few tokens the warp mma."""
    if (capability or torch.cuda.get_device_capability()) != (9, 0):
        return _choose_sm80(w, tokens)
    processors = processors or multiprocessors()
    key = (w.N, w.blocks, w.narrow < w.blocks, w.segments, w.subs, tokens, processors)
    if key not in _chosen:
        _chosen[key] = _choose_sm90(w, tokens, processors)
    return _chosen[key]


_chosen: dict[tuple[int, ...], IntegerTileConfig | IntegerSm80TileConfig] = {}


def _choose_sm90(w: IntegerTiles, tokens: int, processors: int) -> IntegerTileConfig | IntegerSm80TileConfig:
    if tokens <= 16:
        return _choose_few(w, 8 if tokens <= 8 else 16, processors)
    most = 256 if w.segments == 1 else 96 if w.two_level and not w.segments else 160  # as registers do
    counts = range(-(-tokens // most), -(-tokens // min(tokens, 32)) + 1)
    sizes = {next(t for t in SIZES if t >= -(-tokens // n)) for n in counts}
    splits = [n for n in (1, 2, 4) if n <= w.blocks // 2 + 1]
    each = [s for size in sorted(sizes) for split in splits for s in tile_configs(w, size, split)]
    return min(each, key=lambda s: estimate(w, tokens, s, processors))


def _choose_few(w: IntegerTiles, size: int, processors: int) -> IntegerTileConfig | IntegerSm80TileConfig:
    """Few tokens: as many thread blocks as run at once."""
    few = IntegerSm80TileConfig(size, 2, 2, 8, 2, 2, half_bytes=False)
    if 0.85 * processors <= -(-w.N // ROWS) <= processors and sm80_shared_bytes(w, few) <= _SHARED:
        return few  # one for each multiprocessor: nothing to add across thread blocks
    tiles = -(-w.N // (3 * ROWS))
    room = {4: 120 * processors // 132, 2: processors}  # clusters of 4 leave some multiprocessors alone
    split = next((n for n in room if n * tiles <= room[n] and n <= w.blocks), 1)
    return fitted(w, IntegerTileConfig(size, 3, _STAGES, split_k=split))


def tile_configs(w: IntegerTiles, size: int, split_k: int = 1) -> Iterator[IntegerTileConfig]:
    """Tile configs of so many tokens: 64 rows, once or twice on a multiprocessor, 128, or 192 where registers do."""
    if 64 <= size <= 128 and split_k == 2:
        yield fitted(w, IntegerTileConfig(size, 1, _STAGES, split_k=split_k))
    if size <= (128 if w.segments == 1 else 64) and split_k <= 2:
        yield fitted(w, IntegerTileConfig(size, 1, _STAGES, occupancy=2, split_k=split_k))
    if split_k <= 2:
        yield fitted(w, IntegerTileConfig(size, 2, _STAGES, split_k=split_k))
    if size <= 64 or (size <= 128 and w.segments == 1):
        yield fitted(w, IntegerTileConfig(size, 3, _STAGES, split_k=split_k))


def estimate(w: IntegerTiles, tokens: int, s: IntegerTileConfig, processors: int) -> float:
    """Return about how many cycles a product takes. The constants are fitted to an H200: 30 products of 4096 x 4096 to
    8192 x 8192 and 16 to 512 tokens, all configs that `tile_configs` has.
    """
    tiles, groups = _tiles(w, tokens, s), s.warpgroups
    grid, whole = schedule(w, tokens, s, processors)
    codes = groups * (4096 + 128 * w.subs)  # of a block of 128 inputs
    issue = groups * (115 + 1.28 * s.tokens if w.segments else 146 + 3.61 * w.subs * s.tokens)
    load = max(codes / 12.9, (codes + s.tokens * BLOCK) / 35.3)  # a share of what memory and L2 give
    block, sums = s.occupancy * cbrt(issue**3 + load**3), groups * s.tokens
    if s.split_k > 1:
        at_once = s.occupancy * processors * (30 if s.split_k > 2 else 66) // 132  # clusters that find room
        shared = min(1.0, max(1 / s.occupancy, tiles * s.split_k / (s.occupancy * processors)))
        part = -(-w.blocks // s.split_k) * block * shared
        return 2520 + -(-tiles // at_once) * (part + 10.2 * sums + 2460)
    if whole == tiles:
        return 2520 + -(-tiles // grid) * (w.blocks * block + 5080)
    return 2520 + tiles * w.blocks / grid * block + 25.2 * sums + 5040


def fitted(w: IntegerTiles, s: IntegerTileConfig) -> IntegerTileConfig:
    """Return the config with as many stages as there is room for."""
    while shared_bytes(w, s) > _SHARED // s.occupancy and s.stages > 2:
        s = replace(s, stages=s.stages - 1)
    return s


def _choose_sm80(w: IntegerTiles, tokens: int, room: int | None = None) -> IntegerSm80TileConfig:
    if room is None:
        room = int(getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 99 * 1024))
    shapes = (
        IntegerSm80TileConfig(64, 1, 8, 1, 3, 3),
        IntegerSm80TileConfig(64, 1, 4, 1, 3, 3),
        IntegerSm80TileConfig(32, 1, 4, 2, 3, 3),
        IntegerSm80TileConfig(16, 1, 4, 2, 3, 3),
        IntegerSm80TileConfig(8, 1, 4, 2, 3, 3),
        IntegerSm80TileConfig(8, 1, 4, 1, 2, 2),
    )
    useful = [s for s in shapes if s.tokens < 2 * tokens or s.tokens == 8]
    return next(s for s in useful if sm80_shared_bytes(w, s) <= room)
