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
from crelle.kernels.reference_attention import AttendOptions
from crelle.kernels.spec import DecoderSpec, LayerSpec, RopeSpec

Attend = Callable[[int, "StepLayer", Tensor], Tensor | BitSerialX]


def supports(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Return what of a spec these kernels lack, or None."""
    from crelle.kernels.cuda.attention.decode_attention import supports as attention_supports

    if spec.ropes and spec.context > MAX_POSITIONS:
        return f"the step has tables of the angles of up to {MAX_POSITIONS} positions, not {spec.context}"
    for layer in spec.layers:
        a, mlp = layer.attention, layer.mlp
        if not a.causal:
            return "the step decodes, and an encoder's attention looks in both directions"
        if reason := experts_supports(mlp, spec.width):
            return f"the step {reason}"
        if mlp.experts is not None and layer.parallel:
            return "the step has experts behind attention, not beside it"
        if mlp.experts is not None and mlp.experts.shared and activations.by_torch(mlp.activation, mlp.gated):
            return f"the step has no {mlp.activation} in an expert that all tokens take"
        with_mlp = mlp.experts is None or mlp.experts.shared
        if with_mlp and (reason := activations.supports(mlp.activation, mlp.gated)):
            return f"the step {reason}"
        if a.rope is not None and a.rope.channels % 4:
            return f"the step rotates a multiple of 4 channels of a head, not {a.rope.channels}"
    if spec.token_types:
        return "the step has no table of token types"
    return attention_supports(spec.head_size, dtype)


class Embed:
    """Token embedding, perhaps projected to the layers' width, with the learned positions added, and normed.

    Quantized tables are dequantized by torch. Rows of padding have position -1, and get what position 0 gets.
    """

    def __init__(
        self,
        words: Any,
        positions: Any,
        spec: DecoderSpec,
        project: FusedLinear | None = None,
        norm: Norm | None = None,
    ) -> None:
        self.words, self.positions, self.project, self.norm = words, positions, project, norm
        self.first, self.scale = spec.learned_positions or 0, spec.embedding_scale

    def __call__(
        self,
        ids: Tensor,
        position: Tensor,
        source: Tensor | None = None,
        sampled: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> Tensor:
        """Return x [B, width]; where `source` [B] is not below 0, the id is sampled[source] instead."""
        from crelle.kernels.cuda.step.embed_argmax import embed

        table, learned = _plain(self.words), _plain(self.positions)
        fused = self.project is None and self.scale == 1
        if fused and table is not None and (self.positions is None or learned is not None):
            at = None if self.positions is None else position
            x = embed(ids, table, at, learned, self.first, source=source, sampled=sampled)
            return x if self.norm is None else self.norm(x)
        if source is not None and sampled is not None:
            ids = torch.where(source < 0, ids, sampled[source])
        x = self.words(ids)
        x = x if self.scale == 1 else x * self.scale
        x = x if self.project is None else self.project.linear(x, batch_invariant=batch_invariant)
        x = x if self.positions is None else x + self.positions(position.long().clamp(min=0) + self.first)
        return x if self.norm is None else self.norm(x)


def _plain(e: Any) -> Tensor | None:
    if e is None or not isinstance(e.weight, DenseTensor) or e.weight.weight.dtype != e.dtype:
        return None
    return e.weight.weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLayer:
    """A layer as the step runs it: linears that read the same input as one."""

    spec: LayerSpec
    activation: Prologue  # of the feed-forward; PLAIN where there are experts
    activate: Callable[[Tensor], Tensor] | None  # by torch, instead: `activation` is PLAIN then
    norm_attention: Norm
    qkv: FusedLinear
    q_norm: Tensor | None  # [D], in attention's own kernels
    k_norm: Tensor | None
    heads_norm: tuple[Norm, Norm] | None  # of q and k where those kernels do not (placements.norm_heads)
    cos: Tensor | None  # [context, R/2]
    sin: Tensor | None
    options: AttendOptions
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
    def eps(self) -> float:
        """Of the norms of heads."""
        return self.spec.norm.eps if self.spec.attention.qk_norm is None else self.spec.attention.qk_norm.eps


class Step:
    """A model's layers, for any spec for which `supports` returns None."""

    def __init__(self, model: DecoderModules) -> None:
        s, dtype = model.spec, model.dtype
        self.spec = s
        project_in, project_out = model.input.project_in, model.output.project_out
        self.embed = Embed(
            model.embedding,
            model.input.positions,
            s,
            None if project_in is None else fuse([project_in], dtype),
            _optional(model.input.norm, model),
        )
        self.project_out = None if project_out is None else fuse([project_out], dtype)
        tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for rope in s.ropes:
            angle = torch.arange(s.context)[:, None] * rope.frequency.cpu()  # [context, R/2]
            turned = angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor
            tables[rope] = turned[0].to(model.device), turned[1].to(model.device)
        self.layers = []
        for layer in cast(Iterable[Any], model.layers):
            a, mlp, spec = layer.attention, layer.mlp, cast(LayerSpec, layer.spec)
            cos, sin = (None, None) if spec.attention.rope is None else tables[spec.attention.rope]
            experts = None if spec.mlp.experts is None else FusedExperts(mlp, spec.mlp, dtype)
            own, mlp_of = spec.attention, (spec.mlp.activation, spec.mlp.gated)
            q_norm, k_norm = (_optional(norm, model, own.head_size) for norm in (a.q_norm, a.k_norm))
            apart = own.whole_qk_norm or (own.qk_norm is not None and own.qk_norm.kind != "rms")
            sinks = None if a.sinks is None else a.sinks.float().contiguous()
            plain = experts is None  # one feed-forward
            self.layers.append(
                StepLayer(
                    spec=spec,
                    activation=activations.activation_op(*mlp_of) if plain else "PLAIN",
                    activate=activations.by_torch(*mlp_of) if plain else None,
                    norm_attention=_norm(layer.norm_attention, model),
                    qkv=fuse([a.q, a.k, a.v], dtype),
                    q_norm=None if apart or q_norm is None else q_norm.weight,
                    k_norm=None if apart or k_norm is None else k_norm.weight,
                    heads_norm=(q_norm, k_norm) if apart and q_norm is not None and k_norm is not None else None,
                    cos=cos,
                    sin=sin,
                    options=AttendOptions(own.window, own.softcap, sinks),
                    o=fuse([a.o], dtype),
                    post_attention_norm=_optional(layer.post_attention_norm, model),
                    norm_mlp=_norm(layer.norm_attention if spec.shared_norm else layer.norm_mlp, model),
                    post_mlp_norm=_optional(layer.post_mlp_norm, model),
                    up=fuse([mlp.gate, mlp.up] if spec.mlp.gated else [mlp.up], dtype) if plain else None,
                    down=fuse([mlp.down], dtype) if plain else None,
                    experts=experts,
                )
            )
        self.norm, self.head = _optional(model.output.norm, model), fuse([model.head], dtype)
        streamed = [x.experts.streamed for x in self.layers if x.experts is not None and x.experts.streamed is not None]
        self.streams = streamed[0].streams if streamed else None  # of experts in host memory

    def before(self) -> None:
        """Do what is due between steps: experts change places with others."""
        if self.streams is not None:
            self.streams.before_step()

    @property
    def chains(self) -> bool:
        """Whether `decode` runs a step of few rows: norms only before products, whose weights take x in 16 bits."""
        return self.norm is not None and self.project_out is None and all(map(_chains, self.layers))

    def decode(self, x: Tensor, attend: Attend, out: Tensor) -> Tensor:
        """Return logits f32 [B, V], in `out`, for x [B, width] of up to GEMV_ROWS rows; attend(i, layer, qkv) -> heads.

        Epilogues add to x and encode what they make for the next product, wherever that is one bit-plane weight.
        """
        assert self.norm is not None
        seen: Tensor | BitSerialX = x
        coming = [(layer.norm_attention, layer.qkv) for layer in self.layers[1:]] + [(self.norm, self.head)]
        for i, (layer, (next_norm, following)) in enumerate(zip(self.layers, coming, strict=True)):
            attended = attend(i, layer, layer.qkv(seen, layer.norm_attention.op, layer.norm_attention))
            if layer.experts is not None:
                x = layer.o(attended, residual=x)
                seen = x = layer.experts(x, layer.norm_mlp, x)
                continue
            assert layer.up is not None
            assert layer.down is not None
            x, seen = layer.o.normed(attended, layer.norm_mlp, layer.up, residual=x)
            inner = layer.up.activated(seen, layer.activation, layer.down, layer.norm_mlp.op, layer.norm_mlp)
            x, seen = layer.down.normed(inner, next_norm, following, layer.activation, residual=x)
        return self.scaled(self.head(seen, self.norm.op, self.norm, dtype=torch.float32, out=out))

    def logits(self, x: Tensor, dtype: torch.dtype | None, batch_invariant: bool) -> Tensor:
        """Return head(norm(x)) [N, V], before `scaled`, for x [N, width] behind all layers."""
        norm = self.norm
        if self.project_out is not None:
            op: Prologue = "PLAIN" if norm is None else norm.op
            x, norm = self.project_out.norm_linear(x, None, op, norm, batch_invariant)[0], None
        return self.head.norm_linear(x, None, "PLAIN" if norm is None else norm.op, norm, batch_invariant, dtype)[0]

    def scaled(self, logits: Tensor) -> Tensor:
        """Scale and bound logits in place, where the spec has a factor or a soft cap."""
        if self.spec.logit_scale != 1:
            logits.mul_(self.spec.logit_scale)
        if (cap := self.spec.softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def _chains(layer: StepLayer) -> bool:
    s = layer.spec
    usual = s.placement == "pre" and not s.parallel and s.residual_scale == 1
    usual = usual and layer.heads_norm is None and layer.activate is None
    return usual and not any(linear.takes_integers for linear in layer.linears)


def _norm(norm: Any, model: DecoderModules, size: int | None = None) -> Norm:
    """Return a norm of `size` values (the width) as the kernels take it: layer norms without weights have ones."""
    weight = norm.weight
    if not hasattr(norm, "bias"):
        return Norm(weight, None, norm.eps)
    if weight is None:
        weight = torch.ones(size or model.spec.width, dtype=model.dtype, device=model.device)
    return Norm(weight, torch.zeros_like(weight) if norm.bias is None else norm.bias, norm.eps)


def _optional(norm: Any, model: DecoderModules, size: int | None = None) -> Norm | None:
    return None if norm is None else _norm(norm, model, size)
