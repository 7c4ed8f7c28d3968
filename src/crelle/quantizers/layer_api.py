"""A model taken apart for calibration and training: its layers one by one, with the weights in the open.

Quantizers stand below models, so what they need of a model is written down here and `crelle.models.opened` builds it
from the very layers that are served: only the linears are of another make.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def half_products(device: torch.device, wanted: bool = True) -> torch.autocast:
    """Let products run in bf16 where the machine has instructions for it; sums and the residual stream stay f32."""
    able = device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported())
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and able, cache_enabled=False)


class TrainableLinear(nn.Module):
    """y = x Wᵀ + bias, where W can be replaced or made by something that trains, and x can be watched."""

    weight: Tensor  # f32 [N, K]

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.name, self.bias = name, bias
        self.register_buffer("weight", weight, persistent=False)
        self.coder: nn.Module | None = None  # gives W [N, K] instead of `weight`
        self.watch: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(x)
        return F.linear(x, self.weight if self.coder is None else self.coder(), self.bias)


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """Linears that read one input, and the vector or rows before them into which a scale of that input can go.

    `source` scales: for a norm its weight [K]; for a linear its output rows [K, …] (and bias).
    """

    source: str  # full name of the tensor, e.g. model.layers.0.input_layernorm.weight
    readers: tuple[str, ...]  # full names of the linears


class Block(Protocol):
    """One layer: hidden states [B, T, width] to hidden states."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def linears(self) -> dict[str, TrainableLinear]:
        """By full name, in the order in which they run."""
        ...

    def stages(self) -> Sequence[tuple[str, ...]]:
        """Names of linears that read the same input, in the order in which they run."""
        ...

    def folds(self) -> Sequence[ScaleFold]: ...

    def vectors(self) -> dict[str, Tensor]:
        """The other tensors (norms) by full name; they may be changed in place."""
        ...


class CalibrationModel(Protocol):
    """A model whose layers are built when they are asked for, in f32."""

    @property
    def layers(self) -> int: ...

    def layer_name(self, i: int) -> str:
        """The prefix of a layer's tensors, e.g. model.layers.0."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return hidden states [B, T, width] of tokens [B, T]."""
        ...

    def block(self, i: int) -> Block: ...

    def finish(self, x: Tensor) -> Tensor:
        """The last norm: what the output head reads."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [..., V] of finished hidden states."""
        ...
