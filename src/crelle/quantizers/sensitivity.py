"""Sensitivity of the loss to quantizing one matrix at given bits and group size: the input of `search`.

Replace a weight W by W - D. To second order the mean loss per token rises by

    1/2 sum_n G_n (D H Dᵀ)_nn        G_n = E[g_tn²]        H = E[|g_t|² x_t x_tᵀ] / E[|g_t|²]

x_t are the linear's inputs, g_t the gradient at its outputs. Tokens are weighted by their gradients, per linear: the
few with huge activations matter little to most linears, and much to keys and values, which all later tokens attend to.

The gradient is of one of two losses:
    fisher    the loss of next tokens sampled from the model's own distribution: the increase is in nats per token
    residual  random signs at the layer's output over |y_t|: the increase is the layer's relative error, whatever
              later layers do with it
D is computed for some rows of each matrix, sampled with probability proportional to G, with all settings in one pass of
error feedback, its Hessian that of crelle.quantizers.calibrate (tokens weighted by 1/|y_t|², y the layer's output). One
forward and one backward pass; in memory are one layer and the hidden states before every layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.errors import SchemeError
from crelle.quantizers.base import BitConfig
from crelle.quantizers.fast_error import Setting, fast_errors
from crelle.quantizers.gptq_solver import factor
from crelle.quantizers.grouping import require_finite
from crelle.quantizers.layer_api import Block, CalibrationModel, Progress, TrainableLinear, bf16_sums, half_products
from crelle.quantizers.stats import add_upper, mirrored

Measure = Literal["fisher", "residual"]

_CHUNK = 1024  # tokens whose logits are in memory at one time


GROUPS = (32, 64, 96, 128, 192, 384)  # larger ones look good to the prediction, and are not


def candidates(target_bits: float) -> tuple[BitConfig, ...]:
    """Return the settings to measure for a target: a good plan at 2.3 bits also has matrices of 4."""
    least = max(1, min(6, int(target_bits - 0.15)))  # the scales take their share
    bits = range(max(1 if least == 1 else 2, least - 1), least + 3)
    return tuple(BitConfig(b, group) for b in bits for group in GROUPS)


CANDIDATES = candidates(2.35)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The predicted increase of the loss for every setting of one matrix."""

    module: str
    shape: tuple[int, int]
    losses: dict[Setting, float]


def sensitivities(
    model: CalibrationModel,
    tokens: Tensor,
    settings: Sequence[Setting] = CANDIDATES,
    *,
    measure: Measure = "fisher",
    weight_rows: int = 128,  # of each matrix
    batch: int = 4,
    seed: int = 0,
    half: bool = True,  # bf16 products, where the machine has them; sums stay f32
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[Sensitivity]:
    """Measure every linear of the model on sequences of token ids [S, T], in execution order."""
    if len(tokens) == 0:
        raise SchemeError("measuring sensitivities needs at least one calibration sequence")
    L = model.layers
    rng = torch.Generator().manual_seed(seed)
    found: list[list[Sensitivity]] = []

    def forward(done: int) -> None:
        if progress:
            progress(done, 3 * L, "forward")

    layers = backward_stats(
        model, tokens, measure=measure, batch=batch, seed=seed, half=half, device=device, progress=forward
    )
    for block, stats in layers:
        stages = [[(block.linears()[name], stats[name]) for name in stage] for stage in block.stages()]
        found.append([one for stage in stages for one in _stage(stage, settings, weight_rows, rng)])
        if progress:
            progress(L + 2 * len(found), 3 * L, "backward")
    return [one for layer in reversed(found) for one in layer]


class GradientStats:
    """Second moments of one linear's inputs and output gradients; sums over tokens."""

    def __init__(self, linear: TrainableLinear, half: bool = False, *, calibrated: bool = True) -> None:
        self._half = half  # bf16 products where the machine has them
        N, K = linear.weight.shape
        device = linear.weight.device
        self.squares = torch.zeros(N, device=device)  # of gradients
        self._hessian = torch.zeros(K, K, device=device)  # tokens weighted by their gradients
        # Tokens weighted as in calibration; the same for all linears of an input, so only one of them sums it up.
        self._calibrated = torch.zeros(K, K, device=device) if calibrated else None
        self.tokens = 0

    def add(self, x: Tensor, gradient: Tensor, root: Tensor) -> None:
        """Add inputs [..., K], gradients [..., N] and the roots of the calibration's token weights [..., 1]."""
        x, g = x.float().flatten(0, -2), gradient.float().flatten(0, -2).square()
        self.squares += g.sum(0)
        with bf16_sums(x.device, self._half):
            add_upper(self._hessian, x * g.sum(1, keepdim=True).sqrt())
            if self._calibrated is not None:
                add_upper(self._calibrated, x * root.flatten(0, -2))
        self.tokens += len(x)

    @property
    def calibrated(self) -> Tensor:
        """The Hessian [K, K] as calibration sums it up."""
        assert self._calibrated is not None
        return mirrored(self._calibrated) / self.tokens

    @property
    def importance(self) -> Tensor:
        """G [N]."""
        return self.squares / self.tokens

    @property
    def weighted(self) -> Tensor:
        """H [K, K]."""
        return mirrored(self._hessian) / self.squares.sum().clamp(min=1e-38)


def backward_stats(
    model: CalibrationModel,
    tokens: Tensor,
    *,
    measure: Measure = "fisher",
    batch: int = 4,
    seed: int = 0,
    half: bool = True,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Block, dict[str, GradientStats]]]:
    """Run forward through all layers, then yield them from last to first, with the stats of their linears."""
    device = torch.device(device)
    rng = torch.Generator(device).manual_seed(seed)

    def through(block: Block, x: Tensor) -> Tensor:
        with half_products(device, half):
            return block(x).float()

    states: list[Tensor] = []
    with torch.no_grad():
        x = model.embed(tokens.to(device)).float()
        for i in range(model.layers):
            states.append(x)
            block = model.block(i)
            x = torch.cat([through(block, part) for part in torch.split(x, batch)])
            if progress:
                progress(i + 1)
    pull = _sampled_loss_gradient(model, x, rng, half) if measure == "fisher" else torch.empty(0)
    after = x
    for i in reversed(range(model.layers)):
        block, x = model.block(i), states.pop()
        if measure == "residual":
            signs = torch.randint(0, 2, after.shape, generator=rng, device=device).float() * 2 - 1
            pull = signs / after.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
        root = after.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
        first = {stage[0] for stage in block.stages()}
        linears = block.linears().items()
        stats = {name: GradientStats(linear, half, calibrated=name in first) for name, linear in linears}
        parts = zip(torch.split(x, batch), torch.split(pull, batch), torch.split(root, batch), strict=True)
        pull, after = torch.cat([_back(block, through, *part, stats) for part in parts]), x
        yield block, stats


