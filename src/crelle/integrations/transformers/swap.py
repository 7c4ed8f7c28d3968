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
    if (rule := _rule(model, name, module)) is not None:
        _swap_joined(model, name, rule, weight, dtype, fit, how)
        return []
    encoding = Encoding.of(fit(weight))
    module.weight = nn.Parameter(torch.empty(0, dtype=dtype, device="meta"), requires_grad=False)
    if isinstance(module, nn.Linear):
        model.set_submodule(name, quantized_linear(module, encoding, how))
        return []
    quantize_embedding(module, encoding, how)
    return tie_heads(model)


def _swap_joined(
    model: Any, name: str, rule: StoredMatrix, weight: Tensor, dtype: torch.dtype, fit: Fit, how: Choice
) -> None:
    """Store linears as [outputs, inputs], and joined ones apart, as our checkpoints have them."""
    module, outer = model.get_submodule(name), name.removesuffix(rule.module)
    if module.bias is not None and module.bias.is_meta:
        raise FormatError("its bias comes after its weight")
    w = weight.T if rule.transposed else weight
    rows = _rows(model, rule, len(w))
    for part, which in zip(rule.parts, rows, strict=True):
        own = None if module.bias is None else nn.Parameter(module.bias.data[which], requires_grad=False)
        model.set_submodule(f"{outer}{part}", CrelleLinear(Encoding.of(fit(w[which])), own, dtype, how))
    order = torch.cat(rows).argsort() if rule.split == "heads" else None
    parts = [f"{outer}{part}" for part in rule.parts]
    model.set_submodule(name, JoinedLinear(model, parts, order, rule.transposed))


def _rule(model: Any, name: str, module: nn.Module) -> StoredMatrix | None:
    """Return how our checkpoints store a module's matrix, where it is not as transformers does."""
    family = families().get(getattr(model.config, "model_type", ""))
    stored = () if family is None or isinstance(module, nn.Embedding) else family.stored
    rule = next((r for r in stored if name.endswith(f".{r.module}")), None)
    if rule is None and isinstance(module, Conv1D):
        raise UnsupportedError("it is a Conv1D of an unknown kind: name it in modules_to_not_convert")
    return rule


def _rows(model: Any, rule: StoredMatrix, N: int) -> list[Tensor]:
    with torch.device("cpu"):  # the model may be being built on meta
        rows = rule.rows(families()[model.config.model_type].spec(model.config.to_dict()), N)
    if rows is None:
        raise FormatError(f"its {N} rows are not those of the model's config")
    return rows


def matrices_of(model: Any, name: str, module: Any) -> list[Tensor]:
    """Return the matrices [N, K] that `swap` will have encoded, in its order."""
    w: Tensor = module.weight.data
    if (rule := _rule(model, name, module)) is None:
        return [w]
    w = w.T if rule.transposed else w
    return [w[which] for which in _rows(model, rule, len(w))]
