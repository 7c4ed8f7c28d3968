"""Linear layers of a decoder for any number of rows, with residual adds, norms and activations fused around them.

    y, x = norm_linear(qkv, x, addend, "RMS_NORM", norm)   # norm(x + addend) @ W.T, and x + addend
    x, addend = linear_residual(o, a, x)                   # a @ W.T; the next norm_linear adds it to x

    what runs (dispatch.py)    norms and activations
    gemv                       fused into its prologue
    skinny_gemm                one launch before it: residual add, norm or activation (residual_norm_pack.cu)
    gemm                       the same launch, which also packs x
    integer_gemm               one launch before it, which also quantizes x (integer_encode.cu)

With `batch_invariant` a row's bits do not depend on the number of rows: the products are those of batch_invariant.py.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.integer import integer_linear
from crelle.kernels.cuda.integer.integer_encode import EncodePlan
from crelle.kernels.cuda.integer.integer_linear import CudaIntegerWeight
from crelle.kernels.cuda.mixed import mixed_gemm, mixed_gemv
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight
from crelle.kernels.cuda.planes import batch_invariant as invariant
from crelle.kernels.cuda.planes import gemm, skinny_gemm
from crelle.kernels.cuda.planes.gemm import PackedX
from crelle.kernels.cuda.planes.weight_layout import BLOCK, CudaWeight
from crelle.kernels.cuda.step import residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue, width
from crelle.kernels.cuda.step.fused_linear import FusedLinear, Norm


def norm_linear(
    product: FusedLinear,
    x: Tensor,
    addend: Tensor | None,
    op: Prologue,
    norm: Norm,
    batch_invariant: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return norm(x + addend) @ W.T + bias, and x + addend."""
    if product.takes_integers:
        y, x = product.integer_product(x, op, norm, addend, batch_invariant=batch_invariant)
        return y.to(dtype or product.dtype), x
    if _packs(product, x, op, batch_invariant):
        return _packed(product, x, addend, op, norm, batch_invariant)
    x = x if addend is None else x + addend
    return linear(product, x, op, norm, batch_invariant=batch_invariant, dtype=dtype), x


