"""The papers' table look-up kernel (lut.cu) and its weights; selected only by name (`--kernel cuda-lut`, kernel.py).

    w = lay_out(quantized)
    y = matmul(x, w, bias, residual)                  up to dispatch.GEMV_ROWS rows of x

Rows are padded to tiles of 16, inputs to units of 1024: 32 lanes of 32 inputs, of which slice s is lane's s-th byte.
    words   uint8 [tiles, units, P, 4, 32, 16]     unit, plane, slice, lane: the byte of each of 16 rows
    scales  S [tiles, ceil(units/span), words, groups, 16]     what a group stores for each row, see ScaleKind
Lanes 16 ... 31 hold rows 8 ... 15 first: the kernel's sum over lanes then needs no choice in its widest step.
A group of inputs is stored as 32, 64, ... 512 or a multiple of 1024 of them. Others are padded up to 32 inputs and,
where that is none of these, stored as several groups with the same scales; `order` then tells which input stands where
(-1: none). Laying out needs no GPU.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES, columns
from crelle.kernels.cuda.planes.weight_blocks import ROWS, BlockedWeight, ScaleKind, blocked

UNIT, LANES, SLICES = 1024, 32, 4

Variant = Literal["SHARED", "PRIVATE"]  # tables as in the papers; tables with a bank for each lane
VARIANTS: tuple[Variant, ...] = ("SHARED", "PRIVATE")


@dataclass(frozen=True, slots=True, eq=False)
class LutWeight:
    """A prepared matrix. `semaphores` are the kernel's: products with the same weight run one after the other."""

    N: int
    K: int
    P: int  # planes that count; `words` may hold more (nested planes)
    kind: ScaleKind
    groups: int  # in a unit: 1, 2, 4 ... 32
    blocks_per_scale: int  # units that share a set of scales
    words: Tensor
    scales: Tensor
    semaphores: Tensor  # int32 [tiles], 0 between products
    perm: Tensor | None = None  # int32 [units * 1024]

    @property
    def units(self) -> int:
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.words, self.scales))


@dataclass(frozen=True, slots=True)
class LutTileConfig:
    """Tile config of lut.cu; all but `row_blocks` are its template parameters."""

    slices: int  # of 256 inputs that a thread block has tables of: 1, 2, 4
    warps: int  # of a thread block
    occupancy: int  # thread blocks that a multiprocessor should hold
    row_blocks: int  # thread blocks that share the rows
    stages: int = 1  # planes loaded ahead
    table: torch.dtype = torch.float32


