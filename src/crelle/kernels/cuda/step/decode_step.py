"""A decoder's layers as the CUDA kernels run them: linears that read the same input joined, norms fused into products.

    embed (+ position);  { norm·qkv, attention, o + x;  norm·gate·up, act·down + x };  norm·head

`Step.decode` is the step of few sequences. What stands with a dot is fused there: norms and activations are applied
while x becomes bit-serial, sums while y is written; and the epilogues of products and of attention (heads of 128
channels) encode their output, so that a Llama layer is five launches. More rows, and prompts: executor.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from crelle.formats.dense import DenseTensor
from crelle.kernels.cuda.experts.fused import FusedExperts
from crelle.kernels.cuda.experts.weights import supports as experts_supports
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step import activations
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fuse import fuse
from crelle.kernels.cuda.step.fused_linear import FusedLinear, Norm
from crelle.kernels.cuda.step.graph_inputs import MAX_POSITIONS
from crelle.kernels.executor import DecoderModules
from crelle.kernels.spec import DecoderSpec, LayerSpec, RopeSpec

Attend = Callable[[int, "StepLayer", Tensor], Tensor | BitSerialX]
_NORMS: dict[str, Prologue] = {"rms": "RMS_NORM", "layer": "LAYER_NORM"}


def supports(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Return what of a spec these kernels lack, or None."""
    from crelle.kernels.cuda.attention.decode_attention import supports as attention_supports

    if spec.ropes and spec.context > MAX_POSITIONS:
        return f"the step has tables of the angles of up to {MAX_POSITIONS} positions, not {spec.context}"
    for layer in spec.layers:
        a, mlp = layer.attention, layer.mlp
        if not a.causal:
            return "the step decodes, and an encoder's attention looks in both directions"
        if layer.residual_scale != 1 or a.sinks or (a.qk_norm is not None and a.whole_qk_norm):
            return "the step has no factor of the residual stream, no attention sinks, no norm of all heads together"
        if layer.placement in ("post", "reordered") or layer.parallel:
            return f"the step has norms before attention and feed-forward, not {layer.placement} or parallel ones"
        if layer.placement == "sandwich" and layer.norm.kind != "rms":
            return "the step has RMS norms behind attention and feed-forward, not layer norms"
        if not layer.norm.affine or (a.qk_norm is not None and a.qk_norm.kind != "rms"):
            return "the step has norms with weights, and RMS norms of heads"
        if reason := experts_supports(mlp, spec.width):
            return f"the step {reason}"
        with_mlp = mlp.experts is None or mlp.experts.shared
        if with_mlp and (reason := activations.supports(mlp.activation, mlp.gated)):
            return f"the step {reason}"
        if a.rope is not None and a.rope.channels != a.head_size:
            return "the step rotates whole heads, not a part of them"
        if a.softcap is not None or a.scale != a.head_size**-0.5:
            return "the step scales scores by 1/sqrt(head size), without a cap"
    if spec.norm is None or spec.embedding_width != spec.width or spec.softcap is not None or spec.logit_scale != 1:
        return "the step has a norm before the head, an embedding as wide as the layers, no scale and no cap of logits"
    return attention_supports(spec.head_size, dtype)


class Embed:
    """Token embedding, and the learned positions added; quantized tables are dequantized by torch.

    Rows of padding have position -1, and get what position 0 gets.
    """

    def __init__(self, words: Any, positions: Any, spec: DecoderSpec) -> None:
        self.words, self.positions = words, positions
        self.first, self.scale = spec.learned_positions or 0, spec.embedding_scale

    def __call__(
        self, ids: Tensor, position: Tensor, source: Tensor | None = None, sampled: Tensor | None = None
    ) -> Tensor:
        """Return x [B, width]; where `source` [B] is not below 0, the id is sampled[source] instead."""
        from crelle.kernels.cuda.step.embed_argmax import embed

        table, learned = _plain(self.words), _plain(self.positions)
        if self.scale == 1 and table is not None and (self.positions is None or learned is not None):
            at = None if self.positions is None else position
            return embed(ids, table, at, learned, self.first, source=source, sampled=sampled)
        if source is not None and sampled is not None:
            ids = torch.where(source < 0, ids, sampled[source])
        x: Tensor = self.words(ids)
        x = x if self.scale == 1 else x * self.scale
        return x if self.positions is None else x + self.positions(position.long().clamp(min=0) + self.first)


