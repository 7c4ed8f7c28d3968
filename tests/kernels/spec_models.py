"""Small random decoders of any spec, taken apart, and what they compute, in f64."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.bench.kernels.random_matrices import random_matrix
from crelle.kernels.cpu.fused_decoder import (
    ExpertsParts,
    LayerParts,
    LinearParts,
    Matrix,
    MlpParts,
    ModelParts,
    NormParts,
)
from crelle.kernels.cpu.kernel import Cpu
from crelle.kernels.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from crelle.quantizers.scheme import parse

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCABULARY, CONTEXT = 48, 4, 2, 12, 88, 101, 400


def rope(base: float = 10000.0, channels: int = HEAD_SIZE) -> RopeSpec:
    return RopeSpec(base ** -(torch.arange(0, channels, 2) / channels))


_RMS = NormSpec("rms", 1e-5)


def layer(norm: NormSpec = _RMS, **changes: Any) -> LayerSpec:
    """A layer of a Llama, but for what is named: fields of AttentionSpec, MlpSpec and LayerSpec."""
    attention = AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5, rope=ROPE)
    mlp = MlpSpec(inner=INNER, activation="silu", gated=True)
    parts = {"attention": attention, "mlp": mlp}
    for name, part in parts.items():
        parts[name] = replace(part, **{k: v for k, v in changes.items() if k in part.__dataclass_fields__})
    own = {k: v for k, v in changes.items() if k in LayerSpec.__dataclass_fields__}
    return LayerSpec(**{**parts, "norm": norm, **own})


def decoder(*layers: LayerSpec, **changes: Any) -> DecoderSpec:
    made = {"width": WIDTH, "vocabulary": VOCABULARY, "context": CONTEXT, "norm": layers[0].norm, "tied": False}
    return DecoderSpec(**{**made, "layers": layers, **changes})


ROPE = rope()
_LAYER_NORM = NormSpec("layer", 1e-5)
_BIASED = {"norm": _LAYER_NORM, "bias": True, "gated": False, "rope": None}
_QK_NORM = NormSpec("rms", 1e-6)
_GEMMA = {"placement": "sandwich", "qk_norm": _QK_NORM, "activation": "gelu_tanh", "scale": 0.2}

_FEW, _MANY = ExpertsSpec(count=4, top=2), ExpertsSpec(count=21, top=5, normalize=False, shared=56)
_GPT_OSS = {"experts": _FEW, "sinks": True, "activation": "swigluoai", "bias": True}

SPECS: dict[str, DecoderSpec] = {
    "llama": decoder(layer(), layer()),
    "layer norm": decoder(layer(_LAYER_NORM), layer(_LAYER_NORM)),
    "plain mlp": decoder(layer(gated=False), layer(gated=False)),
    "gelu": decoder(layer(activation="gelu"), layer(activation="gelu", gated=False)),
    "gelu tanh": decoder(layer(activation="gelu_tanh"), layer(activation="gelu_tanh", gated=False)),
    "relu": decoder(layer(activation="relu"), layer(activation="relu", gated=False)),
    "biases": decoder(layer(bias=True), layer(bias=True, gated=False)),
    "learned positions": decoder(layer(), layer(rope=None), learned_positions=0),
    "offset of positions": decoder(layer(rope=None), layer(rope=None), learned_positions=2),
    "embedding scale": decoder(layer(), layer(), embedding_scale=math.sqrt(WIDTH)),
    "attention scale": decoder(layer(scale=0.1), layer(scale=0.7)),
    "partial rope": decoder(layer(rope=rope(channels=4)), layer(rope=rope(channels=8))),
    "rope by layer": decoder(layer(), layer(rope=rope(1e6)), layer(rope=None), layer()),
    "sandwich": decoder(layer(placement="sandwich"), layer(placement="sandwich", bias=True)),
    "sandwich of layer norms": decoder(*[layer(_LAYER_NORM, placement="sandwich")] * 2),
    "qk norm": decoder(layer(qk_norm=_QK_NORM), layer(qk_norm=_LAYER_NORM)),
    "windows by layer": decoder(layer(window=20), layer(), layer(window=70)),
    "no last norm": decoder(layer(), layer(), norm=None),
    "inner by layer": decoder(layer(), layer(inner=40), layer(inner=120)),
    "experts": decoder(layer(experts=_FEW), layer(), layer(experts=_MANY, inner=24)),
    "experts, sandwich": decoder(*[layer(experts=_FEW, placement="sandwich", residual_scale=0.5)] * 2),
    "plain experts": decoder(layer(experts=_FEW, gated=False), layer(experts=_MANY, gated=False, bias=True)),
    "gpt-oss": decoder(layer(**_GPT_OSS, window=20), layer(**_GPT_OSS)),
    "parallel": decoder(layer(parallel=True), layer(parallel=True, residual_scale=0.5, bias=True)),
    "parallel, one norm": decoder(*[layer(_LAYER_NORM, parallel=True, shared_norm=True, gated=False)] * 2),
    "norms behind": decoder(layer(placement="reordered"), layer(placement="reordered", bias=True)),
    "norms of the stream": decoder(*[layer(_LAYER_NORM, placement="post", bias=True)] * 2, norm=None),
    "whole qk norm": decoder(*[layer(qk_norm=_QK_NORM, whole_qk_norm=True, placement="reordered")] * 2),
    "factors": decoder(layer(residual_scale=0.3), layer(residual_scale=2.0, bias=True), logit_scale=0.7),
    "soft caps": decoder(layer(softcap=0.6), layer(softcap=2.0, window=70), softcap=1.5),
    "narrow embeddings": decoder(layer(), layer(), words=40, learned_positions=2, embedding_scale=3.0),
    "350M": decoder(*[layer(**_BIASED, activation="relu", placement="post")] * 2, words=72, norm=None, tied=True),
    "factor of partial rope": decoder(layer(rope=replace(rope(channels=8), attention_factor=1.3)), layer()),
    "sinks": decoder(layer(sinks=True), layer(sinks=True, window=40)),
    "gpt2": decoder(*[layer(**_BIASED, activation="gelu_tanh", kv_heads=HEADS)] * 3, learned_positions=0, tied=True),
    "opt": decoder(*[layer(**_BIASED, activation="relu", kv_heads=HEADS)] * 3, learned_positions=2, tied=True),
    "gemma3": decoder(
        *(layer(**_GEMMA, window=24, rope=ROPE) for _ in range(5)),
        layer(**_GEMMA, rope=rope(1e6)),
        embedding_scale=math.sqrt(WIDTH),
        tied=True,
    ),
}


def random_parts(spec: DecoderSpec, scheme: str | None = None, seed: int = 5) -> ModelParts:
    """Random tensors; matrices of the layers quantized where a scheme is given."""
    rng = torch.Generator().manual_seed(seed)

    def vector(n: int, mean: float) -> Tensor:
        return mean + 0.3 * torch.randn(n, generator=rng)

    def linear(N: int, K: int, bias: bool) -> LinearParts:
        w = torch.randn(N, K, generator=rng) * K**-0.5
        if scheme is None:
            coded: Matrix = w
        else:  # a scheme that looks at data is not fitted, only sampled
            by = parse(scheme)
            coded = Cpu().prepare(random_matrix(by, N, K, rng) if by.calibrated else by.fit(w), torch.float32)
        return LinearParts(weight=coded, bias=vector(N, 0.0) if bias else None)

    def norm(n: int, spec: NormSpec) -> NormParts:
        return NormParts(weight=vector(n, 1.0), bias=vector(n, 0.0) if spec.kind == "layer" else None)

    def mlp(inner: int, of: LayerSpec) -> dict[str, LinearParts]:
        slots = {"gate": (inner, spec.width), "up": (inner, spec.width), "down": (spec.width, inner)}
        return {n: linear(*size, of.attention.bias) for n, size in slots.items() if of.mlp.gated or n != "gate"}

    def experts(of: LayerSpec) -> ExpertsParts | None:
        if (e := of.mlp.experts) is None:
            return None
        return ExpertsParts(
            router=LinearParts(weight=0.3 * torch.randn(e.count, spec.width, generator=rng), bias=vector(e.count, 0.0)),
            shared_gate=LinearParts(weight=0.1 * torch.randn(1, spec.width, generator=rng)) if e.shared else None,
            each=[MlpParts(**mlp(of.mlp.width_of(expert), of)) for expert in of.mlp.feed_forwards],
        )

    def one(of: LayerSpec) -> LayerParts:
        a, width, sandwich = of.attention, spec.width, of.placement == "sandwich"
        q, kv = a.heads * a.head_size, a.kv_heads * a.head_size
        return LayerParts(
            q=linear(q, width, a.bias),
            k=linear(kv, width, a.bias),
            v=linear(kv, width, a.bias),
            o=linear(width, q, a.bias),
            **(mlp(of.mlp.inner, of) if of.mlp.experts is None else {}),
            experts=experts(of),
            sinks=vector(a.heads, 0.0) if a.sinks else None,
            norm_attention=norm(width, of.norm),
            norm_mlp=None if of.shared_norm else norm(width, of.norm),
            post_attention_norm=norm(width, of.norm) if sandwich else None,
            post_mlp_norm=norm(width, of.norm) if sandwich else None,
            **{slot: norm(size, a.qk_norm) for slot, size in a.normed.items() if a.qk_norm is not None},
        )

    words = spec.embedding_width
    embedding = torch.randn(spec.vocabulary, words, generator=rng)
    first = spec.learned_positions
    return ModelParts(
        spec=spec,
        embedding=embedding,
        positions=None if first is None else torch.randn(first + spec.context, spec.width, generator=rng),
        layers=[one(layer) for layer in spec.layers],
        norm=None if spec.norm is None else norm(spec.width, spec.norm),
        head=LinearParts(weight=embedding if spec.tied else linear(spec.vocabulary, words, False).weight),
        project_in=linear(spec.width, words, False) if words != spec.width else None,
        project_out=linear(words, spec.width, False) if words != spec.width else None,
    )


def forward(parts: ModelParts, ids: Tensor) -> Tensor:
    """Return logits f64 [T, V] of tokens [T]: the spec's docstring, line by line, over plain matrices."""
    spec, T = parts.spec, len(ids)
    at = torch.arange(T)
    x = parts.embedding[ids].double() * spec.embedding_scale
    x = x if parts.project_in is None else _linear(x, parts.project_in)
    if parts.positions is not None and spec.learned_positions is not None:
        x = x + parts.positions[at + spec.learned_positions].double()
    for part, of in zip(parts.layers, spec.layers, strict=True):
        x = _layer(part, of, x, at)
    if parts.norm is not None and spec.norm is not None:
        x = _norm(x, parts.norm, spec.norm)
    x = x if parts.project_out is None else _linear(x, parts.project_out)
    y = spec.logit_scale * _linear(x, parts.head)
    return y if spec.softcap is None else spec.softcap * torch.tanh(y / spec.softcap)


