"""Puts our modules where a checkpoint has encoded matrices, while the model is still on meta.

A checkpoint names matrices as the model's own files do. Where transformers has other names for its modules, it renames
what it loads, and so are our names here; three things besides are not one module for one matrix:

    experts       one module of transformers, a matrix for each expert in a file (experts.py)
    joined        linears that our checkpoints have apart (q, k, v; gate, up), and GPT-2's transposed Conv1D
    other         a matrix that is no linear's or embedding's (a router): its module gets the dequantized values
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.integrations.transformers.config import CrelleConfig
from crelle.integrations.transformers.experts import CrelleExperts, Expert, expert_name, is_experts
from crelle.integrations.transformers.layers import (
    Choice,
    CrelleLinear,
    Encoding,
    JoinedLinear,
    QuantModule,
    TiedLinear,
    quantize_embedding,
)
from crelle.models.families import families
from crelle.models.families.base import StoredMatrix


def place(model: Any, checkpoint: Checkpoint, config: CrelleConfig) -> dict[str, str]:
    """Put our modules into a model on meta; return parameters that take a dequantized matrix: {name: its matrix}."""
    names = _names_here(model, checkpoint)
    joined = _joined_parts(model, checkpoint)
    experts: dict[str, dict[tuple[int, str], str]] = {}
    dequantized: dict[str, str] = {}
    for module, spec in checkpoint.specs.items():
        here = names[module]
        encoded = spec["format"] != DenseTensor.format
        found = submodule(model, here)
        expert = expert_name(here)
        if here in joined or (expert is not None and is_experts(submodule(model, expert.experts))):
            if expert is not None and here not in joined:
                experts.setdefault(expert.experts, {})[expert.which, expert.matrix] = module
            continue
        if not encoded or found is None:
            continue  # as it is; or of a head that this class of model does not have
        w = _encoding(checkpoint, module)
        _require_shape(here, found, spec["shape"])
        if isinstance(found, nn.Linear):
            model.set_submodule(here, quantized_linear(found, w, config.choice))
        elif isinstance(found, nn.Embedding):
            quantize_embedding(found, w, config.choice)
        else:
            dequantized[f"{here}.weight"] = module
    for at, stored in experts.items():
        _place_experts(model, at, stored, checkpoint, config)
    for at, parts in _by_joined(joined).items():
        stored_as = {p: names_back(names, p) for p in parts}
        _place_joined(model, at, stored_as, joined[parts[0]][1], checkpoint, config)
    tie_heads(model)
    return dequantized


def _encoding(checkpoint: Checkpoint, module: str) -> Encoding:
    """Return a matrix of a checkpoint, checked, with its parts on meta: transformers will load them."""
    parts = checkpoint.matrix(module).tensors()
    return Encoding(checkpoint.specs[module], {name: t.to("meta") for name, t in parts.items()})


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def quantized_linear(linear: nn.Linear, w: Encoding, how: Choice) -> CrelleLinear:
    """Return our module for an nn.Linear, with its bias."""
    if type(linear).forward is not nn.Linear.forward:
        raise UnsupportedError(
            f"a {type(linear).__name__} does more than a linear layer: name it in modules_to_not_convert, or leave it "
            "out of the scheme with an override of 'keep'"
        )
    return CrelleLinear(w, linear.bias, linear.weight.dtype, how)


def names_back(names: Mapping[str, str], here: str) -> str:
    return next(stored for stored, name in names.items() if name == here)


def _names_here(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Return what transformers calls each matrix of a checkpoint."""
    renamings = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    meta, prefix = model.state_dict(), model.base_model_prefix

    def here(module: str) -> str:
        name, _ = rename_source_key(f"{module}.weight", renamings, [], prefix, meta)
        found: str = name.removesuffix(".weight")
        if submodule(model, found) is not None or not prefix:
            return found
        # What is no parameter of the model is renamed but for its prefix: the parts of experts and of Conv1D.
        inside = found.removeprefix(f"{prefix}.")
        return f"{prefix}.{inside}" if hasattr(model, prefix) else inside

    return {module: here(module) for module in checkpoint.specs}


def _require_shape(name: str, module: nn.Module, shape: list[int]) -> None:
    own = list(module.weight.shape)  # type: ignore[arg-type]
    if own != shape:
        has, asks = (" x ".join(map(str, sizes)) for sizes in (shape, own))
        raise FormatError(f"'{name}' is {has} in the checkpoint, but the model's config asks for {asks}")


