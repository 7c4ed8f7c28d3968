"""Quantizes a plain model while transformers loads it: each matrix when it comes, in f32, and then it is gone.

The model stays as its class built it, on meta, until a weight arrives; then our module takes the place of its module.
transformers loads one tensor after the other in this case, so that there is never more than one matrix (of experts:
those of one layer) in full precision.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from crelle.errors import CrelleError, UnsupportedError
from crelle.integrations.transformers.config import CrelleConfig
from crelle.integrations.transformers.experts import CrelleExperts, Expert, is_experts
from crelle.integrations.transformers.layers import CrelleLinear, Encoding
from crelle.integrations.transformers.swap import swap
from crelle.integrations.transformers.targets import Targets
from crelle.quantizers.base import Quantizer


class OnTheFly:
    """Where our modules go, and what was made of them so far."""

    def __init__(self, model: Any, config: CrelleConfig) -> None:
        self.model, self.how = model, config.choice
        self.chosen: dict[str, tuple[str, Quantizer]] = {}  # by parameter: its module, and how it is quantized
        self._dtypes: dict[str, torch.dtype] = {}
        self._experts: dict[str, dict[str, Tensor]] = {}  # by module: what has come
        self._error: CrelleError | None = None
        for name, module, quantizer in Targets(model, config):
            for kind, p in _weights(module).items():
                self.chosen[f"{name}.{kind}"] = name, quantizer
                wide = nn.Parameter(torch.empty_like(p, dtype=torch.float32), requires_grad=False)
                self._dtypes[name] = p.dtype
                setattr(module, kind, wide)  # what comes is not rounded to the model's dtype first
        if not self.chosen:
            raise UnsupportedError(f"the scheme '{config.scheme}' has nothing to quantize in {type(model).__name__}")

    def takes(self, parameter: str) -> bool:
        return parameter in self.chosen

    def operation(self) -> ConversionOps:
        return _Quantize(self)

    def finish(self, model: Any) -> None:
        """Say what went wrong while weights were loaded, in our words."""
        if self._error is not None:
            raise self._error

    def take(self, parameter: str, weight: Tensor, missing: set[str]) -> None:
        """Quantize what came for a parameter."""
        missing.discard(parameter)
        name, quantizer = self.chosen[parameter]
        try:
            self._take(name, parameter, quantizer, weight, missing)
        except CrelleError as e:  # transformers would show a traceback for each matrix
            self._error = self._error or type(e)(f"'{parameter}': {e}")

    def _take(self, name: str, parameter: str, quantizer: Quantizer, weight: Tensor, missing: set[str]) -> None:
        module = self.model.get_submodule(name)
        if not is_experts(module):
            missing.difference_update(swap(self.model, name, weight, self._dtypes[name], quantizer.fit, self.how))
            return
        come = self._experts.setdefault(name, {})
        come[parameter.rpartition(".")[2]] = weight
        if len(come) == len(_weights(module)):
            self._take_experts(name, module, quantizer, self._experts.pop(name))

    def _take_experts(self, name: str, module: Any, quantizer: Quantizer, come: Mapping[str, Tensor]) -> None:
        names = expert_names(self.model)
        dtype = self._dtypes[name]

        def linear(w: Tensor) -> CrelleLinear:
            return CrelleLinear(Encoding.of(quantizer.fit(w.contiguous())), None, dtype, self.how)

        experts = []
        for e in range(len(come["down_proj"])):
            up = come.get("gate_up_proj", come.get("up_proj"))
            if up is None or set(come) - {"gate_up_proj", "up_proj", "down_proj"} or module.is_transposed:
                raise UnsupportedError("its experts are of an unknown kind: name it in modules_to_not_convert")
            parts = _apart(up[e], module) if "gate_up_proj" in come else {"up": up[e]}
            experts.append(
                Expert({names[slot]: linear(w) for slot, w in {**parts, "down": come["down_proj"][e]}.items()})
            )
        self.model.set_submodule(name, CrelleExperts(module, experts))


def _apart(both: Tensor, module: Any) -> dict[str, Tensor]:
    """Return the matrices of gate and up from the one of both."""
    gate, up = both.chunk(2) if module.is_concatenated else (both[0::2], both[1::2])
    return {"gate": gate, "up": up}


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in module.named_parameters(recurse=False) if p.ndim > 1}


def expert_names(model: Any) -> dict[str, str]:
    """Return what the family's own files call gate, up and down of an expert."""
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    for c in get_model_conversion_mapping(model):
        if isinstance(c, WeightConverter) and "experts" in c.target_patterns[0]:
            stored = [p.removesuffix(".weight").rpartition(".")[2] for p in c._original_source_patterns]
            both = c.target_patterns[0].endswith("gate_up_proj")
            if both and len(stored) == 2:
                names["gate"], names["up"] = stored
            elif c.target_patterns[0].endswith("down_proj"):
                names["down"] = stored[0]
    return names


class _Quantize(ConversionOps):
    """What transformers calls with each weight that `OnTheFly.takes`."""

    def __init__(self, by: OnTheFly) -> None:
        self.by = by

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        missing = kwargs.get("missing_keys")
        for name, found in input_dict.items():
            weight = found[0] if isinstance(found, list) else found
            self.by.take(name, weight, set() if missing is None else missing)
        return {}