def lay_out(w: QuantTensor) -> LutWeight:
    """Lay a matrix of planes out anew, on the device it is on."""
    a = blocked(w, UNIT)
    N, K = w.shape
    semaphores = torch.zeros(-(-N // ROWS), dtype=torch.int32, device=a.planes.device)
    return LutWeight(
        N, K, a.planes.shape[0], a.kind, a.groups, a.blocks_per_scale, _words(a), _tiled(a), semaphores, a.perm
    )


def _words(a: BlockedWeight) -> Tensor:
    """Planes as words; a plane at a time, so that what stands beside it stays small."""
    P, N, _ = a.planes.shape
    tiles, half = -(-N // ROWS), LANES // 2
    words = torch.empty(tiles, a.blocks, P, SLICES, LANES, ROWS, dtype=torch.uint8, device=a.planes.device)
    for p in range(P):
        six = a.plane(p, UNIT).view(tiles, 2, 8, a.blocks, LANES, SLICES).permute(0, 3, 5, 4, 1, 2)
        words[:, :, p, :, :half] = six[..., :half, :, :].flatten(-2)  # tile, unit, slice, lane, rows
        words[:, :, p, :, half:] = six[..., half:, :, :].flip(-2).flatten(-2)
    return words


def _tiled(a: BlockedWeight) -> Tensor:
    scales = a.padded_scales()
    five = scales.view(scales.shape[0], -1, ROWS, scales.shape[2] // a.groups, a.groups)
    return five.permute(1, 3, 0, 4, 2).contiguous()


# --- the product ------------------------------------------------------------------------------------------------------


def lut_variant(
    w: LutWeight, tokens: int, variant: Variant, config: LutTileConfig, dtype: torch.dtype
) -> tuple[str, str]:
    """Return the kernel (file, expression) of such a product."""
    s = config
    arguments = f"{w.P}, crelle::{w.kind.name}, {w.groups}, {columns(tokens)}, crelle::{variant}"
    pieces = f"{s.slices}, {s.warps}, {s.occupancy}, {min(s.stages, w.P)}"
    types = f"{C_TYPES[s.table]}, {C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}"
    return "lut/lut.cu", f"crelle::lut<{arguments}, {pieces}, {types}>"


def matmul(
    x: Tensor,
    w: LutWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    variant: Variant | None = None,
    out: Tensor | None = None,
    config: LutTileConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [tokens, N], for x [tokens, K] of fp16 or bf16, tokens <= GEMV_ROWS."""
    x = x.contiguous()
    tokens = x.shape[0]
    variant = variant or "PRIVATE"
    s = config or choose(w, tokens, variant)
    y = torch.empty(tokens, w.N, dtype=x.dtype, device=x.device) if out is None else out
    tiles, splits = w.semaphores.numel(), w.units * SLICES // s.slices
    partial = torch.empty(splits, columns(tokens), tiles * ROWS, dtype=torch.float32, device=x.device)
    kernel = load(*lut_variant(w, tokens, variant, s, x.dtype))
    kernel(
        (min(s.row_blocks, tiles), splits, 1),
        32 * s.warps,
        w.words,
        w.scales,
        x,
        w.perm,
        bias,
        residual,
        partial,
        w.semaphores,
        y,
        w.N,
        w.K,
        tokens,
        w.units,
        w.words.shape[2],
        w.blocks_per_scale,
        shared=table_bytes(s, tokens, variant),
        pdl=True,
    )
    return y


def table_bytes(s: LutTileConfig, tokens: int, variant: Variant) -> int:
    """Shared memory of a thread block: its tables, as in lut_table.cuh, and the inputs that they are made of."""
    M = columns(tokens)
    entry = M * s.table.itemsize
    if variant == "SHARED":
        tables = s.slices * 8192 * entry
    else:
        per_step = {2: 4, 4: 2}.get(entry, 1)
        tables = -(-s.slices // per_step) * 256 * max(256, 32 * entry)
    return tables + M * s.slices * 8 * 33 * 4


def choose(
    w: LutWeight, tokens: int, variant: Variant, processors: int | None = None, room: int | None = None
) -> LutTileConfig:
    """Return the tile config that was fastest on an H200 for problems like this one.

    A small matrix is over before tables of 1024 inputs pay for themselves: 512 then, and its planes are asked for well
    ahead, which a large matrix has no need of. Sums of four half entries can err by more than 1e-3, so several tokens
    share tables of 512 inputs. `room` is the shared memory that a thread block may have.
    """
    processors, room = processors or multiprocessors(), room or _room(torch.cuda.current_device())
    tiles = w.semaphores.numel()
    small = tiles * w.units < 40 * processors
    warps = (
        20 if w.P <= 2 and w.kind in (ScaleKind.BCQ, ScaleKind.BCQ_SYMMETRIC) else 24
    )  # what the registers are enough for
    s = LutTileConfig(4, warps, 1, 1)
    if tokens > 1:
        s = LutTileConfig(2, 16, 1, 1, 1, torch.float16)
    elif small:
        s = LutTileConfig(2, 16, 1, 1, 4)
    while table_bytes(s, tokens, variant) > room and s.slices > 1:
        s = replace(s, slices=s.slices // 2, warps=16)
    splits = w.units * SLICES // s.slices
    once, twice = processors // splits, 2 * processors // splits
    row_blocks = min(tiles, max(1, once if 20 * once * splits >= 19 * processors else twice))
    stages = 1 if s.stages == 1 else 4 if tiles <= row_blocks * s.warps and w.scales.dtype != torch.float32 else 2
    return replace(s, row_blocks=row_blocks, stages=stages)


@cache
def _room(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin) - 1024  # type: ignore[attr-defined]
