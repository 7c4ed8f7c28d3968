"""Launches mixed_decode.cu: one token through up to three mixed 2/4-bit matrices, norm or activation included.

    y = product(x, [q, k, v], x.dtype, "RMS_NORM", norm, None, 1e-5)      # one launch, [1, outputs of all]

The matrices read the same input and may differ in the groups that have 4 bits. `supports` says what it does not take;
mixed_gemv.py does that in two launches.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import ADDRESS, Launch, can_bind, is_recording, load, multiprocessors
from crelle.kernels.cuda.mixed.mixed_config import room_of_device
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight, unit2_bytes
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.step.activations import Prologue, width

MOST = 3  # matrices of a launch
_OPS = get_args(Prologue)  # in the order of types.cuh
_MATRIX = struct.Struct("7P5if5i4x")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile config of mixed_decode.cu; its template parameters, and its grid."""

    tiles: int  # of 16 rows that a thread block has at a time
    warps: int  # that take turns at the units of inputs
    stages: int  # of a warp's load pipeline
    occupancy: int  # thread blocks that have registers on a multiprocessor: more than `blocks` lets the next launch in
    blocks: int = 1  # for each multiprocessor


def supports(x: Tensor, weights: Sequence[MixedWeight], op: Prologue = "PLAIN", *others: Tensor | None) -> bool:
    """Whether one launch does it; `others`: norm, shift, biases, residual."""
    if x.shape[0] != 1 or not 1 <= len(weights) <= MOST or any(w.spans is None for w in weights):
        return False
    K = x.shape[1] // width(op)
    inputs = [t for t in (x, *others) if t is not None]
    aligned = K % 8 == 0 and x.is_contiguous() and all(t.data_ptr() % 16 == 0 for t in inputs)
    return (
        aligned and all(t.dtype == x.dtype for t in inputs) and 2 * token_bytes(weights) <= room_of_device() - 24 * 1024
    )


def pairs(weights: Sequence[MixedWeight]) -> bool:
    """Whether the first's activation can be multiplied by the second in the launch that makes both."""
    return len(weights) == 2 and len({(w.N, w.K, w.U2, w.U4) for w in weights}) == 1


def token_bytes(weights: Sequence[MixedWeight]) -> int:
    """Shared memory of the encoded token; as in mixed_digits.cuh."""
    return max(768 * w.U2 + 320 * w.U4 for w in weights)


def shared_bytes(weights: Sequence[MixedWeight], c: DecodeConfig, paired: bool = False) -> int:
    """Dynamic shared memory: the token, the pipelines, two pages of sums, a sum; as in mixed_decode.cu."""
    return _shared_bytes(token_bytes(weights) * (1 + paired), c)


def _shared_bytes(token: int, c: DecodeConfig) -> int:
    queue = c.stages * (c.tiles * unit2_bytes(1) + 8) + (c.stages & 1) * 8
    return token + c.warps * (queue + 256 * c.tiles + 4) + 16