def _layer(part: LayerParts, of: LayerSpec, x: Tensor, at: Tensor) -> Tensor:
    def norm(x: Tensor, norm: NormParts | None) -> Tensor:
        return x if norm is None else _norm(x, norm, of.norm)

    first, second, scale = part.norm_attention, part.norm_mlp or part.norm_attention, of.residual_scale
    if of.placement == "post":
        x = norm(x + scale * _attention(part, of.attention, x, at), first)
        return norm(x + scale * _feed_forward(part, of, x), second)
    if of.placement == "reordered":
        x = x + scale * norm(_attention(part, of.attention, x, at), first)
        return x + scale * norm(_feed_forward(part, of, x), second)
    y = scale * norm(_attention(part, of.attention, norm(x, first), at), part.post_attention_norm)
    h = norm(x if of.parallel else x + y, second)
    return x + y + scale * norm(_feed_forward(part, of, h), part.post_mlp_norm)


def _feed_forward(part: LayerParts, of: LayerSpec, x: Tensor) -> Tensor:
    spec, experts = of.mlp.experts, part.experts
    if spec is None or experts is None:
        return _mlp(part, of, x)
    chance = _linear(x, experts.router).softmax(-1)
    weight = chance * (chance >= chance.topk(spec.top).values[:, -1:])  # [T, E], of others 0
    weight = weight / weight.sum(-1, keepdim=True) if spec.normalize else weight
    y = sum(weight[:, e, None] * _mlp(experts.each[e], of, x) for e in range(spec.count))
    if experts.shared_gate is not None:
        y = y + torch.sigmoid(_linear(x, experts.shared_gate)) * _mlp(experts.each[-1], of, x)
    return y