def _plain(e: Any) -> Tensor | None:
    if e is None or not isinstance(e.weight, DenseTensor) or e.weight.weight.dtype != e.dtype:
        return None
    return e.weight.weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLayer:
    """A layer as the step runs it: linears that read the same input as one."""

    spec: LayerSpec
    norm: Prologue  # how norms are fused into products
    activation: Prologue  # of the feed-forward; PLAIN where there are experts
    norm_attention: Norm
    qkv: FusedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None  # [context, D/2]
    sin: Tensor | None
    o: FusedLinear
    post_attention_norm: Norm | None  # sandwich only
    norm_mlp: Norm
    post_mlp_norm: Norm | None
    up: FusedLinear | None  # gate and up where gated
    down: FusedLinear | None
    experts: FusedExperts | None  # in their place

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        return tuple(linear for linear in (self.qkv, self.o, self.up, self.down) if linear is not None)

    @property
    def window(self) -> int | None:
        return self.spec.attention.window

    @property
    def eps(self) -> float:
        """Of the norms of heads."""
        return self.spec.norm.eps if self.spec.attention.qk_norm is None else self.spec.attention.qk_norm.eps


class Step:
    """A model's layers, for any spec for which `supports` returns None."""

    def __init__(self, model: DecoderModules) -> None:
        s, dtype = model.spec, model.dtype
        self.spec = s
        self.embed = Embed(model.embedding, model.input.positions, s)
        tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for rope in s.ropes:
            angle = torch.arange(s.context)[:, None] * rope.frequency.cpu()  # [context, D/2]
            turned = angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor
            tables[rope] = turned[0].to(model.device), turned[1].to(model.device)
        self.layers = []
        for layer in cast(Iterable[Any], model.layers):
            a, mlp, spec = layer.attention, layer.mlp, cast(LayerSpec, layer.spec)
            cos, sin = (None, None) if spec.attention.rope is None else tables[spec.attention.rope]
            experts = None if spec.mlp.experts is None else FusedExperts(mlp, spec.mlp, dtype)
            plain = experts is None  # one feed-forward
            self.layers.append(
                StepLayer(
                    spec=spec,
                    norm=_NORMS[spec.norm.kind],
                    activation=activations.activation_op(spec.mlp.activation, spec.mlp.gated) if plain else "PLAIN",
                    norm_attention=_norm(layer.norm_attention),
                    qkv=fuse([a.q, a.k, a.v], dtype),
                    q_norm=None if a.q_norm is None else a.q_norm.weight,
                    k_norm=None if a.k_norm is None else a.k_norm.weight,
                    cos=cos,
                    sin=sin,
                    o=fuse([a.o], dtype),
                    post_attention_norm=_optional(layer.post_attention_norm),
                    norm_mlp=_norm(layer.norm_mlp),
                    post_mlp_norm=_optional(layer.post_mlp_norm),
                    up=fuse([mlp.gate, mlp.up] if spec.mlp.gated else [mlp.up], dtype) if plain else None,
                    down=fuse([mlp.down], dtype) if plain else None,
                    experts=experts,
                )
            )
        self.norm, self.head = _norm(model.output.norm), fuse([model.head], dtype)
        assert s.norm is not None
        self.norm_op = _NORMS[s.norm.kind]

    @property
    def chains(self) -> bool:
        """Whether `decode` runs a step of few rows: norms only before products, whose weights take x in 16 bits."""
        plain = all(layer.spec.placement == "pre" for layer in self.layers)
        return plain and not any(linear.takes_integers for layer in self.layers for linear in layer.linears)

    def decode(self, x: Tensor, attend: Attend, out: Tensor) -> Tensor:
        """Return logits f32 [B, V], in `out`, for x [B, width] of up to GEMV_ROWS rows; attend(i, layer, qkv) -> heads.

        Epilogues add to x and encode what they make for the next product, wherever that is one bit-plane weight.
        """
        seen: Tensor | BitSerialX = x
        coming = [(layer.norm_attention, layer.qkv) for layer in self.layers[1:]] + [(self.norm, self.head)]
        for i, (layer, (next_norm, following)) in enumerate(zip(self.layers, coming, strict=True)):
            attended = attend(i, layer, layer.qkv(seen, layer.norm, layer.norm_attention))
            if layer.experts is not None:
                x = layer.o(attended, residual=x)
                seen = x = layer.experts(x, layer.norm, layer.norm_mlp, x)
                continue
            assert layer.up is not None
            assert layer.down is not None
            x, seen = layer.o.normed(attended, layer.norm_mlp, layer.up, residual=x)
            inner = layer.up.activated(seen, layer.activation, layer.down, layer.norm, layer.norm_mlp)
            x, seen = layer.down.normed(inner, next_norm, following, layer.activation, residual=x)
        return self.head(seen, self.norm_op, self.norm, dtype=torch.float32, out=out)


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, getattr(norm, "bias", None), norm.eps)


def _optional(norm: Any) -> Norm | None:
    return None if norm is None else _norm(norm)
