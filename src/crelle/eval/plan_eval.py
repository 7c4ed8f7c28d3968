"""The measured quality of plans: the model quantized by one in memory, and its perplexity; nothing is written.

`check` measures some plans of a front and compares their losses with those that were predicted: the prediction is
additive and to second order, so what it must get right is the order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.quantizers.calibration.calibrate import Calibrator, memory_for
from crelle.quantizers.calibration.layer_api import CalibrationModel
from crelle.quantizers.scheme import parse
from crelle.quantizers.search.bit_allocation import Plan

Progress = Callable[[int, int, str], None]

AGREES = 0.9  # rank correlation from which on a front counts as confirmed


@torch.no_grad()
def plan_perplexity(
    model: CalibrationModel,
    overrides: Mapping[str, str],
    rows: Tensor,
    windows: Tensor,
    device: torch.device,
    *,
    memory: int | None = None,
    progress: Progress | None = None,
) -> float:
    """Return the perplexity over windows [S, T] of the model quantized as `crelle quantize` does it on rows [S, T].

    The windows run along, so that at most one layer is in memory.
    """
    recipes = {module: parse(scheme) for module, scheme in overrides.items()}
    calibrator = Calibrator(model, rows, device=device, memory=memory_for(model, rows, device, budget=memory))
    x = model.embed(windows.to(device))
    for i in range(model.layers):
        layer = calibrator.begin()
        layer.fit(lambda module, weight, stats: recipes[module].fit(weight, stats))
        layer.end()
        x = _through(layer.block, x)
        if progress:
            progress(i + 1, model.layers, "quantizing")
    return _perplexity(model, x, windows.to(device))


@torch.no_grad()
def open_perplexity(
    model: CalibrationModel,
    windows: Tensor,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
) -> float:
    """Return the perplexity over windows [S, T] with some weights replaced; as `crelle eval`, layer by layer."""
    x = model.embed(windows.to(device))
    for i in range(model.layers):
        block = model.block(i)
        for name, linear in block.linears().items():
            if weights and name in weights:
                linear.weight = weights[name]
        x = _through(block, x)
    return _perplexity(model, x, windows.to(device))


def _through(block: Callable[[Tensor], Tensor], x: Tensor, batch: int = 2) -> Tensor:
    return torch.cat([block(part) for part in torch.split(x, batch)])


def _perplexity(model: CalibrationModel, x: Tensor, windows: Tensor) -> float:
    total = 0.0
    for state, row in zip(x, windows, strict=True):
        total += F.cross_entropy(model.logits(model.finish(state))[:-1].float(), row[1:], reduction="sum").item()
    return math.exp(min(700.0, total / (windows.shape[0] * (windows.shape[1] - 1))))


def smallest_meeting(
    plans: Sequence[Plan], most: float, perplexity_of: Callable[[Plan], float]
) -> tuple[Plan | None, dict[float, float]]:
    """Bisect plans (small to large) for the smallest with at most that perplexity; also return all that was measured.

    Perplexity is taken to fall from plan to plan. None: the largest plan does not meet it.
    """
    tried: dict[float, float] = {}

    def meets(plan: Plan) -> bool:
        tried[plan.bits_per_weight] = perplexity_of(plan)
        return tried[plan.bits_per_weight] <= most

    if not meets(plans[-1]):
        return None, tried
    low, high = 0, len(plans) - 1  # plans[high] meets it
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(plans[middle]) else (middle + 1, high)
    return plans[high], tried


@dataclass(frozen=True, slots=True)
class FrontCheck:
    """Predicted against measured losses of some plans, from small to large."""

    full: float  # perplexity of the model as it is
    plans: Sequence[Plan]
    perplexities: Sequence[float]

    @property
    def measured(self) -> list[float]:
        """Nats per token above the model as it is."""
        return [math.log(p / self.full) for p in self.perplexities]

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and measured losses."""
        return rank_correlation([p.loss for p in self.plans], self.measured)

    @property
    def agrees(self) -> bool:
        return self.rank_correlation >= AGREES


def check(plans: Sequence[Plan], count: int, full: float, perplexity_of: Callable[[Plan], float]) -> FrontCheck:
    """Measure `count` plans, spread evenly over a front."""
    last = len(plans) - 1
    some = [plans[round(i * last / max(1, count - 1))] for i in range(min(count, len(plans)))]
    return FrontCheck(full, some, [perplexity_of(p) for p in some])


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, 0 where one of them is constant; equal values share their mean rank."""
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    spread = [math.sqrt(sum((r - mean) ** 2 for r in ranks)) for ranks in (x, y)]
    if min(spread, default=0.0) == 0:
        return 0.0
    return sum((r - mean) * (s - mean) for r, s in zip(x, y, strict=True)) / (spread[0] * spread[1])


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    borders = [0, *(j for j, (a, b) in enumerate(pairwise(order), 1) if values[a] != values[b]), len(values)]
    ranks = [0.0] * len(values)
    for begin, end in pairwise(borders):
        for i in order[begin:end]:
            ranks[i] = (begin + end - 1) / 2
    return ranks
