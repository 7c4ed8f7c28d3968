"""Builds the C++ step of a model whose spec and linears it supports.

The prompt of a quantized model is one call into C++, and so is each further token of any model, over the same prepared
weights and the same cache that crelle.models.decoder uses.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels import cpu, ops
from crelle.kernels.cpu.fused_decoder import (
    ExpertsParts,
    FusedDecoder,
    LayerParts,
    LinearParts,
    Matrix,
    MlpParts,
    ModelParts,
    NormParts,
    matrix,
    supports_model,
)
from crelle.kernels.cpu.fused_decoder import (
    supports as step_supports,
)
from crelle.kernels.spec import DecoderSpec
from crelle.models.linear import QuantEmbedding, QuantLinear

if TYPE_CHECKING:
    from crelle.models.decoder import DecoderModel

_FUSABLE = {"cpu", "cpu-int8", "cpu-integer", "dense"}  # kernels whose products the fused step computes the same way


def supports(spec: DecoderSpec, device: str, kernels: Iterable[str], permuted: bool = False) -> str | None:
    """Return why a model with these kernels decodes layer by layer, or None when it can be fused."""
    if device != "cpu":
        return f"the fused step runs on the CPU, not on {device}"
    if (reason := cpu.available()) is not None:
        return f"the C++ extension {reason}"
    if (reason := step_supports(spec)) is not None:
        return f"the fused step {reason}"
    if others := sorted(set(kernels) - _FUSABLE):
        return f"kernel '{others[0]}' is not part of the fused step"
    if permuted:
        return "a matrix takes its inputs in another order (GPTQ act-order), which the fused step does not"
    return None


def fuse(model: "DecoderModel") -> FusedDecoder | str:
    """Return the fused decoder of a model, or the sentence that says why it has none."""
    linears = model.linears()
    permuted = any(w.format == PermutedTensor.format for w in (model.embedding.weight, *(x.weight for x in linears)))
    if reason := supports(model.spec, model.device.type, (linear.kernel for linear in linears), permuted):
        return reason
    if model.dtype != torch.float32:
        return f"the fused step computes in f32, the model in {str(model.dtype).removeprefix('torch.')}"
    for linear in linears:
        if isinstance(refused := matrix(linear.weight, linear.prepared), str):
            return refused
    parts = ModelParts(
        spec=model.spec,
        embedding=_embedding(model),
        layers=[_layer(layer, model.spec.width) for layer in model.layers],
        norm=_norm(model.output.norm, model.spec.width),
        head=_linear(model.head),
        positions=_positions(model.input.positions),
        project_in=_optional(model.input.project_in),
        project_out=_optional(model.output.project_out),
    )
    return supports_model(parts) or FusedDecoder(parts)


def _embedding(model: "DecoderModel") -> Matrix:
    """Share the head's matrix where they are tied; a coded embedding of its own is laid out for look-ups."""
    w = model.embedding.weight
    if w is model.head.weight:
        return _matrix(model.head)
    found = matrix(w, model.build.once_for(w, "embedding", lambda: ops.prepare(w, model.dtype)))
    assert not isinstance(found, str), found
    return found


def _positions(table: QuantEmbedding | None) -> torch.Tensor | None:
    return None if table is None else table.weight.dequantize(torch.float32)


def _matrix(linear: QuantLinear) -> Matrix:
    found = matrix(linear.weight, linear.prepared)
    assert not isinstance(found, str), found  # `supports` has returned None
    return found


def _linear(linear: QuantLinear) -> LinearParts:
    return LinearParts(weight=_matrix(linear), bias=linear.bias)


def _optional(linear: QuantLinear | None) -> LinearParts | None:
    return None if linear is None else _linear(linear)


def _norm(norm: Any, size: int) -> NormParts | None:
    """Return a norm's tensors; ones where it has no weight."""
    if norm is None:
        return None
    weight = torch.ones(size) if norm.weight is None else norm.weight
    return NormParts(weight=weight, bias=getattr(norm, "bias", None))


def _layer(layer: Any, width: int) -> LayerParts:
    a, normed = layer.attention, layer.spec.attention.normed
    experts = None if layer.spec.mlp.experts is None else _experts(layer.mlp)
    mlp = {} if experts is not None else _mlp(layer.mlp)
    return LayerParts(
        q=_linear(a.q),
        k=_linear(a.k),
        v=_linear(a.v),
        o=_linear(a.o),
        **mlp,
        experts=experts,
        sinks=a.sinks,
        norm_attention=_norm(layer.norm_attention, width),  # type: ignore[arg-type]
        norm_mlp=_norm(layer.norm_mlp, width),
        post_attention_norm=_norm(layer.post_attention_norm, width),
        post_mlp_norm=_norm(layer.post_mlp_norm, width),
        q_norm=_norm(a.q_norm, normed.get("q_norm", 0)),
        k_norm=_norm(a.k_norm, normed.get("k_norm", 0)),
    )


def _mlp(mlp: Any) -> dict[str, LinearParts]:
    found = {"gate": mlp.gate, "up": mlp.up, "down": mlp.down}
    return {name: _linear(linear) for name, linear in found.items() if linear is not None}


def _experts(mlp: Any) -> ExpertsParts:
    each = [*mlp.experts, *([] if mlp.shared is None else [mlp.shared])]
    return ExpertsParts(
        router=_linear(mlp.router),
        shared_gate=None if mlp.shared_gate is None else _linear(mlp.shared_gate),
        each=[MlpParts(**_mlp(expert)) for expert in each],
    )
