"""Launches mixed_encode.cu and mixed_gemv.cu: products with mixed 2/4-bit weights for a few tokens.

    xs = encode(x, w)                     # serves every weight with the same 4-bit groups (mixed_layout.same_inputs)
    y = product(xs, w, x.dtype, bias, residual)
    W = dequantize(w, x.dtype)            # plain [N, K], for products of very many rows by torch (mixed_dequant.cu)
    y = matmul(x, w, bias)                # any of these, or mixed_gemm.py, by the number of rows (dispatch.py)

Any number of rows, of which a launch takes up to 8, or as many as fit into shared memory: the weight is read again for
the next ones; `matmul` gives one row to mixed_decode.py where that takes it. A row's bits do not depend on the values
of others. All launch on the current stream, allocate only through torch, and can be captured in a graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.mixed import mixed_decode, mixed_gemm
from crelle.kernels.cuda.mixed.mixed_config import MixedTileConfig, at_a_time, choose, shared_bytes
from crelle.kernels.cuda.mixed.mixed_layout import ROWS, MixedWeight
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.step.activations import Prologue, width

_ENCODE_WARPS = 8
_SCRATCH = 96 << 20  # bytes of a dequantized slab of rows


@dataclass(frozen=True, slots=True, eq=False)
class MixedX:
    """x in the order of a weight: bytes of each token, those of a launch behind one another."""

    tokens: int
    size: int  # tokens of a launch
    rows: Tensor  # uint8 [tokens rounded up to that, x_bytes]


def encode_variant(op: Prologue, subs: int, K: int, dtype: torch.dtype, aligned: bool | None = None) -> tuple[str, str]:
    whole = "true" if (K % 8 == 0 if aligned is None else aligned) else "false"
    return (
        "mixed/mixed_encode.cu",
        f"crelle::mixed_encode<crelle::{op}, {_ENCODE_WARPS}, {whole}, {subs}, {C_TYPES[dtype]}>",
    )


def encode(
    x: Tensor,
    w: MixedWeight,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
) -> MixedX:
    """Return op(x) for x [tokens, K] (gated: [tokens, 2K]) as `product` takes it."""
    return encode_each(x, w, w.perm[None], op, norm, shift, eps)[0]


def encode_each(
    x: Tensor,
    w: MixedWeight,
    perms: Tensor,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
) -> list[MixedX]:
    """Return the same for weights like w that differ in the order of inputs, int32 [orders, places]: one launch."""
    x = x.contiguous()
    tokens, K, orders = x.shape[0], x.shape[1] // width(op), perms.shape[0]
    size = at_a_time(w, tokens)
    rows = torch.empty(orders, -(-tokens // size) * size, w.x_bytes, dtype=torch.uint8, device=x.device)
    aligned = K % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in (x, norm, shift))
    kernel = load(*encode_variant(op, w.subs, K, x.dtype, aligned))
    grid = (-(-w.places // (64 * _ENCODE_WARPS)), rows.shape[1], orders)
    sizes = (tokens, K, w.U2, w.U4, float(eps))
    kernel(grid, 32 * _ENCODE_WARPS, x, norm, shift, perms, rows, *sizes, shared=-(-K // 8) * 16, pdl=True)
    return [MixedX(tokens, size, some) for some in rows]


def product_variant(
    subs: int, tokens: int, c: MixedTileConfig, dtype: torch.dtype, out_dtype: torch.dtype
) -> tuple[str, str]:
    pieces = f"{subs}, {tokens}, {c.tiles}, {c.warps}, {c.stages}, {c.occupancy}, {str(c.asynchronous).lower()}"
    return "mixed/mixed_gemv.cu", f"crelle::mixed_gemv<{pieces}, {C_TYPES[dtype]}, {C_TYPES[out_dtype]}>"


def product(
    x: MixedX,
    w: MixedWeight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: MixedTileConfig | None = None,
    asynchronous: bool = False,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [tokens, N], in `dtype`; bias and residual are f16 or bf16."""
    y = torch.empty(x.tokens, w.N, dtype=dtype, device=x.rows.device) if out is None else out
    size = x.size
    c = config or choose(w, size, asynchronous=asynchronous)
    added = next((t.dtype for t in (bias, residual) if t is not None), torch.float16)
    kernel = load(*product_variant(w.subs, size, c, added, dtype))
    tiles = w.tiles.shape[0]
    grid = (min(-(-tiles // c.tiles), multiprocessors() * c.occupancy), 1, 1)
    shared = shared_bytes(w, size, c)
    for first in range(0, x.tokens, size):
        some = slice(first, min(first + size, x.tokens))
        kernel(
            grid,
            32 * c.warps,
            *(w.tiles, w.rows, w.outliers, w.outlier_rows, w.starts, x.rows[first : first + size], bias),
            *(None if residual is None else residual[some], y[some]),
            *(w.N, some.stop - first, tiles, w.tile_base, w.U2, w.U4, w.x_bytes, 2.0 ** (w.outlier_exponent - 24)),
            shared=shared,
            pdl=True,
        )
    return y


def dequant_variant(subs: int, K: int, dtype: torch.dtype) -> tuple[str, str]:
    aligned = "true" if K % 8 == 0 else "false"
    return "mixed/mixed_dequant.cu", f"crelle::mixed_dequant<{subs}, {_ENCODE_WARPS}, {aligned}, {C_TYPES[dtype]}>"


def dequantize(w: MixedWeight, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """Return the plain matrix [N, K], or some rows of it from a multiple of 16 on."""
    first, last, _ = rows.indices(w.N)
    tiles = slice(first // ROWS, -(-last // ROWS))
    out = torch.empty(last - first, w.K, dtype=dtype, device=w.tiles.device)
    starts = None if w.starts is None else w.starts[tiles.start :]
    load(*dequant_variant(w.subs, w.K, dtype))(
        (tiles.stop - tiles.start, 1, 1),
        32 * _ENCODE_WARPS,
        *(w.tiles[tiles], w.rows[first:], w.outliers, w.outlier_rows, starts, w.perm, out),
        *(last - first, w.K, w.U2, w.U4, 2.0**w.outlier_exponent),
        pdl=True,
    )
    return out


def matmul(
    x: Tensor, w: MixedWeight, bias: Tensor | None = None, batch_invariant: bool = False, asynchronous: bool = False
) -> Tensor:
    """Return x @ W.T (+ bias) for x [M, K]; if batch-invariant, a row's bits do not depend on the number of rows."""
    if x.shape[0] == 0:
        return x.new_empty(0, w.N)
    if batch_invariant:
        some = x.split(dispatch.INVARIANT_ROWS)  # type: ignore[no-untyped-call]
        parts = [mixed_gemm.invariant_product(mixed_gemm.pack(rows, w), w, bias) for rows in some]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if not asynchronous and bias is None and x.shape[0] == 1 and (y := mixed_decode.matmul(x, w)) is not None:
        return y
    if not asynchronous and mixed_decode.supports(x, [w], "PLAIN", bias):
        return mixed_decode.product(x, [w], x.dtype, biases=[bias])
    route = dispatch.mixed_route(x.shape[0])
    if route == "gemv":
        return product(encode(x, w), w, x.dtype, bias, asynchronous=asynchronous)
    if route == "gemm":
        return mixed_gemm.product(mixed_gemm.pack(x, w), w, bias)
    step = max(ROWS, _SCRATCH // (2 * w.K) // ROWS * ROWS)
    slabs = [slice(n, min(n + step, w.N)) for n in range(0, w.N, step)]
    y = torch.empty(x.shape[0], w.N, dtype=x.dtype, device=x.device)
    for rows in slabs:
        plain = dequantize(w, x.dtype, rows)
        if bias is None:
            torch.mm(x, plain.T, out=y[:, rows])
        else:
            torch.addmm(bias[rows], x, plain.T, out=y[:, rows])
    return y
