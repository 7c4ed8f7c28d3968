"""Methods of transformers' models that have to know our modules: they are bound to a model that has them.

save_pretrained             a Crelle checkpoint (saving.py)
num_parameters              counts quantized matrices by their shapes
resize_token_embeddings     makes the embedding and the head plain first: new rows have no codes
dequantize                  makes all of it plain; in dtype, else that of each layer's floats
"""

import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from crelle.errors import UnsupportedError
from crelle.integrations.transformers.experts import CrelleExperts
from crelle.integrations.transformers.layers import CrelleLinear, JoinedLinear, QuantModule, TiedLinear
from crelle.integrations.transformers.saving import save_pretrained


def bind(model: Any) -> None:
    """Let a model with our modules answer by the methods of this file."""
    for method in (save_pretrained, num_parameters, resize_token_embeddings):
        setattr(model, method.__name__, MethodType(method, model))


def unbind(model: Any) -> None:
    """Give a model back its own methods."""
    for method in (save_pretrained, num_parameters, resize_token_embeddings):
        model.__dict__.pop(method.__name__, None)


def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count parameters, those of quantized matrices too, which are not trainable."""
    plain: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return plain
    coded = [m for m in model.modules() if isinstance(m, QuantModule)]
    counted = [m for m in coded if not (exclude_embeddings and isinstance(m, nn.Embedding))]
    return plain + sum(math.prod(m.matrix().shape) for m in counted)


def resize_token_embeddings(model: Any, *args: Any, **options: Any) -> nn.Embedding:
    """Resize as transformers does, with an embedding and a head that were made plain before."""
    found = model.get_input_embeddings(), model.get_output_embeddings()
    if args[:1] != (None,) and (args or any(options.get(k) for k in ("new_num_tokens", "pad_to_multiple_of"))):
        names = [name for name, m in model.named_modules() if any(m is one for one in found)]
        for name in sorted(names, key=lambda n: isinstance(model.get_submodule(n), nn.Embedding)):  # heads read it
            _make_plain(model, name, None)
        model.tie_weights()
    resized: nn.Embedding = type(model).resize_token_embeddings(model, *args, **options)
    return resized


@torch.no_grad()
def dequantize(model: Any, dtype: torch.dtype | None) -> None:
    """Put plain modules in the places of all of ours."""
    modules = dict(model.named_modules())
    if at := next((name for name, m in modules.items() if isinstance(m, CrelleExperts)), None):
        raise UnsupportedError(f"the experts at '{at}' cannot be dequantized in place: load the unquantized model")
    adapted = (n for n, m in modules.items() if isinstance(getattr(m, "base_layer", None), QuantModule))
    if at := next(adapted, None):
        raise UnsupportedError(f"'{at}' has an adapter: unload it first (model.unload()), then dequantize")
    first = [name for kind in (JoinedLinear, TiedLinear) for name, m in modules.items() if isinstance(m, kind)]
    for name in [*first, *modules]:  # joined linears take in their parts, tied heads read the embedding
        _make_plain(model, name, dtype)
    model.tie_weights()


def _make_plain(model: Any, name: str, dtype: torch.dtype | None) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return  # a part that its joined linear has taken in
    if isinstance(module, JoinedLinear):
        _join(model, name, module, dtype)
    elif isinstance(module, TiedLinear):
        embedding = module._embedding[0]
        plain = _linear(_values(embedding, dtype), module.bias)
        model.set_submodule(name, plain)
        target = next(n for n, m in model.named_modules() if m is embedding)
        model.all_tied_weights_keys[f"{name}.weight"] = f"{target}.weight"
        model._tied_weights_keys = dict(model.all_tied_weights_keys)
    elif isinstance(module, CrelleLinear):
        model.set_submodule(name, _linear(_values(module, dtype), module._parameters["bias"]))
    elif isinstance(module, QuantModule):
        weight = nn.Parameter(_values(module, dtype), requires_grad=False)
        own = type(module).__mro__[1]  # what our class was made of
        for part in module.part_names:
            del module._buffers[part]
        module.__class__ = own if issubclass(own, nn.Embedding) else nn.Embedding  # type: ignore[assignment]
        module.weight = weight


def _values(module: QuantModule, dtype: torch.dtype | None) -> Tensor:
    return module.matrix().dequantize(torch.float32).to(dtype or module.dtype)


def _linear(weight: Tensor, bias: nn.Parameter | None) -> nn.Linear:
    N, K = weight.shape
    made = nn.Linear(K, N, bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.register_parameter("bias", None if bias is None else nn.Parameter(bias.to(weight.dtype), requires_grad=False))
    return made


def _join(model: Any, name: str, module: JoinedLinear, dtype: torch.dtype | None) -> None:
    """Put one matrix where the parts of several were."""
    parts = [model.get_submodule(part) for part in module._parts]
    w = torch.cat([_values(p, dtype) if isinstance(p, QuantModule) else p.weight for p in parts])
    biases = [p._parameters["bias"] for p in parts]
    bias = None if biases[0] is None else torch.cat(biases)
    if module._order is not None:
        w, bias = w[module._order], bias if bias is None else bias[module._order]
    plain: nn.Module = _linear(w, None if bias is None else nn.Parameter(bias))
    if module.transposed:
        made: Any = Conv1D(1, 1)  # type: ignore[no-untyped-call]
        made.nf, made.nx = w.shape
        made.weight = nn.Parameter(w.T.contiguous(), requires_grad=False)
        made.bias = plain.bias
        plain = made
    for part in module._parts:
        outer, _, inside = part.rpartition(".")
        if part != name:
            delattr(model.get_submodule(outer), inside)
    model.set_submodule(name, plain)
