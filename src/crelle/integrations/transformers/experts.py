"""Experts of a mixture: transformers keeps them as two tensors of three dimensions, checkpoints matrix by matrix."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crelle.errors import UnsupportedError

SLOTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_EXPERT = re.compile(r"(.*)\.(\d+)\.(\w+)")


class ExpertName(NamedTuple):
    """The name of an expert's matrix, taken apart: `model.layers.0.mlp.experts`, 3, `gate_proj`."""

    experts: str
    which: int
    matrix: str


def expert_name(module: str) -> ExpertName | None:
    found = _EXPERT.fullmatch(module)
    return ExpertName(found[1], int(found[2]), found[3]) if found and found[3] in SLOTS else None


def is_experts(module: nn.Module | None) -> bool:
    """Tell whether a module is a family's experts as transformers keeps them."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.ndim == 3


class Expert(nn.Module):
    """The linears of one expert, under the family's own names."""

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.slots = {SLOTS[name]: name for name in linears}
        for name, linear in linears.items():
            self.add_module(name, linear)

    def product(self, slot: str, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, self.slots[slot])(x)
        return y


class CrelleExperts(nn.ModuleList):
    """Experts one by one; which tokens go to which, and what stands between the products, is the family's own."""

    def __init__(self, origin: nn.Module, experts: list[Expert]) -> None:
        if getattr(origin, "has_bias", False):
            raise UnsupportedError(f"experts with biases ({type(origin).__name__}) cannot be quantized yet")
        super().__init__(experts)
        for name in list(origin._parameters):
            delattr(origin, name)
        self._origin = (origin,)  # in a tuple: no child

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs; hidden [T, width], top_k_* [T, k]."""
        out = torch.zeros_like(hidden)
        for e in torch.unique(top_k_index).tolist():
            token, place = torch.where(top_k_index == e)
            y = self._one(self[e], hidden[token]) * top_k_weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _one(self, expert: Expert, x: Tensor) -> Tensor:
        origin: Any = self._origin[0]
        up = expert.product("up", x)
        if not getattr(origin, "has_gate", True):
            return expert.product("down", origin.act_fn(up))
        gate = expert.product("gate", x)
        if hasattr(origin, "_apply_gate"):
            alternating = not getattr(origin, "is_concatenated", True)
            both = torch.stack([gate, up], -1).flatten(-2) if alternating else torch.cat([gate, up], -1)
            inner = origin._apply_gate(both)
        else:
            inner = origin.act_fn(gate) * up
        return expert.product("down", inner)
