"""One layer on the residual stream, with its norms where the spec places them (crelle.kernels.spec).

              before      behind      on the stream       each of attention and of the feed-forward:
    pre       norm                                        x += f(norm(x))
    sandwich  norm        norm                            x += norm(f(norm(x)))
    reordered             norm                            x += norm(f(x))
    post                              norm                x = norm(x + f(x))
    parallel  norm                                        x += attention(norm(x)) + mlp(norm(x))

x comes and goes as two tensors, x and an addend: the launch that prepares x for the next product adds them
(FusedLinear.norm_linear), or the product before it does. What only few families have is a launch of its own: factors of
the residual stream, norms of all heads as one vector, activations that no prologue has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fused_linear import FusedLinear, Norm

if TYPE_CHECKING:
    from crelle.kernels.cuda.experts.fused import FusedExperts
    from crelle.kernels.cuda.planes.gemm import PackedX
    from crelle.kernels.cuda.step.decode_step import StepLayer

Attended = Callable[[Tensor], "Tensor | PackedX"]  # qkv [N, (heads + 2 kv_heads) D] -> [N, heads * D]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedNorms:
    """The norms of attention, or of a feed-forward."""

    before: Norm | None = None  # of what it reads
    behind: Norm | None = None  # of what it returns
    stream: Norm | None = None  # of the residual stream with that added


def placed(layer: "StepLayer") -> tuple[PlacedNorms, PlacedNorms]:
    """Return the norms of a layer's attention and of its feed-forward."""
    both = (layer.norm_attention, layer.post_attention_norm), (layer.norm_mlp, layer.post_mlp_norm)
    attention, mlp = (_placed(layer.spec.placement, norm, post) for norm, post in both)
    return attention, mlp


def _placed(placement: str, norm: Norm, post: Norm | None) -> PlacedNorms:
    if placement == "post":
        return PlacedNorms(stream=norm)
    return PlacedNorms(behind=norm) if placement == "reordered" else PlacedNorms(before=norm, behind=post)


def run_layer(
    layer: "StepLayer", x: Tensor, addend: Tensor | None, attend: Attended, batch_invariant: bool
) -> tuple[Tensor, Tensor | None]:
    """Return x [N, width] behind a layer, and what is to be added to it, for x and what is to be added to it."""
    attention, mlp = placed(layer)
    y, x = _enter(layer.qkv, x, addend, attention, batch_invariant)
    attended = attend(norm_heads(layer, y))
    if layer.experts is not None:
        x = _sum(*_leave(layer, layer.o, attended, "PLAIN", x, attention, batch_invariant))
        return _mixture(layer, layer.experts, x, mlp, batch_invariant)
    assert layer.up is not None
    if layer.spec.parallel:  # the feed-forward reads x without what attention adds
        inner, _ = _enter(layer.up, x, None, mlp, batch_invariant)
        x, addend = _leave(layer, layer.o, attended, "PLAIN", x, attention, batch_invariant)
        return _feed_forward(layer, inner, _sum(x, addend), mlp, batch_invariant)
    x, addend = _leave(layer, layer.o, attended, "PLAIN", x, attention, batch_invariant)
    inner, x = _enter(layer.up, x, addend, mlp, batch_invariant)
    return _feed_forward(layer, inner, x, mlp, batch_invariant)


def _feed_forward(
    layer: "StepLayer", inner: Tensor, x: Tensor, norms: PlacedNorms, batch_invariant: bool
) -> tuple[Tensor, Tensor | None]:
    """Return x and what is to be added to it, for gate and up, or up, [N, 2 inner] or [N, inner]."""
    assert layer.down is not None
    h = inner if layer.activate is None else layer.activate(inner)
    return _leave(layer, layer.down, h, layer.activation, x, norms, batch_invariant)


def _mixture(
    layer: "StepLayer", experts: "FusedExperts", x: Tensor, norms: PlacedNorms, batch_invariant: bool
) -> tuple[Tensor, Tensor | None]:
    """Return x and what is to be added to it behind a mixture of experts, which adds to x itself where it can."""
    scale = layer.spec.residual_scale
    if norms.behind is None and scale == 1:
        x, addend = experts(x, norms.before, x, batch_invariant), None
    else:
        y = experts(x, norms.before, None, batch_invariant)
        y = y if norms.behind is None else norms.behind(y)
        addend = y if scale == 1 else y * scale
    return (x, addend) if norms.stream is None else (norms.stream(_sum(x, addend)), None)


def _enter(
    linear: FusedLinear, x: Tensor, addend: Tensor | None, norms: PlacedNorms, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Return the product of norm(x + addend), and x + addend."""
    if norms.before is not None:
        return linear.norm_linear(x, addend, norms.before.op, norms.before, batch_invariant)
    x = _sum(x, addend)
    return linear.linear(x, batch_invariant=batch_invariant), x


def _leave(
    layer: "StepLayer",
    linear: FusedLinear,
    h: "Tensor | PackedX",
    op: Prologue,
    x: Tensor,
    norms: PlacedNorms,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return x and what is to be added to it: scale * norm(op(h) @ W.T + bias)."""
    scale = layer.spec.residual_scale
    addend: Tensor | None
    if norms.behind is not None:
        addend = linear.linear_norm(h, norms.behind, op, batch_invariant)
    elif scale != 1:
        addend = linear.linear_apart(h, op, batch_invariant)
    else:
        x, addend = linear.linear_residual(h, x, op, batch_invariant)
    if scale != 1 and addend is not None:
        addend = addend * scale
    return (x, addend) if norms.stream is None else (norms.stream(_sum(x, addend)), None)


def _sum(x: Tensor, addend: Tensor | None) -> Tensor:
    return x if addend is None else x + addend


def norm_heads(layer: "StepLayer", qkv: Tensor) -> Tensor:
    """Return qkv with q and k normed, where attention's own kernels do not: as whole vectors, or by layer norms."""
    if layer.heads_norm is None:
        return qkv
    a = layer.spec.attention
    kv = a.kv_heads * a.head_size
    *heads, v = qkv.split([a.heads * a.head_size, kv, kv], -1)  # type: ignore[no-untyped-call]
    return torch.cat([*(_normed(x, norm, a.head_size) for x, norm in zip(heads, layer.heads_norm, strict=True)), v], -1)


def _normed(x: Tensor, norm: Norm, head_size: int) -> Tensor:
    """Return x [N, heads D] normed as a whole where the norm's weights say so, else head by head."""
    assert norm.weight is not None
    if norm.weight.numel() == x.shape[1]:
        return norm(x.contiguous())
    heads = x.reshape(len(x), -1, head_size)
    return F.layer_norm(heads, (head_size,), norm.weight, norm.bias, norm.eps).flatten(1)
