"""Puts our module in the place of a plain one whose weight is at hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.integrations.transformers.layers import Choice, CrelleLinear, Encoding, JoinedLinear, quantize_embedding
from crelle.integrations.transformers.placement import quantized_linear, tie_heads
from crelle.models.families import families
from crelle.models.families.base import StoredMatrix

Fit = Callable[[Tensor], QuantTensor]  # of a weight [N, K]


def swap(model: Any, name: str, weight: Tensor, dtype: torch.dtype, fit: Fit, how: Choice) -> list[str]:
    """Quantize a linear, an embedding or a Conv1D; return parameters that are no more, of heads that shared its weight.

    `weight` is as the module stores it, `dtype` that of the layer's floats.
    """
    module = model.get_submodule(name)
    if isinstance(module, Conv1D):
        _swap_conv1d(model, name, module, weight, dtype, fit, how)
        return []
    encoding = Encoding.of(fit(weight))
    module.weight = nn.Parameter(torch.empty(0, dtype=dtype, device="meta"), requires_grad=False)
    if isinstance(module, nn.Linear):
        model.set_submodule(name, quantized_linear(module, encoding, how))
        return []
    quantize_embedding(module, encoding, how)
    return tie_heads(model)


def _swap_conv1d(model: Any, name: str, module: Any, weight: Tensor, dtype: torch.dtype, fit: Fit, how: Choice) -> None:
    """Store GPT-2's linears as [outputs, inputs], and q, k and v apart, as our checkpoints have them."""
    rule = _conv1d_rule(name)
    if module.bias.is_meta:
        raise FormatError("its bias comes after its weight")
    outer, count = name.removesuffix(rule.module), len(rule.parts)
    made = {}
    for part, w, bias in zip(rule.parts, weight.T.chunk(count), module.bias.data.chunk(count), strict=True):
        own = nn.Parameter(bias.clone(), requires_grad=False)
        made[part] = CrelleLinear(Encoding.of(fit(w.contiguous())), own, dtype, how)
        model.set_submodule(f"{outer}{part}", made[part])
    model.set_submodule(name, JoinedLinear(made))


def _conv1d_rule(name: str) -> StoredMatrix:
    rule = next((r for r in families()["gpt2"].stored if name.endswith(f".{r.module}")), None)
    if rule is None:
        raise UnsupportedError("it is a Conv1D of an unknown kind: name it in modules_to_not_convert")
    return rule


def matrices_of(name: str, module: Any) -> list[Tensor]:
    """Return the matrices [N, K] that `swap` will have encoded, in its order."""
    w: Tensor = module.weight.data
    if not isinstance(module, Conv1D):
        return [w]
    return [part.contiguous() for part in w.T.chunk(len(_conv1d_rule(name).parts))]
