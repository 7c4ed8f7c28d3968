"""What the loss says about every linear: second moments of its inputs and of the gradients at its outputs.

One forward pass, then one backward pass, a layer in memory at a time. The gradient is of one of two losses:

    fisher    the loss of next tokens sampled from the model's own distribution: squares are the Fisher information
    residual  random signs at the layer's output over |y_t|: the layer's relative error, whatever later layers do

Between the passes the hidden states before the layers are kept; where and how many of them, how many sequences run at
one time, and whether a layer goes backward once for all of its Hessians or several times for some of them each, is in
crelle.quantizers.search.search_memory. None of that changes a result beyond the rounding of its sums.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from crelle.kernels.cpu import i16_gemm
from crelle.quantizers.calibration.half_stats import add_upper_half
from crelle.quantizers.calibration.layer_api import (
    Block,
    CalibrationModel,
    TrainableLinear,
    bf16_sums,
    has_half_products,
)
from crelle.quantizers.calibration.loss_passes import LossPasses, Place, wake_backward
from crelle.quantizers.calibration.stats import add_upper, mirror_
from crelle.quantizers.search.search_memory import SearchMemory
from crelle.quantizers.stage_times import SEARCH_HEAD, timed

Measure = Literal["fisher", "residual"]
Stage = tuple[str, ...]  # names of linears that read the same input


class GradientStats:
    """Second moments of one linear's inputs and output gradients; sums over tokens."""

    def __init__(self, linear: TrainableLinear, passed: int, half: bool = False, *, calibrated: bool = True) -> None:
        self._half = half  # bf16 products where the machine has them
        self._passed = passed  # tokens that pass the layer; an expert reads some of them
        N, K = linear.weight.shape
        device = linear.weight.device
        self._squares = torch.zeros(N, device=device)  # of gradients
        self._hessian = torch.zeros(K, K, device=device)  # tokens weighted by their gradients
        # Tokens weighted as in calibration; the same for all linears of an input, so only one of them sums it up.
        self._calibrated = torch.zeros(K, K, device=device) if calibrated else None
        self.tokens = 0

    def add(self, x: Tensor, gradient: Tensor, place: Place) -> None:
        """Add inputs [..., K] and gradients [..., N]."""
        if not x.numel():
            return
        x, g = x.float().flatten(0, -2), gradient.float().flatten(0, -2).square()
        self._squares += g.sum(0)
        self._add(self._hessian, x * g.sum(1, keepdim=True).sqrt())
        if self._calibrated is not None:
            self._add(self._calibrated, x * place.roots())
        self.tokens += len(x)

    def _add(self, sums: Tensor, x: Tensor) -> None:
        if self._half and x.device.type == "cuda":
            add_upper_half(sums, x.bfloat16())
            return
        if self._half and not has_half_products(x.device) and i16_gemm.usable(x.device):
            i16_gemm.StatsI16().add(x, None, None, sums, None, x.new_zeros(x.shape[1]))
            return
        with bf16_sums(x.device, self._half):
            add_upper(sums, x)

    def importance(self) -> Tensor:
        """Return G [N], the mean over all tokens: where a token does not reach an expert, it has no gradient there."""
        return self._squares / max(1, self._passed)

    def take_weighted(self) -> Tensor:
        """Return H [K, K]; the sums become part of it, and are forgotten here."""
        sums, self._hessian = self._hessian, self._hessian[:0]
        return mirror_(sums).div_(self._squares.sum().clamp(min=1e-38))

    def take_calibrated(self) -> Tensor:
        """Return the Hessian [K, K] as calibration sums it up; the same holds for its sums."""
        assert self._calibrated is not None
        sums, self._calibrated = self._calibrated, None
        return mirror_(sums).div_(max(1, self.tokens))


def backward_stats(
    model: CalibrationModel,
    tokens: Tensor,
    *,
    measure: Measure = "fisher",
    memory: SearchMemory | None = None,
    seed: int = 0,
    half: bool = True,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,  # called after each layer forward, and after the output head
) -> Iterator[tuple[Block, Stage, dict[str, GradientStats]]]:
    """Run forward through all layers, then backward; yield their stages, last layer first, with the linears' stats.

    Stats are the caller's to use up before the next stage is asked for.
    """
    memory = memory or SearchMemory()
    run = LossPasses(model, tokens, memory, half, torch.device(device))
    rng = torch.Generator(run.device).manual_seed(seed)
    told = progress or (lambda _: None)
    with torch.no_grad():
        x = run.forward(told)
    wake_backward(run.device)
    with timed(SEARCH_HEAD):
        pull = None
        if measure == "fisher":
            pull = run.loss_gradient(x, torch.rand(tokens.numel(), 1, generator=rng, device=run.device))
    told("output head")
    after = x
    for i in reversed(range(model.layers)):
        x = run.before(i)
        block = run.block(i, ahead=i - 1)
        if pull is None or measure == "residual":
            pull = _signs(after, rng, run.device)
        below: Tensor | None = None
        for group in memory.passes(block):
            stats = _new_stats(block, group, tokens.numel(), half)
            found = run.backward(block, x, pull, after, stats, wanted=below is None)
            below = found if below is None else below
            for stage in group:
                yield block, stage, {name: stats.pop(name) for name in stage}
        pull, after = below, x


def _new_stats(block: Block, stages: Sequence[Stage], passed: int, half: bool) -> dict[str, GradientStats]:
    linears = block.linears()
    return {
        name: GradientStats(linears[name], passed, half, calibrated=name == stage[0])
        for stage in stages
        for name in stage
    }


def _signs(after: Tensor, rng: torch.Generator, device: torch.device) -> Tensor:
    """Return the gradient of `residual` at hidden states behind a layer."""
    signs = torch.randint(0, 2, after.shape, generator=rng, device=device).float() * 2 - 1
    size = after.to(device, torch.float32).square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
    return signs / size
