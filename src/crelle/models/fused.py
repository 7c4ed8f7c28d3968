"""Hands a model over to C++, where all of its layers can go there.

The prompt of a quantized model is one call into C++, and so is each further token of any model, over the same prepared
weights and the same cache that crelle.models.decoder uses.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from crelle.formats.permuted import PermutedTensor
from crelle.kernels import cpu
from crelle.kernels.cpu.decoder import (
    MAX_ROWS,
    Decoder,
    LayerParts,
    LinearParts,
    Matrix,
    ModelParts,
    matrix,
    unsupported,
)
from crelle.kernels.spec import DecoderSpec
from crelle.models.linear import QuantLinear

if TYPE_CHECKING:
    from crelle.models.decoder import DecoderModel, Layer

__all__ = ["MAX_ROWS", "Decoder", "fuse", "supports", "why_not"]

_FUSABLE = {"cpu", "cpu-int8", "dense"}  # kernels whose products the fused step computes the same way


def why_not(device: str, kernels: Iterable[str], permuted: bool = False) -> str | None:
    """Return why a model with these kernels decodes layer by layer, or None when it can be fused."""
    if device != "cpu":
        return f"the fused step runs on the CPU, not on {device}"
    if (reason := cpu.available()) is not None:
        return f"the C++ extension {reason}"
    if others := sorted(set(kernels) - _FUSABLE):
        return f"kernel '{others[0]}' is not part of the fused step"
    if permuted:
        return "a matrix takes its inputs in another order (GPTQ act-order), which the fused step does not"
    return None


def supports(spec: DecoderSpec) -> str | None:
    """Return what of a spec the fused step lacks, or None."""
    first = spec.layers[0]
    for layer in spec.layers:
        if layer.norm.kind != "rms":
            return "the fused step has RMS norms, not layer norms"
        if layer.placement != "pre" or layer.parallel:
            return f"the fused step has norms before attention and feed-forward, not {layer.placement} or parallel ones"
        if not layer.mlp.gated or layer.mlp.activation != "silu" or layer.mlp.experts is not None:
            return "the fused step has a feed-forward gated by silu, not another one"
        a = layer.attention
        if a.rope is None or a.rope is not first.attention.rope or a.rope.channels != a.head_size:
            return "the fused step has one rope of whole heads for all layers"
        if a.softcap is not None or a.scale != a.head_size**-0.5:
            return "the fused step scales scores by 1/sqrt(head size), without a cap"
    if spec.learned_positions is not None or spec.embedding_width != spec.width or spec.embedding_scale != 1:
        return "the fused step reads the embedding as it is, without positions, projections or a scale"
    if spec.norm is None or spec.softcap is not None:
        return "the fused step has a norm before the head and no cap behind it"
    return None


def fuse(model: "DecoderModel") -> Decoder | str:
    """Return the fused decode step of a model, or the sentence that says why it has none."""
    if reason := supports(model.spec):
        return reason
    linears = model.linears()
    permuted = any(w.format == PermutedTensor.format for w in (model.embedding.weight, *(x.weight for x in linears)))
    if reason := why_not(model.device.type, (linear.kernel for linear in linears), permuted):
        return reason
    if model.dtype != torch.float32:
        return f"the fused step computes in f32, the model in {str(model.dtype).removeprefix('torch.')}"
    spec = model.spec
    assert spec.norm is not None
    parts = ModelParts(
        width=spec.width,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_size=spec.head_size,
        norm_eps=spec.norm.eps,
        frequency=spec.ropes[0].frequency,
        embedding=_embedding(model),
        layers=[_layer(layer) for layer in model.layers],  # type: ignore[arg-type]
        norm=_weight(model.output.norm),
        head=_linear(model.head),
    )
    return unsupported(parts) or Decoder(parts)


def _embedding(model: "DecoderModel") -> Matrix:
    """Share the head's matrix where they are tied; a coded embedding of its own is laid out for look-ups."""
    w = model.embedding.weight
    if w is model.head.weight:
        return _matrix(model.head)
    from crelle.kernels import ops

    found = matrix(w, model.build.once_for(w, "embedding", lambda: ops.prepare(w, model.dtype)))
    assert not isinstance(found, str), found
    return found


def _matrix(linear: QuantLinear) -> Matrix:
    found = matrix(linear.weight, linear.prepared)
    assert not isinstance(found, str), found  # why_not has seen to it
    return found


def _linear(linear: QuantLinear) -> LinearParts:
    return LinearParts(weight=_matrix(linear), bias=linear.bias)


def _weight(norm: object) -> Tensor:
    weight: Tensor = norm.weight  # type: ignore[attr-defined]
    return weight


def _layer(layer: "Layer") -> LayerParts:
    a, mlp = layer.attention, cast(Any, layer.mlp)
    return LayerParts(
        q=_linear(a.q),
        k=_linear(a.k),
        v=_linear(a.v),
        o=_linear(a.o),
        gate=_linear(mlp.gate),
        up=_linear(mlp.up),
        down=_linear(mlp.down),
        norm_attention=_weight(layer.norm_attention),
        norm_mlp=_weight(layer.norm_mlp),
        q_norm=None if a.q_norm is None else _weight(a.q_norm),
        k_norm=None if a.k_norm is None else _weight(a.k_norm),
        window=a.spec.window,
    )
