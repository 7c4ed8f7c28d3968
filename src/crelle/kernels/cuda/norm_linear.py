"""A step's products for many rows on a GPU, and what stands between them: what FusedLinear does for a few.

    y, x = enter(qkv, x, more, "RMS_NORM", norm)     # x + more, normed, times W
    x, more = leave(o, a, x)                         # a times W, still to be added to x: `enter` does that on its way

    what runs (dispatch.py)    norms and activations
    gemv                       fused into its prologue
    skinny_gemm                one launch before it that adds, norms or activates (rows.cu)
    gemm                       the same launch, which also packs x

With `exact` a row has the same bits whatever the number of rows: the products are those of even.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cuda import dense, dispatch, dozens, even, rows, tiles
from crelle.kernels.cuda.decode import Op
from crelle.kernels.cuda.fused_linear import FusedLinear, Norm
from crelle.kernels.cuda.layout import BLOCK, CudaWeight
from crelle.kernels.cuda.tiles import Arranged


def enter(
    product: FusedLinear,
    x: Tensor,
    more: Tensor | None,
    op: Op,
    norm: Norm,
    exact: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return norm(x + more) @ W.T + bias, and x + more."""
    if _arranges(product, x, op, exact):
        return _arranged(product, x, more, op, norm, exact)
    x = x if more is None else x + more
    return multiply(product, x, op, norm, exact=exact, dtype=dtype), x


def leave(
    product: FusedLinear, h: Tensor | Arranged, x: Tensor, op: Op = "PLAIN", exact: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return x and what is to be added to it: op(h) @ W.T + bias, or x with it added and None."""
    if not isinstance(h, Tensor):
        return x, _product(h, product, exact)
    if _arranges(product, h, op, exact):
        return x, _arranged(product, h, None, op, None, exact)[0]
    return multiply(product, h, op, residual=x, exact=exact), None


def multiply(
    product: FusedLinear,
    x: Tensor,
    op: Op = "PLAIN",
    norm: Norm | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    exact: bool = False,
) -> Tensor:
    """Return op(x) @ W.T + bias + residual for any number of rows."""
    rows = x.shape[0]
    if not exact and _few(product, rows):
        portions = [slice(at, at + dispatch.GEMV_ROWS) for at in range(0, rows, dispatch.GEMV_ROWS)]
        y = [product(x[s], op, norm, None if residual is None else residual[s], dtype) for s in portions]
        return y[0] if len(y) == 1 else torch.cat(y)
    scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    h = x if op == "PLAIN" else dense.apply(x, op, scale, shift, eps)
    biases = [product.bias] if len(product.weights) == 1 else product._biases
    parts = [_many(h, w, bias, residual, exact) for w, bias in zip(product.weights, biases, strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(dtype or product.dtype)


def _many(h: Tensor, w: CudaWeight | Tensor, bias: Tensor | None, residual: Tensor | None, exact: bool) -> Tensor:
    """Return h @ W.T + bias + residual."""
    if exact:
        y = even.matmul(h, w, bias)
    elif isinstance(w, CudaWeight):
        y = tiles.matmul(h, w, bias)
    elif residual is not None and bias is None:
        return torch.addmm(residual, h, w.T)
    else:
        y = F.linear(h, w, bias)
    return y if residual is None else y + residual


def takes_arranged(product: FusedLinear, rows: int, K: int, exact: bool) -> CudaWeight | None:
    """Return the weight for which `leave` may be given [rows, K] as tiles.py arranges it, by who makes it, or None."""
    w = product.weights[0]
    if len(product.weights) > 1 or not isinstance(w, CudaWeight) or w.order is not None or w.blocks * BLOCK != K:
        return None
    if rows % 8 or (not exact and dispatch.route(rows) != "gemm"):
        return None
    return w if not exact or rows <= dispatch.INVARIANT_ROWS else None


def _few(product: FusedLinear, rows: int) -> bool:
    """Whether so many rows take the fused GEMV, in chunks of GEMV_ROWS."""
    planes = isinstance(product.weights[0], CudaWeight)
    return (dispatch.route(rows) if planes else dispatch.dense_route(rows)) == "gemv"


def _arranges(product: FusedLinear, x: Tensor, op: Op, exact: bool) -> bool:
    """Whether rows.cu makes x ready for the product; with `exact` that must not depend on the number of rows."""
    w = product.weights[0]
    if len(product.weights) > 1 or not isinstance(w, CudaWeight) or (not exact and _few(product, x.shape[0])):
        return False
    return rows.supports(w, x.shape[1] // (2 if op == "SILU_MUL" else 1)) is None


def _arranged(
    product: FusedLinear, x: Tensor, more: Tensor | None, op: Op, norm: Norm | None, exact: bool
) -> tuple[Tensor, Tensor]:
    w = product.weights[0]
    assert isinstance(w, CudaWeight)
    if exact and x.shape[0] > dispatch.INVARIANT_ROWS:
        split = [slice(at, at + dispatch.INVARIANT_ROWS) for at in range(0, x.shape[0], dispatch.INVARIANT_ROWS)]
        parts = [_arranged(product, x[s], None if more is None else more[s], op, norm, exact) for s in split]
        products, sums = zip(*parts, strict=True)
        return torch.cat(products), torch.cat(sums)
    scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    if not exact and dispatch.gemm_route(x.shape[0]) == "skinny_gemm":
        plain = op == "PLAIN" and more is None
        ready, total = (dozens.rows(x, w), x) if plain else rows.in_order(x, w, op, scale, shift, eps, more)
        return dozens.product(ready, w, product.bias), total
    xs, total = rows.between(x, w, op, scale, shift, eps, more)
    return _product(xs, product, exact), total


def _product(xs: Arranged, product: FusedLinear, exact: bool) -> Tensor:
    w = product.weights[0]
    assert isinstance(w, CudaWeight)
    return (even.product if exact else tiles.product)(xs, w, product.bias)