def linear_residual(
    product: FusedLinear, h: Tensor | PackedX, x: Tensor, op: Prologue = "PLAIN", batch_invariant: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return x and what is to be added to it: op(h) @ W.T + bias, or x with it added and None."""
    if not isinstance(h, Tensor):
        return x, _gemm(h, product, batch_invariant)
    if product.takes_integers:
        return x, product.integer_product(h, op, batch_invariant=batch_invariant)[0]
    if _packs(product, h, op, batch_invariant):
        return x, _packed(product, h, None, op, None, batch_invariant)[0]
    return linear(product, h, op, residual=x, batch_invariant=batch_invariant), None


def linear_norm(
    product: FusedLinear,
    h: Tensor | PackedX,
    norm: Norm,
    op: Prologue = "PLAIN",
    batch_invariant: bool = False,
) -> Tensor:
    """Return norm(op(h) @ W.T + bias), an RMS norm: what a sandwich norm leaves to be added to x."""
    if not isinstance(h, Tensor):
        y = _gemm(h, product, batch_invariant)
    elif product.takes_integers:
        y, _ = product.integer_product(h, op, batch_invariant=batch_invariant)
    elif _packs(product, h, op, batch_invariant):
        y = _packed(product, h, None, op, None, batch_invariant)[0]
    else:
        y = linear(product, h, op, batch_invariant=batch_invariant)
    return dense.apply(y, "RMS_NORM", norm.weight, None, norm.eps)


def linear(
    product: FusedLinear,
    x: Tensor,
    op: Prologue = "PLAIN",
    norm: Norm | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Return op(x) @ W.T + bias + residual for any number of rows."""
    rows = x.shape[0]
    if product.takes_integers:
        y, _ = product.integer_product(x, op, norm, None, residual, batch_invariant)
        return y.to(dtype or product.dtype)
    if not batch_invariant and _uses_gemv(product, rows):
        size = rows if isinstance(product.weights[0], MixedWeight) else dispatch.GEMV_ROWS
        chunks = [slice(at, at + size) for at in range(0, rows, size)]
        each = [product(x[s], op, norm, None if residual is None else residual[s], dtype) for s in chunks]
        return each[0] if len(each) == 1 else torch.cat(each)
    scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    h = x if op == "PLAIN" else dense.apply(x, op, scale, shift, eps)
    pairs = zip(product.weights, _biases(product), strict=True)
    parts = [_linear(h, w, bias, residual, batch_invariant) for w, bias in pairs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(dtype or product.dtype)


def _biases(product: FusedLinear) -> Sequence[Tensor | None]:
    return [product.bias] if len(product.weights) == 1 else product._biases


def _linear(
    h: Tensor,
    w: CudaWeight | MixedWeight | CudaIntegerWeight | Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    """Return h @ W.T + bias + residual."""
    if isinstance(w, CudaIntegerWeight):
        plan = EncodePlan([w.form])
        return integer_linear.multiply([w], plan, h, biases=[bias], residual=residual, batch_invariant=batch_invariant)[
            0
        ]
    if isinstance(w, MixedWeight):
        y = mixed_gemv.matmul(h, w, bias, batch_invariant)
    elif batch_invariant:
        y = invariant.matmul(h, w, bias)
    elif isinstance(w, CudaWeight):
        y = gemm.matmul(h, w, bias)
    elif residual is not None and bias is None:
        return torch.addmm(residual, h, w.T)
    else:
        y = F.linear(h, w, bias)
    return y if residual is None else y + residual


def takes_packed(product: FusedLinear, rows: int, K: int, batch_invariant: bool) -> CudaWeight | None:
    """Return the weight for which `linear_residual` takes [rows, K] packed by the kernel before it, or None."""
    w = product.weights[0]
    if len(product.weights) > 1 or not isinstance(w, CudaWeight) or w.perm is not None or w.blocks * BLOCK != K:
        return None
    if rows % 8 or (not batch_invariant and dispatch.route(rows) != "gemm"):
        return None
    return w if not batch_invariant or rows <= dispatch.INVARIANT_ROWS else None


def _uses_gemv(product: FusedLinear, rows: int) -> bool:
    """Whether so many rows take the fused GEMV, in chunks of GEMV_ROWS."""
    w = product.weights[0]
    if isinstance(w, MixedWeight):
        return dispatch.mixed_route(rows) == "gemv"
    return (dispatch.route(rows) if isinstance(w, CudaWeight) else dispatch.dense_route(rows)) == "gemv"


def _packs(product: FusedLinear, x: Tensor, op: Prologue, batch_invariant: bool) -> bool:
    """Whether residual_norm_pack.cu packs x for the product; if batch-invariant, whatever the number of rows."""
    w = product.weights[0]
    if isinstance(w, MixedWeight):
        gemm_takes_it = batch_invariant or dispatch.mixed_route(x.shape[0]) == "gemm"
        if not gemm_takes_it or (len(product.weights) > 1 and product._perms is None):
            return False
    elif (
        len(product.weights) > 1
        or not isinstance(w, CudaWeight)
        or (not batch_invariant and _uses_gemv(product, x.shape[0]))
    ):
        return False
    return residual_norm_pack.supports(w, x.shape[1] // width(op)) is None


def _packed(
    product: FusedLinear, x: Tensor, addend: Tensor | None, op: Prologue, norm: Norm | None, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    w = product.weights[0]
    if batch_invariant and x.shape[0] > dispatch.INVARIANT_ROWS:
        split = [slice(at, at + dispatch.INVARIANT_ROWS) for at in range(0, x.shape[0], dispatch.INVARIANT_ROWS)]
        parts = [
            _packed(product, x[s], None if addend is None else addend[s], op, norm, batch_invariant) for s in split
        ]
        products, sums = zip(*parts, strict=True)
        return torch.cat(products), torch.cat(sums)
    if isinstance(w, MixedWeight):
        perms = w.perm if len(product.weights) == 1 else product._perms
        each, total = residual_norm_pack.add_norm_pack_each(x, w, perms, op, norm, addend)
        weights = [v for v in product.weights if isinstance(v, MixedWeight)]
        return mixed_gemm.products(each, weights, _biases(product), batch_invariant), total
    assert isinstance(w, CudaWeight)
    if not batch_invariant and dispatch.gemm_route(x.shape[0]) == "skinny_gemm":
        plain = op == "PLAIN" and addend is None
        ready, total = (
            (skinny_gemm.permuted_rows(x, w), x)
            if plain
            else residual_norm_pack.add_norm_permute(x, w, op, norm, addend)
        )
        return skinny_gemm.product(ready, w, product.bias), total
    xs, total = residual_norm_pack.add_norm_pack(x, w, op, norm, addend)
    return _gemm(xs, product, batch_invariant), total


def _gemm(xs: PackedX, product: FusedLinear, batch_invariant: bool) -> Tensor:
    w = product.weights[0]
    assert isinstance(w, CudaWeight)
    return (invariant.product if batch_invariant else gemm.product)(xs, w, product.bias)