def _mlp(part: LayerParts | MlpParts, of: LayerSpec, x: Tensor) -> Tensor:
    assert part.up is not None
    assert part.down is not None
    if of.mlp.activation == "swigluoai" and part.gate is not None:
        gate, up = _linear(x, part.gate).clamp(max=7), _linear(x, part.up).clamp(-7, 7)
        return _linear(gate * torch.sigmoid(1.702 * gate) * (up + 1), part.down)
    y = _ACTIVATIONS[of.mlp.activation](_linear(x, part.up if part.gate is None else part.gate))
    return _linear(y if part.gate is None else y * _linear(x, part.up), part.down)


_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _linear(x: Tensor, part: LinearParts) -> Tensor:
    assert isinstance(part.weight, Tensor)
    return F.linear(x, part.weight.double(), None if part.bias is None else part.bias.double())


def _norm(x: Tensor, part: NormParts, spec: NormSpec) -> Tensor:
    if spec.kind == "rms":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.eps) * part.weight.double()
    assert part.bias is not None
    return F.layer_norm(x, x.shape[-1:], part.weight.double(), part.bias.double(), spec.eps)


def _attention(part: LayerParts, a: AttentionSpec, x: Tensor, at: Tensor) -> Tensor:
    T = len(x)
    q, k, v = (_linear(x, p) for p in (part.q, part.k, part.v))
    whole, each = (a.qk_norm, None) if a.whole_qk_norm else (None, a.qk_norm)
    if part.q_norm is not None and part.k_norm is not None and whole is not None:
        q, k = _norm(q, part.q_norm, whole), _norm(k, part.k_norm, whole)
    q, k, v = (y.view(T, -1, a.head_size).transpose(0, 1) for y in (q, k, v))
    if part.q_norm is not None and part.k_norm is not None and each is not None:
        q, k = _norm(q, part.q_norm, each), _norm(k, part.k_norm, each)
    if a.rope is not None:
        q, k = _rotate(q, a.rope, at), _rotate(k, a.rope, at)
    k, v = (t.repeat_interleave(a.heads // a.kv_heads, 0) for t in (k, v))
    seen = at[:, None] >= at
    if a.window is not None:
        seen &= at[:, None] - at < a.window
    scores = q @ k.transpose(1, 2) * a.scale
    scores = scores if a.softcap is None else a.softcap * torch.tanh(scores / a.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if part.sinks is not None:
        scores = torch.cat([scores, part.sinks.double()[:, None, None].expand(-1, T, 1)], -1)
    return _linear((scores.softmax(-1)[..., :T] @ v).transpose(0, 1).reshape(T, -1), part.o)


def _rotate(x: Tensor, rope: RopeSpec, at: Tensor) -> Tensor:
    angle = at[:, None].double() * rope.frequency.double()
    a, b, rest = x.split([rope.channels // 2, rope.channels // 2, x.shape[-1] - rope.channels], dim=-1)
    a, b = rope.attention_factor * a, rope.attention_factor * b
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], dim=-1)
