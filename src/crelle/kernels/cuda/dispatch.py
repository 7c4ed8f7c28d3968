"""Which kernel multiplies how many rows of x: one table, for each kind of weights.

(Weights with quantized activations, grouped and two-level, take integer_gemm.cu for any number of rows; x is encoded
by integer_encode.cu.)

    rows        Hopper and newer        before Hopper            dense weights          mixed 2/4-bit weights
    1 … 4       gemv                    gemv                     gemv (dense.cu)        gemv (mixed_gemv.cu)
    5 … 8       skinny_gemm             gemv, twice              torch                  gemv
    9 … 32      skinny_gemm             gemm                     torch                  gemm (mixed_gemm.cu)
    33 …        gemm                    gemm                     torch                  gemm
    2049 …      gemm                    gemm                     torch                  torch (mixed_dequant.cu first)

Four-bit floats: up to 8 rows `gemv` (fp4_gemv.cu), more `gemm` (fp4_gemm.cu).

    gemv          bmma_gemv.cu: bit-serial x on the binary tensor cores; reads each weight byte once
    skinny_gemm   skinny_gemm.cu: weights dequantized in registers for the warp-wide mma, x as it lies in memory
    gemm          gemm.cu: the same for the warpgroup-wide mma (sm_90), or the warp-wide one before it; x packed

Batch-invariant products (batch_invariant.py, mixed_gemm.py) ignore the table: a row's bits must not depend on the
number of rows, so all of them take `gemm` with a fixed split-K; dense weights take torch in chunks of a fixed number
of rows, and integer ones integer_gemm.cu.
"""

from typing import Literal

import torch

GEMV_ROWS = 4  # of one launch
SKINNY_ROWS = 32
FP4_GEMV_ROWS = 8
MIXED_GEMM_ROWS = 2048  # beyond, dequantizing once for torch should cost less: extrapolated from 512 rows
INVARIANT_ROWS = 256  # of one batch-invariant launch
INVARIANT_DENSE_ROWS = 64  # of one chunk for torch, padded
INVARIANT_INTEGER_ROWS = 64  # of one chunk for the integer GEMM, padded

Route = Literal["gemv", "skinny_gemm", "gemm", "torch"]

_END = 1 << 62
_HOPPER: tuple[tuple[int, Route], ...] = ((GEMV_ROWS, "gemv"), (SKINNY_ROWS, "skinny_gemm"), (_END, "gemm"))
_AMPERE: tuple[tuple[int, Route], ...] = ((2 * GEMV_ROWS, "gemv"), (_END, "gemm"))
_MIXED: tuple[tuple[int, Route], ...] = ((GEMV_ROWS, "gemv"), (MIXED_GEMM_ROWS, "gemm"), (_END, "torch"))
_FP4: tuple[tuple[int, Route], ...] = ((FP4_GEMV_ROWS, "gemv"), (_END, "gemm"))
_DENSE: tuple[tuple[int, Route], ...] = ((GEMV_ROWS, "gemv"), (_END, "torch"))


def route(rows: int, capability: tuple[int, int] | None = None) -> Route:
    """Return what multiplies this number of rows by a bit-plane weight on a device (the current one unless given)."""
    if rows <= GEMV_ROWS:
        return "gemv"  # everywhere: the device, which takes microseconds to ask, does not matter
    table = _HOPPER if (capability or torch.cuda.get_device_capability()) >= (9, 0) else _AMPERE
    return _first(table, rows)


def gemm_route(rows: int, capability: tuple[int, int] | None = None) -> Route:
    """Return the same among the kernels that multiply x as 16-bit floats: `gemv` left out."""
    return "skinny_gemm" if route(max(rows, 2 * GEMV_ROWS + 1), capability) == "skinny_gemm" else "gemm"


def dense_route(rows: int) -> Route:
    """Return what multiplies this number of rows by a dense weight."""
    return _first(_DENSE, rows)


def mixed_route(rows: int) -> Route:
    """Return what multiplies this number of rows by a mixed 2/4-bit weight."""
    return _first(_MIXED, rows)


def fp4_route(rows: int) -> Route:
    """Return what multiplies this number of rows by a weight of four-bit floats."""
    return _first(_FP4, rows)


def _first(table: tuple[tuple[int, Route], ...], rows: int) -> Route:
    return next(kernel for up_to, kernel in table if rows <= up_to)