def variant(op: Prologue, c: DecodeConfig, dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[str, str]:
    others = str(op not in ("PLAIN", "RMS_NORM", "SILU_MUL")).lower()
    sizes = f"{c.tiles}, {c.warps}, {c.stages}, {c.occupancy}"
    return "mixed/mixed_decode.cu", f"crelle::mixed_decode<{others}, {sizes}, {C_TYPES[dtype]}, {C_TYPES[out_dtype]}>"


def product(
    x: Tensor,
    weights: Sequence[MixedWeight],
    dtype: torch.dtype,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    biases: Sequence[Tensor | None] | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
    paired: bool = False,
) -> Tensor:
    """Return op(x) @ W.T (+ bias) (+ residual) as [1, N of all], in `dtype`, for x [1, K] (gated: [1, 2K]).

    If paired, silu(op(x) @ W.T) * (op(x) @ V.T) as [1, N] of two matrices (`pairs`).
    """
    N = weights[0].N if paired else sum(w.N for w in weights)
    y = torch.empty(1, N, dtype=dtype, device=x.device) if out is None else out
    c = config or choose(weights, paired)
    matrices, blocks = _described(weights, c, biases or [None] * len(weights), paired)
    load(*variant(op, c, x.dtype, dtype))(
        (blocks, 1, 1),
        32 * c.warps,
        matrices,
        *(x, norm, shift, residual, y, x.shape[1] // width(op), _OPS.index(op), int(paired), float(eps)),
        shared=shared_bytes(weights, c, paired),
        pdl=True,
    )
    return y


def matmul(x: Tensor, w: MixedWeight) -> Tensor | None:
    """Return x @ W.T for x [1, K], bound to addresses: less work for the host; None: `supports` says no."""
    bound: Launch | None = w.plans.get(x.dtype)
    address = x.data_ptr()
    if bound is not None and address % 16 == 0 and x.is_contiguous() and not is_recording():
        y = torch.empty(1, w.N, dtype=x.dtype, device=x.device)
        bound(address, y.data_ptr())
        return y
    if not supports(x, [w]):
        return None
    c = choose([w])
    kernel = load(*variant("PLAIN", c, x.dtype, x.dtype))
    if can_bind(kernel):
        matrices, blocks = _described([w], c, [None], False)
        inputs = (matrices, ADDRESS, None, None, None, ADDRESS, w.K, _OPS.index("PLAIN"), 0, 0.0)
        w.plans[x.dtype] = kernel.bind((blocks, 1, 1), 32 * c.warps, *inputs, shared=shared_bytes([w], c), pdl=True)
    return product(x, [w], x.dtype)


def _described(
    weights: Sequence[MixedWeight], c: DecodeConfig, biases: Sequence[Tensor | None], paired: bool
) -> tuple[bytes, int]:
    """Return the matrices as the kernel takes them, and its thread blocks."""
    tiles = [w.tiles.shape[0] for w in weights]
    ends = _shares(tiles[:1] if paired else tiles, multiprocessors() * c.blocks) * (1 + paired)
    columns, first, described = 0, 0, list[bytes]()
    for w, bias, end in zip(weights, biases, ends, strict=True):
        parts = (w.tiles, w.rows, w.outliers, w.outlier_rows, w.starts, w.spans, bias)
        sizes = (w.N, w.tiles.shape[0], w.tile_base, w.U2, w.U4, 2.0**w.outlier_exponent)
        where = (columns, end, *divmod(w.tiles.shape[0], end - first), w.runs)
        described.append(_MATRIX.pack(*(0 if t is None else t.data_ptr() for t in parts), *sizes, *where))
        if not paired:
            columns, first = columns + w.N, end
    described += [_MATRIX.pack(*([0] * 12), 0.0, 0, 1 << 30, 0, 0, 0)] * (MOST - len(weights))
    return b"".join(described), ends[-1]


def choose(
    weights: Sequence[MixedWeight], paired: bool = False, processors: int | None = None, room: int | None = None
) -> DecodeConfig:
    """Return a tile config."""
    tiles = sum(w.tiles.shape[0] for w in weights)
    return _choose(
        tiles, token_bytes(weights) * (1 + paired), processors or multiprocessors(), room or room_of_device()
    )


@cache
def _choose(tiles: int, token: int, processors: int, room: int) -> DecodeConfig:
    """Few tiles are two for each thread block, one block a multiprocessor; many are three, two blocks."""
    few = [DecodeConfig(2, 12, 2, 2 if token < 16 * 1024 else 1), DecodeConfig(2, 12, 1, 1)]
    many = [DecodeConfig(3, 8, 2, 2, 2), DecodeConfig(3, 12, 2, 1), DecodeConfig(3, 8, 2, 1)]
    for c in [*(few if tiles <= 2 * processors else many), DecodeConfig(1, 8, 2, 1)]:
        if max(c.blocks, c.occupancy) * (_shared_bytes(token, c) + 1024) <= room + 1024:
            return c
    return DecodeConfig(1, 4, 1, 1)


@cache
def _shares_of(tiles: tuple[int, ...], blocks: int) -> tuple[int, ...]:
    total, ends = sum(tiles), list[int]()
    blocks = max(len(tiles), min(blocks, total))
    for i, done in enumerate(accumulate(tiles)):
        least, most = (ends[-1] if ends else 0) + 1, blocks - (len(tiles) - 1 - i)
        ends.append(min(most, max(least, round(blocks * done / total))))
    return tuple(ends)


def _shares(tiles: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Return one behind the last thread block of each matrix, as many for each as it has tiles of all."""
    return _shares_of(tuple(tiles), blocks)
