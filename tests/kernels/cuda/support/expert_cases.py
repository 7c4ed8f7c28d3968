"""Mixtures of experts for tests of the CUDA kernels: random weights, and what they make of x in f64."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fp4_weights import random_fp4
from plane_weights import random_weight
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.kernels.cuda.experts import products
from crelle.kernels.cuda.experts.weights import lay_out_experts
from crelle.kernels.cuda.fp4 import fp4_layout
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out


@dataclass(frozen=True, slots=True)
class Case:
    """A layer's experts and their formats."""

    experts: Any  # ExpertWeights, or Fp4Experts
    weights: list[dict[str, QuantTensor]]
    biases: list[dict[str, Tensor | None]]
    laid_out: object  # what the table points to


def make(
    kind: ScaleKind,
    P: int,
    group: int,
    *,
    count: int,
    top: int,
    width: int,
    inner: int,
    normalize: bool = True,
    bias: bool = False,
    activation: str = "silu",
    dtype: torch.dtype = torch.float16,
    scales: torch.dtype = torch.float16,
    device: str = "cpu",
) -> Case:
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    weights = [{n: random_weight(kind, P, *s, group, scales, device) for n, s in shapes.items()} for _ in range(count)]
    biases: list[dict[str, Tensor | None]] = [
        {n: torch.randn(s[0], dtype=dtype, device=device) if bias else None for n, s in shapes.items()}
        for _ in range(count)
    ]
    each = [{n: (lay_out(w[n]), b[n]) for n in shapes} for w, b in zip(weights, biases, strict=True)]
    return Case(lay_out_experts(each, top, normalize, activation), weights, biases, each)


def make_fp4(
    kind: str,
    *,
    count: int,
    top: int,
    width: int,
    inner: int,
    normalize: bool = True,
    bias: bool = True,
    activation: str = "swigluoai",
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
) -> Case:
    """Return experts of four-bit floats, with the biases and the activation of gpt-oss."""
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    weights: list[dict[str, QuantTensor]] = [
        {n: random_fp4(*shape, kind, device, seed=7 * e + i) for i, (n, shape) in enumerate(shapes.items())}
        for e in range(count)
    ]
    biases: list[dict[str, Tensor | None]] = [
        {n: torch.randn(s[0], dtype=dtype, device=device) if bias else None for n, s in shapes.items()}
        for _ in range(count)
    ]
    each = [
        {n: (fp4_layout.lay_out(w[n]), b[n]) for n in shapes}  # type: ignore[arg-type]
        for w, b in zip(weights, biases, strict=True)
    ]
    return Case(lay_out_experts(each, top, normalize, activation, dtype), weights, biases, each)


def sorted_slots(logits: Tensor, e: products.Mixture, tokens: int) -> tuple[Tensor, products.Slots]:
    """Return the weights that logits give, and the slots in passes of up to `tokens`."""
    chosen, weights = products.route(logits, e)
    return weights, products.sort(chosen, e, tokens)


def choices(logits: Tensor, top: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return experts and weights [M, top] by the definition; of equal logits the first."""
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :top]
    chance = logits.double().softmax(-1).gather(-1, order)
    return order, chance / chance.sum(-1, keepdim=True) if normalize else chance


def activated(name: str, gate: Tensor, up: Tensor) -> Tensor:
    if name == "swigluoai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}[name](gate) * up


def oracle(case: Case, x: Tensor, logits: Tensor, top: int, normalize: bool, activation: str = "silu") -> Tensor:
    """Return the weighted sums f64 [M, width] of what the chosen experts make of x [M, width]."""
    chosen, weight = choices(logits, top, normalize)
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)

    def product(h: Tensor, e: int, name: str) -> Tensor:
        y = h @ case.weights[e][name].dequantize(torch.float64).T
        return y if (bias := case.biases[e][name]) is None else y + bias.double()

    for m, row in enumerate(x.double()):
        for e, share in zip(chosen[m].tolist(), weight[m], strict=True):
            inner = activated(activation, product(row, e, "gate"), product(row, e, "up"))
            total[m] += share * product(inner, e, "down")
    return total
