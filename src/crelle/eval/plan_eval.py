"""The measured quality of a plan: the model quantized by it in memory, and its perplexity; nothing is written."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.quantizers.calibrate import Calibrator
from crelle.quantizers.layer_api import CalibrationModel
from crelle.quantizers.scheme import parse
from crelle.quantizers.search import Plan

Progress = Callable[[int, int, str], None]


@torch.no_grad()
def dequantized(
    model: CalibrationModel,
    overrides: Mapping[str, str],
    rows: Tensor,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Quantize the linears as `crelle quantize` does and return the dequantized weights."""
    recipes = {module: parse(scheme) for module, scheme in overrides.items()}
    calibrator = Calibrator(model, rows, device=device)
    found: dict[str, Tensor] = {}
    for i in range(model.layers):
        walk = calibrator.begin()
        fitted = walk.fit(lambda module, weight, stats: recipes[module].fit(weight, stats))
        found |= {module: w.dequantize(torch.float32).to(device) for module, w in fitted.items()}
        walk.end()
        if progress:
            progress(i + 1, model.layers, "quantizing")
    return found


@torch.no_grad()
def open_perplexity(
    model: CalibrationModel,
    windows: Tensor,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
    batch: int = 2,
) -> float:
    """Return the perplexity over windows [S, T] with some weights replaced; as `crelle eval`, layer by layer."""
    x = model.embed(windows.to(device))
    for i in range(model.layers):
        block = model.block(i)
        for name, linear in block.linears().items():
            if weights and name in weights:
                linear.weight = weights[name]
        x = torch.cat([block(part) for part in torch.split(x, batch)])
    total = 0.0
    for state, row in zip(x, windows.to(device), strict=True):
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
