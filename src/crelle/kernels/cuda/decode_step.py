"""A decode step on CUDA kernels: x [B, width] of one token a sequence, through all layers, to logits.

    embed (+ position);  { norm·qkv, attention, o + x;  norm·gate·up, act·down + x };  norm·head

What stands with a dot is fused: norms and activations are applied while x becomes digits, sums while y is written.
RopeNormArgs of 128 channels leave the attention as digits, and so do products wherever one launch can make both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from crelle.formats.dense import DenseTensor
from crelle.kernels.cuda import activations
from crelle.kernels.cuda.activations import Prologue
from crelle.kernels.cuda.bmma_gemv import BitSerialX
from crelle.kernels.cuda.fused_linear import FusedLinear, Norm
from crelle.kernels.cuda.graph_inputs import MAX_POSITIONS
from crelle.kernels.executor import DecoderModules
from crelle.kernels.spec import DecoderSpec, LayerSpec, RopeSpec

_NORMS: dict[str, Prologue] = {"rms": "RMS_NORM", "layer": "LAYER_NORM"}


def lacks(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Return what of a spec these kernels lack, or None."""
    from crelle.kernels.cuda.decode_attention import supports as attention_supports

    if spec.ropes and spec.context > MAX_POSITIONS:
        return f"the step has tables of the angles of up to {MAX_POSITIONS} positions, not {spec.context}"
    for layer in spec.layers:
        a, mlp = layer.attention, layer.mlp
        if layer.placement == "post" or layer.parallel:
            return f"the step has norms before attention and feed-forward, not {layer.placement} or parallel ones"
        if layer.placement == "sandwich" and layer.norm.kind != "rms":
            return "the step has RMS norms behind attention and feed-forward, not layer norms"
        if not layer.norm.affine or (a.qk_norm is not None and a.qk_norm.kind != "rms"):
            return "the step has norms with weights, and RMS norms of heads"
        if mlp.experts is not None:
            return "the step has one feed-forward a layer, no experts"
        if reason := activations.supports(mlp.activation, mlp.gated):
            return f"the step {reason}"
        if a.rope is not None and a.rope.channels != a.head_size:
            return "the step rotates whole heads, not a part of them"
        if a.softcap is not None or a.scale != a.head_size**-0.5:
            return "the step scales scores by 1/sqrt(head size), without a cap"
    if spec.norm is None or spec.embedding_width != spec.width or spec.softcap is not None:
        return "the step has a norm before the head, an embedding as wide as the layers and no cap of logits"
    return attention_supports(spec.head_size, dtype)


def supports(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Return the same for a step over a contiguous cache, whose epilogues add to x without a norm between."""
    if any(layer.placement == "sandwich" for layer in spec.layers):
        return "the step over a contiguous cache has no norms behind attention and feed-forward"
    return lacks(spec, dtype)


class Embed:
    """Token embedding, and the learned positions added; quantized tables are dequantized by torch.

    Rows of padding have position -1, and get what position 0 gets.
    """

    def __init__(self, words: Any, positions: Any, spec: DecoderSpec) -> None:
        self.words, self.positions = words, positions
        self.first, self.scale = spec.learned_positions or 0, spec.embedding_scale

    def __call__(self, ids: Tensor, position: Tensor) -> Tensor:
        from crelle.kernels.cuda.embed_argmax import embed

        table, learned = _plain(self.words), _plain(self.positions)
        if self.scale == 1 and table is not None and (self.positions is None or learned is not None):
            return embed(ids, table, None if self.positions is None else position, learned, self.first)
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
    activation: Prologue
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
    up: FusedLinear  # gate and up where gated
    down: FusedLinear

    @property
    def window(self) -> int | None:
        return self.spec.attention.window

    @property
    def eps(self) -> float:
        """Of the norms of heads."""
        return self.spec.norm.eps if self.spec.attention.qk_norm is None else self.spec.attention.qk_norm.eps


class Step:
    """The step of any spec for which `supports` returns None."""

    def __init__(self, model: DecoderModules) -> None:
        s, dtype = model.spec, model.dtype
        self.spec = s
        self.embed = Embed(model.embedding, model.input.positions, s)
        tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for rope in s.ropes:
            angle = torch.arange(s.context)[:, None] * rope.frequency.cpu()  # [context, D/2]
            tables[rope] = angle.cos().to(model.device), angle.sin().to(model.device)
        self.layers = []
        for layer in cast(Iterable[Any], model.layers):
            a, mlp, spec = layer.attention, layer.mlp, cast(LayerSpec, layer.spec)
            cos, sin = (None, None) if spec.attention.rope is None else tables[spec.attention.rope]
            self.layers.append(
                StepLayer(
                    spec=spec,
                    norm=_NORMS[spec.norm.kind],
                    activation=activations.activation_op(spec.mlp.activation, spec.mlp.gated),
                    norm_attention=_norm(layer.norm_attention),
                    qkv=FusedLinear([a.q, a.k, a.v], dtype),
                    q_norm=None if a.q_norm is None else a.q_norm.weight,
                    k_norm=None if a.k_norm is None else a.k_norm.weight,
                    cos=cos,
                    sin=sin,
                    o=FusedLinear([a.o], dtype),
                    post_attention_norm=_optional(layer.post_attention_norm),
                    norm_mlp=_norm(layer.norm_mlp),
                    post_mlp_norm=_optional(layer.post_mlp_norm),
                    up=FusedLinear([mlp.gate, mlp.up] if spec.mlp.gated else [mlp.up], dtype),
                    down=FusedLinear([mlp.down], dtype),
                )
            )
        self.norm, self.head = _norm(model.output.norm), FusedLinear([model.head], dtype)
        assert s.norm is not None
        self.norm_op = _NORMS[s.norm.kind]

    def __call__(self, ids: Tensor, position: Tensor, kv: Sequence[Tensor]) -> Tensor:
        """Return logits f32 [B, V] for ids [B] at positions [B] of a contiguous cache."""
        x = self.embed(ids, position)
        seen: Tensor | BitSerialX = x
        coming = [(layer.norm_attention, layer.qkv) for layer in self.layers[1:]] + [(self.norm, self.head)]
        for layer, cache, (next_norm, following) in zip(self.layers, kv, coming, strict=True):
            attended = _attended(layer.qkv(seen, layer.norm, layer.norm_attention), cache, position, layer)
            x, seen = layer.o.normed(attended, layer.norm_mlp, layer.up, residual=x)
            inner = layer.up.activated(seen, layer.activation, layer.down, layer.norm, layer.norm_mlp)
            x, seen = layer.down.normed(inner, next_norm, following, layer.activation, residual=x)
        return self.head(seen, self.norm_op, self.norm, dtype=torch.float32)


def _attended(qkv: Tensor, cache: Tensor, position: Tensor, layer: StepLayer) -> Tensor | BitSerialX:
    """What heads see, for the product `o`; bit-serial where the attention's epilogue can encode them."""
    from crelle.kernels.cuda.decode_attention import RopeNormArgs, attend, attend_encode, can_encode

    a = layer.spec.attention
    heads = RopeNormArgs(layer.cos, layer.sin, layer.window, layer.q_norm, layer.k_norm, layer.eps)
    fits = layer.o.takes_bitserial and can_encode(a.head_size, a.heads)
    return (attend_encode if fits else attend)(qkv, cache, position, a.heads, a.scale, heads)


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, getattr(norm, "bias", None), norm.eps)


def _optional(norm: Any) -> Norm | None:
    return None if norm is None else _norm(norm)