def _linear_for(w: Encoding, bias: nn.Parameter | None, dtype: torch.dtype, how: Choice) -> nn.Module:
    """Return a linear layer for a matrix, encoded or not."""
    if w.spec["format"] == DenseTensor.format:
        N, K = w.spec["shape"]
        plain = nn.Linear(K, N, bias=False, device="meta", dtype=dtype)
        plain.bias = bias  # type: ignore[assignment]
        return plain
    return CrelleLinear(w, bias, dtype, how)


def _place_experts(
    model: nn.Module, at: str, stored: Mapping[tuple[int, str], str], checkpoint: Checkpoint, config: CrelleConfig
) -> None:
    plain = all(checkpoint.specs[m]["format"] == DenseTensor.format for m in stored.values())
    if plain and _joins_experts(model):
        return
    origin = model.get_submodule(at)
    dtype = origin.down_proj.dtype
    count = 1 + max(index for index, _ in stored)
    made: list[dict[str, nn.Module]] = [{} for _ in range(count)]
    for (index, matrix), module in stored.items():
        made[index][matrix] = _linear_for(_encoding(checkpoint, module), None, dtype, config.choice)  # type: ignore[arg-type]
    model.set_submodule(at, CrelleExperts(origin, [Expert(linears) for linears in made]))


def _joins_experts(model: Any) -> bool:
    """Whether transformers joins plain matrices of experts itself: not those of families that only have fused files."""
    conversions = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
    return any("*" in c.source_patterns[0] and "experts" in c.target_patterns[0] for c in conversions)


JoinedPart = tuple[str, StoredMatrix]  # the joined linear's name, and how it is made of parts


def _joined_parts(model: Any, checkpoint: Checkpoint) -> dict[str, JoinedPart]:
    """Return, by the name of a matrix here, of which joined linear or Conv1D it is a part."""
    family = families().get(checkpoint.config.get("model_type", ""))
    found: dict[str, JoinedPart] = {}
    for name, module in model.named_modules():
        if isinstance(module, Conv1D | nn.Linear) and family is not None:
            for rule in family.stored:
                if name.endswith(f".{rule.module}"):
                    outer = name.removesuffix(rule.module)
                    found |= {f"{outer}{p}": (name, rule) for p in rule.parts}
    return found


def _by_joined(parts: Mapping[str, JoinedPart]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, (at, _) in parts.items():
        found.setdefault(at, []).append(name)
    return found


def _place_joined(
    model: nn.Module,
    at: str,
    parts: Mapping[str, str],
    rule: StoredMatrix,
    checkpoint: Checkpoint,
    config: CrelleConfig,
) -> None:
    origin = model.get_submodule(at)
    dtype = origin.weight.dtype
    for here, module in parts.items():
        w = _encoding(checkpoint, module)
        bias = None
        if origin.bias is not None:
            bias = nn.Parameter(torch.empty(w.spec["shape"][0], dtype=dtype, device="meta"), requires_grad=False)  # type: ignore[arg-type]
        model.set_submodule(here, _linear_for(w, bias, dtype, config.choice))  # type: ignore[arg-type]
    with torch.device("cpu"):  # the model is being built on meta
        spec = families()[checkpoint.config["model_type"]].spec(checkpoint.config)
        rows = rule.rows(spec, sum(checkpoint.specs[module]["shape"][0] for module in parts.values()))
    if rows is None:
        raise FormatError(f"{checkpoint.path}: the parts of '{at}' are not those of the model's config")
    order = torch.cat(rows).argsort() if rule.split == "heads" else None
    model.set_submodule(at, JoinedLinear(model, list(parts), order, rule.transposed))


def tie_heads(model: Any) -> list[str]:
    """Let heads that share a quantized embedding's matrix multiply by it; return the weights that they had."""
    gone = []
    for target, source in list(model.all_tied_weights_keys.items()):
        embedding = submodule(model, source.removesuffix(".weight"))
        if not isinstance(embedding, QuantModule):
            continue
        at = target.removesuffix(".weight")
        head = model.get_submodule(at)
        if not isinstance(head, CrelleLinear):  # else the checkpoint has a matrix of the head's own
            model.set_submodule(at, TiedLinear(embedding, getattr(head, "bias", None)))
        del model.all_tied_weights_keys[target]
        model._tied_weights_keys = dict(model.all_tied_weights_keys)
        gone.append(target)
    return gone
