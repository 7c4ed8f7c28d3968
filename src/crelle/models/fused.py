"""Hands a model over to C++, where all of its layers can go there.

The prompt of a quantized model is one call into C++, and so is each further token of any model, over the same prepared
weights and the same cache that the layers of llama.py use.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crelle.formats.composite import PermutedTensor
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
from crelle.models.linear import QuantLinear

if TYPE_CHECKING:
    from crelle.models.llama import Layer, Llama

__all__ = ["MAX_ROWS", "Decoder", "fuse", "why_not"]

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


def fuse(model: "Llama") -> Decoder | str:
    """Return the fused decode step of a model, or the sentence that says why it has none."""
    linears = model.linears()
    permuted = any(w.format == PermutedTensor.format for w in (model.embedding.weight, *(x.weight for x in linears)))
    if reason := why_not(model.device.type, (linear.kernel for linear in linears), permuted):
        return reason
    if model.dtype != torch.float32:
        return f"the fused step computes in f32, the model in {str(model.dtype).removeprefix('torch.')}"
    c = model.c
    parts = ModelParts(
        width=c.width,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_size=c.head_size,
        norm_eps=c.norm_eps,
        frequency=c.rope.frequency,
        embedding=_embedding(model),
        layers=[_layer(layer) for layer in model.layers],  # type: ignore[arg-type]
        norm=_weight(model.norm),
        head=_linear(model.head),
    )
    return unsupported(parts) or Decoder(parts)


def _embedding(model: "Llama") -> Matrix:
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
    a = layer.attention
    return LayerParts(
        q=_linear(a.q_proj),
        k=_linear(a.k_proj),
        v=_linear(a.v_proj),
        o=_linear(a.o_proj),
        gate=_linear(layer.gate),
        up=_linear(layer.up),
        down=_linear(layer.down),
        norm_attention=_weight(layer.norm_attention),
        norm_mlp=_weight(layer.norm_mlp),
        q_norm=None if a.q_norm is None else _weight(a.q_norm),
        k_norm=None if a.k_norm is None else _weight(a.k_norm),
        window=a.window,
    )
