"""Which modules of a plain model a scheme applies to: linears in numbered layers, and whatever an override names."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from crelle.errors import SchemeError
from crelle.integrations.transformers.config import CrelleConfig
from crelle.integrations.transformers.experts import is_experts
from crelle.integrations.transformers.layers import CrelleLinear
from crelle.quantizers.base import Cast, Passthrough, Quantizer

_LAYER = re.compile(r".*?\.\d+\.")


class Targets:
    """The quantizer of each module that a config names, checked against a model."""

    def __init__(self, model: Any, config: CrelleConfig) -> None:
        self._default, self._special = config.quantizers()
        self._skipped = config.modules_to_not_convert
        self._tied = {k.removesuffix(".weight"): v.removesuffix(".weight") for k, v in _tied(model).items()}
        kinds = nn.Linear, nn.Embedding, Conv1D
        self._modules = {
            n: m
            for n, m in model.named_modules()
            if (isinstance(m, kinds) and not isinstance(m, CrelleLinear)) or is_experts(m)
        }
        for pattern in self._special:
            if not any(fnmatchcase(name, pattern) for name in self._modules):
                like = next(iter(self._modules), "none")
                raise SchemeError(f"the override '{pattern}' matches no module of the model; names look like '{like}'")
        for name in self._skipped:
            if not any(_matches(module, name) for module, _ in model.named_modules()):
                raise SchemeError(f"modules_to_not_convert names '{name}', which is no module of the model")

    def __iter__(self) -> Iterator[tuple[str, nn.Module, Quantizer]]:
        for name, module in self._modules.items():
            named = next((q for p, q in self._special.items() if fnmatchcase(name, p)), None)
            if named is None and (isinstance(module, nn.Embedding) or not _LAYER.match(name)):
                continue
            chosen = named or self._default
            if isinstance(chosen, Cast | Passthrough) or any(_matches(name, skipped) for skipped in self._skipped):
                continue
            if name in self._tied:
                raise SchemeError(f"'{name}' has the matrix of '{self._tied[name]}': name that in the override")
            yield name, module, chosen


def _tied(model: Any) -> dict[str, str]:
    found: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return found


def _matches(module: str, name: str) -> bool:
    """Tell whether a module is, or is inside, one that is named by its whole name, its end or a pattern."""
    return fnmatchcase(module, name) or f".{name}." in f".{module}."