def _sampled_loss_gradient(model: CalibrationModel, x: Tensor, rng: torch.Generator, half: bool) -> Tensor:
    """Return the gradient of the summed loss at the last hidden states, next tokens sampled from the model."""
    parts = []
    for part in torch.split(x.flatten(0, 1), _CHUNK):
        here = part.detach().requires_grad_()
        with half_products(x.device, half):
            logits = model.logits(model.finish(here)).float()
        sampled = sample_tokens(logits.detach().softmax(-1), rng)
        parts.append(torch.autograd.grad(F.cross_entropy(logits, sampled, reduction="sum"), here)[0])
    return torch.cat(parts).reshape(x.shape)


def sample_tokens(chances: Tensor, rng: torch.Generator) -> Tensor:
    """Sample one of V by the chances [T, V]: one random number a row, where torch.multinomial takes V."""
    sums = chances.cumsum(-1)
    at = torch.rand(len(sums), 1, generator=rng, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True)[:, 0].clamp(max=sums.shape[1] - 1)


def _back(
    block: Block,
    through: Callable[[Block, Tensor], Tensor],
    x: Tensor,
    pull: Tensor,
    root: Tensor,
    stats: dict[str, GradientStats],
) -> Tensor:
    """Backpropagate through a block, collecting the stats of its linears; return the gradient at its input."""
    x = x.detach().requires_grad_()

    def hook(linear: TrainableLinear, given: tuple[Tensor], out: Tensor) -> None:
        seen = given[0].detach()
        out.register_hook(lambda gradient: stats[linear.name].add(seen, gradient, root))  # type: ignore[no-untyped-call]

    handles = [linear.register_forward_hook(hook) for linear in block.linears().values()]
    try:
        with torch.enable_grad():
            out = through(block, x)
    finally:
        for handle in handles:
            handle.remove()
    return torch.autograd.grad(out, x, pull)[0]


@torch.no_grad()
def _stage(
    stage: Sequence[tuple[TrainableLinear, GradientStats]],
    settings: Sequence[Setting],
    weight_rows: int,
    rng: torch.Generator,
) -> list[Sensitivity]:
    """Predict for linears that share an input: their rows go through one pass of error feedback."""
    by = factor(stage[0][1].calibrated, 0.01, act_order=True)
    picks = [_pick(stats.importance, weight_rows, rng) for _, stats in stage]
    target = torch.cat([require_finite(m.weight)[rows] for (m, _), (rows, _) in zip(stage, picks, strict=True)])
    grids = [s for s in settings if isinstance(s, BitConfig)]
    others = [s for s in settings if not isinstance(s, BitConfig)]
    counts = [len(rows) for rows, _ in picks]
    changes = zip(torch.split(fast_errors(target, by, grids), counts, 1), torch.split(target, counts), strict=True)
    found = []
    for (linear, stats), (change, own), (_, share) in zip(stage, changes, picks, strict=True):
        change = torch.cat([change, *(s.row_errors(own, by)[None] for s in others)])
        errors = ((change @ stats.weighted) * change).sum(-1).double()  # [settings, rows]
        losses = (0.5 * errors @ share.double()).clamp(min=0).tolist()
        found.append(Sensitivity(linear.name, _shape(linear), dict(zip([*grids, *others], losses, strict=True))))
    return found


def _shape(m: TrainableLinear) -> tuple[int, int]:
    N, K = m.weight.shape
    return N, K


def _pick(G: Tensor, limit: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sampled rows and the weight of each: sampled by G, since  sum G e = (sum G) E_G[e]."""
    N = len(G)
    if limit >= N or not G.sum() > 0:
        return torch.arange(N, device=G.device), G
    rows = torch.multinomial(G.cpu().double(), limit, replacement=True, generator=rng).to(G.device)
    return rows, (G.sum() / limit).expand(limit)
