"""Launches pack_x.cu and gemm.cu: x is packed for the mma instructions once, then any number of weights multiply it.

    xs = pack(x, w)                       # serves every weight with the same inputs (weight_layout.same_inputs)
    y = product(xs, w, bias)
    y = matmul(x, w, bias)                # both; up to 32 rows skinny_gemm.py instead, which takes x as it lies

Any number of rows of x; below 5 bmma_gemv.py is faster. Both launch on the current stream, allocate only through torch,
and can be captured in a graph.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes import skinny_gemm
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.planes.weight_layout import ROWS, CudaWeight

_OCCUPANCY = 4  # at most so many thread blocks of a product on a multiprocessor
_SHARED = 227 * 1024 - 1024  # bytes that they have together on Hopper, less the barriers
_COST = {16: 0.45, 32: 0.46, 64: 0.52, 128: 0.65, 192: 0.84, 256: 1.0}  # measured time of a tile, by its tokens
_SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)  # tokens of a tile


class Tiled(Protocol):
    """A weight whose product is made tile by tile, from blocks of 256 inputs."""

    @property
    def N(self) -> int:  # noqa: N802
        """Rows."""

    @property
    def blocks(self) -> int:
        """Blocks of a row."""


class Ordered(Tiled, Protocol):
    """A weight as far as x is packed for it."""

    @property
    def perm(self) -> Tensor | None:
        """Which input stands where, int32 [places], -1 for none."""

    @property
    def places(self) -> int:
        """Length of perm."""

    @property
    def order(self) -> int:
        """How inputs are paired (x_layout.cuh)."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedX:
    """x packed as gemm.cu reads it: swizzled, in the order of the mma instruction."""

    tokens: int
    dtype: torch.dtype
    xs: Tensor  # [4 blocks, tokens rounded up to 8, 64], swizzled
    semaphores: Tensor  # int32, zero between launches: thread blocks that share a stream-K tile wait on them

    @classmethod
    def empty(cls, tokens: int, w: Tiled, x: Tensor, orders: int = 1) -> list[Self]:
        """Room for so many tokens like x in some orders; who fills it sets the semaphores to zero."""
        xs = torch.empty(orders, 4 * w.blocks, -(-tokens // 8) * 8, 64, dtype=x.dtype, device=x.device)
        semaphores = torch.empty(_OCCUPANCY * multiprocessors(), dtype=torch.int32, device=x.device)
        return [cls(tokens, x.dtype, each, semaphores) for each in xs]


@dataclass(frozen=True, slots=True)
class GemmTileConfig:
    """Tile config of gemm_sm90.cuh; its template parameters."""

    tokens: int  # of a tile: a multiple of 16 up to 256
    warpgroups: int  # of 64 rows
    x_chunks: int  # times 64 inputs: a stage of x
    x_stages: int
    w_stages: int  # times 256 inputs under way
    occupancy: int = 1  # thread blocks that a multiprocessor holds
    split_k: int = (
        1  # thread blocks of a cluster that share a tile along K; 1: stream-K where tiles do not come out even
    )


@dataclass(frozen=True, slots=True)
class GemmSm80TileConfig:
    """The same for gemm_sm80.cuh."""

    tokens: int  # of a tile: 8, 16, 32, 64
    tiles: int  # of 16 rows that a warp has
    warps_n: int  # warps along N
    warps_k: int  # groups of warps that split K
    stages: int  # times 256 inputs


def pack_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "mainloop/pack_x.cu", f"crelle::pack_x<{C_TYPES[dtype]}>"


def product_variant(w: CudaWeight, config: GemmTileConfig | GemmSm80TileConfig, dtype: torch.dtype) -> tuple[str, str]:
    s = config
    arguments = f"{w.P}, crelle::{w.kind.name}, {w.groups}"
    if isinstance(s, GemmSm80TileConfig):
        kernel, pieces = "gemm_sm80", f"{s.tokens}, {s.tiles}, {s.warps_n}, {s.warps_k}, {s.stages}"
    else:
        kernel = "gemm_sm90"
        pieces = f"{s.tokens}, {s.warpgroups}, {s.x_chunks}, {s.x_stages}, {s.w_stages}, {s.occupancy}, {s.split_k}"
    return "planes/gemm.cu", f"crelle::{kernel}<{arguments}, {pieces}, {C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}>"


def pack(x: Tensor, w: Ordered) -> PackedX:
    """Pack x [M, K] for w's mma instructions."""
    return pack_each(x, w, w.perm)[0]


def pack_each(x: Tensor, w: Ordered, perms: Tensor | None) -> list[PackedX]:
    """Pack x for weights like w that differ in the order of inputs, int32 [orders, places]: one launch."""
    M, K = x.shape
    orders = 1 if perms is None else perms.numel() // w.places
    to = PackedX.empty(M, w, x, orders)
    xs, semaphores = to[0].xs, to[0].semaphores
    grid = (2 * w.blocks, -(-xs.shape[1] // 32), orders)
    sizes = (semaphores.numel(), M, K, w.order, w.places)
    load(*pack_variant(x.dtype))(grid, 256, x.contiguous(), perms, xs, semaphores, *sizes, pdl=True)
    return to


def product(
    x: PackedX,
    w: CudaWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: GemmTileConfig | GemmSm80TileConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) as [M, N]."""
    plan = _plan(w, x.tokens, x.dtype, config)
    y = torch.empty(x.tokens, w.N, dtype=x.dtype, device=x.xs.device) if out is None else out
    tensors: tuple[Tensor | None, ...] = (w.words, w.scales, x.xs, bias, y)
    if plan.partial is not None:
        tensors += (torch.empty(plan.partial, dtype=torch.float32, device=x.xs.device), x.semaphores)
    load(*plan.variant)(plan.grid, plan.threads, *tensors, *plan.sizes, shared=plan.shared, pdl=True)
    return y


class _Plan(NamedTuple):
    """A launch of gemm.cu but for its tensors."""

    variant: tuple[str, str]
    grid: tuple[int, int, int]
    threads: int
    partial: int | None  # sums of stream-K tiles; None: the kernel takes none
    sizes: tuple[int, ...]
    shared: int


def _plan(w: CudaWeight, tokens: int, dtype: torch.dtype, config: GemmTileConfig | GemmSm80TileConfig | None) -> _Plan:
    key = ("gemm", tokens, dtype, config)
    found: _Plan | None = w.plans.get(key)
    if found is None:
        s = config or choose(w, tokens, dtype)
        variant, sizes = product_variant(w, s, dtype), (w.N, tokens, w.blocks, w.words.shape[2], w.blocks_per_scale)
        if isinstance(s, GemmSm80TileConfig):
            grid = (-(-w.N // (ROWS * s.tiles * s.warps_n)), -(-tokens // s.tokens), 1)
            found = _Plan(variant, grid, 32 * s.warps_n * s.warps_k, None, sizes, sm80_shared_bytes(w, s))
        else:
            blocks, whole = stream_k_schedule(w, tokens, s, multiprocessors())
            parts = s.split_k == 1 and whole < _tiles(w, tokens, s.tokens, s.warpgroups)
            partial = blocks * s.tokens * 64 * s.warpgroups if parts else 0
            threads = s.warpgroups * 128 + (128 if s.tokens > 128 else 32)
            found = _Plan(variant, (blocks, 1, 1), threads, partial, (*sizes, whole), shared_bytes(w, s))
        w.plans[key] = found
    return found


def matmul(x: Tensor, w: CudaWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) for x [M, K], accumulated in fp32."""
    if x.shape[0] == 0:
        return x.new_empty(0, w.N) if out is None else out
    if dispatch.gemm_route(x.shape[0]) == "skinny_gemm":
        return skinny_gemm.product(skinny_gemm.permuted_rows(x, w), w, bias, None, out)
    return product(pack(x, w), w, bias, out)


def variants(w: CudaWeight, tokens: int, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Return the kernels that `matmul` launches for so many tokens."""
    if dispatch.gemm_route(tokens) == "skinny_gemm":
        return [skinny_gemm.variant(w, skinny_gemm.choose(w, tokens), dtype)]
    return [pack_variant(dtype), product_variant(w, choose(w, tokens, dtype), dtype)]


def stream_k_schedule(w: Tiled, tokens: int, s: GemmTileConfig, processors: int) -> tuple[int, int]:
    """Return (grid, data-parallel tiles); the remaining tiles are stream-K.

    Where tiles do not come out even, those of the last round, and a round before it, are shared by all. Adding the
    parts of a tile costs about 6 us for 256 tokens; where the last round is nearly full, idling costs less.
    """
    tiles = _tiles(w, tokens, s.tokens, s.warpgroups)
    if s.split_k > 1:
        return tiles * s.split_k, tiles
    grid = min(processors * s.occupancy, tiles * w.blocks)
    rounds, left = divmod(tiles, grid)
    if left == 0:
        return grid, tiles
    idle = (1 - left / grid) * w.blocks * 2.8 * _cost(s.tokens)  # us: a block of 256 inputs takes 2.8
    if s.tokens >= 128 and idle < s.tokens * 6 / 256:
        return min(grid, tiles), tiles
    return grid, max(rounds - 1, 0) * grid


def shared_bytes(w: CudaWeight, s: GemmTileConfig) -> int:
    """Dynamic shared memory: x stages and the pipelines of weights; as in gemm_sm90.cuh."""
    queue = s.w_stages * (_block_bytes(w) + 8) + (s.w_stages & 1) * 8
    return 1024 + s.x_stages * s.x_chunks * s.tokens * 128 + 4 * s.warpgroups * queue


def sm80_shared_bytes(w: CudaWeight, s: GemmSm80TileConfig) -> int:
    """The same for gemm_sm80.cuh, where sums take the place of x and weights at the end."""
    stage = s.tokens * 512 + s.warps_n * s.tiles * _block_bytes(w)
    return max(s.warps_k * s.stages * stage, s.warps_k * s.tokens * (s.warps_n * s.tiles * ROWS + 4) * 4)


def _block_bytes(w: CudaWeight) -> int:
    """Of a tile of 16 rows and 256 inputs: planes and scales."""
    return w.P * 512 + w.scales[0, 0].numel() * w.scales.element_size()


def _cost(tokens: int) -> float:
    """The time of a tile of so many tokens, between those measured."""
    below, above = next((a, b) for a, b in pairwise(_COST) if tokens <= b)
    return _COST[below] + (_COST[above] - _COST[below]) * (tokens - below) / (above - below)


def _tiles(w: Tiled, tokens: int, of_tokens: int, warpgroups: int) -> int:
    return -(-w.N // (64 * warpgroups)) * -(-tokens // of_tokens)


def choose(
    w: CudaWeight,
    tokens: int,
    dtype: torch.dtype,
    processors: int | None = None,
    capability: tuple[int, int] | None = None,
) -> GemmTileConfig | GemmSm80TileConfig:
    """Return the tile config that was fastest on an H200 for problems like this (docs/notes/cuda-kernels.md)."""
    if (capability or torch.cuda.get_device_capability()) != (9, 0):
        return _choose_sm80(w, tokens)
    processors = processors or multiprocessors()
    few = _tiles(w, tokens, 256, 2) < 0.4 * processors  # large tiles would be split too often
    fitting = (
        w.P <= 2 and 0.85 * processors < _tiles(w, tokens, 128, 2) <= processors
    )  # dequantized twice, but none split
    sizes = [t for t in _SIZES if t <= 128 or not (few or fitting)]
    at_a_time = min(sizes, key=lambda t: (-(-tokens // t) * _cost(t), t))
    s = _config_for(w, at_a_time, dtype, processors)
    while shared_bytes(w, s) > _SHARED // s.occupancy:  # long scales, many planes
        if s.x_stages > 2:
            s = replace(s, x_stages=s.x_stages - 1)
        elif s.w_stages > 2:
            s = replace(s, w_stages=s.w_stages - 1)
        elif s.occupancy > 1:
            s = replace(s, occupancy=s.occupancy - 1)
        else:
            s = replace(s, tokens=s.tokens // 32 * 16)
    even = s.tokens >= 128 and 0.85 * processors < 2 * _tiles(w, tokens, s.tokens, 2) <= processors and w.blocks > 1
    if even and s.x_chunks * s.x_stages >= 4:  # whose place the sums take
        return replace(s, split_k=2)  # two thread blocks that add up at once are faster than a chain
    return s


def _config_for(w: CudaWeight, tokens: int, dtype: torch.dtype, processors: int) -> GemmTileConfig:
    """The best of those measured for tiles of so many tokens."""
    rows = _tiles(w, 1, 1, 2) / processors  # tiles of 128 rows
    large = w.P > 4 or dtype == torch.bfloat16  # needs more registers than two times two warpgroups have
    narrow = rows < 0.4 or large
    if tokens == 16:
        return GemmTileConfig(16, 1, 2, 4, 3, 3) if narrow else GemmTileConfig(16, 2, 2, 4, 3, 2)
    if tokens == 32:
        return GemmTileConfig(32, 1, 2, 4, 3, 3) if narrow or w.P == 3 else GemmTileConfig(32, 2, 2, 4, 3, 2)
    if tokens <= 64:
        return GemmTileConfig(tokens, 2 if rows < 0.7 or large else 3, 2, 4, 2)
    if tokens <= 128:
        return GemmTileConfig(tokens, 2, 2, 4, 2)
    return GemmTileConfig(tokens, 2, 1, 5, 2) if w.P <= 2 else GemmTileConfig(tokens, 2, 1, 4, 3)


def _choose_sm80(w: CudaWeight, tokens: int, room: int | None = None) -> GemmSm80TileConfig:
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
