"""Sensitivity of the loss to quantizing one matrix at given bits and group size: the input of `search`.

Replace a weight W by W - D. To second order the mean loss per token rises by

    1/2 sum_n G_n (D H Dᵀ)_nn        G_n = E[g_tn²]        H = E[|g_t|² x_t x_tᵀ] / E[|g_t|²]

x_t are the linear's inputs, g_t the gradient at its outputs (crelle.quantizers.search.gradient_stats). Tokens are
weighted by their gradients, per linear: the few with huge activations matter little to most linears, and much to keys
and values, which all later tokens attend to.

D is computed for some rows of each matrix, with all settings in one pass of error feedback, its Hessian that of
crelle.quantizers.calibration.calibrate (tokens weighted by 1/|y_t|², y the layer's output). The rows:

    are sampled with probability p_n in proportion to what they will probably lose: G_n times the squared ranges of
    their groups, weighted as error feedback does. Each then counts 1/p_n times. Their spread says how far off the sum
    is: while that is more than a tenth, more rows are taken, up to four times as many.
D is fitted to the very tokens that tell its error, to which it looks smaller. With error feedback the error is a sum
over columns of what a regression on those before leaves, in sample too little by the factor 1 - columns/T, T the
tokens: 1 - d/2T on average, d = tr(H (H + λ)⁻¹) the inputs that the damping λ leaves free. Losses are divided by it.
Settings between others are interpolated (crelle.quantizers.search.interpolate). Passes, fits and memory grow in
proportion to the weights, but for the factorizations of K inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.quantizers.base import BitConfig
from crelle.quantizers.calibration.layer_api import CalibrationModel, Progress, TrainableLinear
from crelle.quantizers.search.gradient_stats import GradientStats, Measure, backward_stats
from crelle.quantizers.search.interpolate import fill_in, to_measure
from crelle.quantizers.search.search_memory import SearchMemory, search_memory
from crelle.quantizers.solvers.fast_error import Setting, fast_errors
from crelle.quantizers.solvers.gptq_solver import DAMP, LDLFactor, factor, inverse_diagonal
from crelle.quantizers.solvers.grouping import require_finite, to_groups
from crelle.quantizers.stage_times import SEARCH_FITS, timed

GROUPS = (32, 64, 96, 128, 192, 384)  # larger ones look good to the prediction, and are not
_TOKENS = 4096  # to measure on, or more where a matrix has more inputs
_UNSURE = 0.1  # relative standard error of a loss at which more rows are taken
_PORTIONS = 4  # at most
_RANGE = 64  # inputs over whose range the loss of a row is guessed
_LEAST = 0.2  # of an error that is seen in sample: with fewer tokens than inputs the factor would be 0
_COPIES = 32  # bytes of a fit for each weight and setting


def candidates(target_bits: float) -> tuple[BitConfig, ...]:
    """Return the settings to measure for a target: a good plan at 2.3 bits also has matrices of 4."""
    least = max(1, min(6, int(target_bits - 0.15)))  # the scales take their share
    bits = range(max(1 if least == 1 else 2, least - 1), least + 3)
    return tuple(BitConfig(b, group) for b in bits for group in GROUPS)


CANDIDATES = candidates(2.35)


def planning_rows(model: CalibrationModel, tokens: Tensor) -> Tensor:
    """Return the calibration sequences that sensitivities are measured on.

    They have as many tokens as the widest matrix has inputs, so that its Hessian can have full rank, and 4096 at least.
    """
    wanted = max(_TOKENS, *(K for _, K in model.shapes()[0]))
    return tokens[: max(1, -(-wanted // tokens.shape[1]))]


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
    weight_rows: int = 48,  # of each matrix, at first
    seed: int = 0,
    half: bool = True,  # bf16 products, where the machine has them; sums stay f32
    device: torch.device | str = "cpu",
    memory: SearchMemory | int | None = None,  # bytes, or the plan; default: all of a GPU, no bound on a CPU
    progress: Progress | None = None,
) -> list[Sensitivity]:
    """Measure every linear of the model on sequences of token ids [S, T], in execution order.

    Experts that no token was routed to are taken to lose what the others of their layer do on average.
    """
    if len(tokens) == 0:
        raise SchemeError("measuring sensitivities needs at least one calibration sequence")
    device = torch.device(device)
    if not isinstance(memory, SearchMemory):
        memory = search_memory(model, tokens, device, half=half, budget=memory)
    tell = _Told(model.layers, progress)
    rng = torch.Generator().manual_seed(seed)
    stages = backward_stats(
        model, tokens, measure=measure, memory=memory, seed=seed, half=half, device=device, progress=tell.forward
    )
    found: dict[str, Sensitivity] = {}
    order: list[list[str]] = []  # of the modules of each layer, last layer first
    for block, stage, stats in stages:
        if stage == block.stages()[0]:
            order.append(list(block.linears()))
        linears = [(block.linears()[name], stats[name]) for name in stage]
        if linears[0][1].tokens:  # otherwise an expert's
            with timed(SEARCH_FITS):
                found |= {one.module: one for one in _stage(linears, settings, weight_rows, memory.fits, rng)}
        if stage == block.stages()[-1]:
            tell.backward()
    return [found.get(name) or _average(name, layer, found) for layer in reversed(order) for name in layer]


def _average(module: str, layer: Sequence[str], found: Mapping[str, Sensitivity]) -> Sensitivity:
    """Return the mean sensitivity of the same matrix of a layer's other experts; some have tokens."""
    kind = module.rpartition(".")[2]
    others = [found[n] for n in layer if n in found and n.rpartition(".")[2] == kind]
    losses = {s: sum(one.losses[s] for one in others) / len(others) for s in others[0].losses}
    return Sensitivity(module, others[0].shape, losses)


class _Told:
    """Progress, in units of a layer forward; backward and fits take about three, the output head as much as a layer."""

    def __init__(self, layers: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, 4 * layers + 1, progress

    def forward(self, what: str) -> None:
        self._tell(1, what)

    def backward(self) -> None:
        self._tell(3, "backward")

    def _tell(self, units: int, what: str) -> None:
        self._done += units
        if self._progress:
            self._progress(self._done, self._total, what)


class _Matrix:
    """The estimate of one matrix's losses from more and more of its rows."""

    def __init__(self, linear: TrainableLinear, stats: GradientStats, by: LDLFactor) -> None:
        self.weight = require_finite(linear.weight)
        self._name, self._hessian, self._importance = linear.name, stats.take_weighted(), stats.importance()
        self._chances = (self._importance * _guess(self.weight, by.cost)).double().cpu()
        self._sums: Tensor | float = 0.0  # of the losses that portions of rows predict
        self._variance, self._portions, self._complete = 0.0, 0, False
        self._rows, self._inclusion = torch.empty(0), torch.empty(0)

    def sample(self, limit: int, rng: torch.Generator) -> Tensor:
        """Choose the rows of the next portion."""
        rows, self._inclusion = sample_rows(self._chances, limit, rng)
        self._rows = rows.to(self.weight.device)
        return self._rows

    def losses(self, change: Tensor) -> Tensor:
        """Return what changes [settings, R, K] of the rows add to the loss, f64 [settings, R] on the CPU."""
        flat = change.reshape(-1, change.shape[-1]).contiguous()  # a product of strided rows is seven times as slow
        errors = ((flat @ self._hessian) * flat).sum(-1).double().reshape(change.shape[:2])
        return (0.5 * errors * self._importance[self._rows].double()).clamp(min=0).cpu()

    def add(self, losses: Tensor) -> None:
        """Take the losses [settings, R] of the portion."""
        each = losses / self._inclusion
        self._sums = self._sums + each.sum(-1)
        self._portions += 1
        of_worst = each[each.sum(-1).argmax()][self._inclusion < 1]
        self._complete = len(of_worst) == 0
        if len(of_worst) > 1:
            self._variance += float(of_worst.var() * len(of_worst))

    @property
    def unsure(self) -> bool:
        """Whether the standard error of the setting that loses most is too large."""
        assert isinstance(self._sums, Tensor)
        return not self._complete and self._variance**0.5 > _UNSURE * float(self._sums.max())

    def sensitivity(self, measured: Sequence[Setting], settings: Sequence[Setting], in_sample: float) -> Sensitivity:
        N, K = self.weight.shape
        assert isinstance(self._sums, Tensor)
        losses = dict(zip(measured, (self._sums / (self._portions * in_sample)).tolist(), strict=True))
        every = fill_in(losses, {_in_row(s, K) for s in settings})
        return Sensitivity(self._name, (N, K), {s: every[_in_row(s, K)] for s in settings})


def _in_row(s: Setting, K: int) -> Setting:
    """Return a setting as it is in rows of K inputs: groups are never longer."""
    return BitConfig(s.bits, s.group_for(K)) if isinstance(s, BitConfig) else s


@torch.no_grad()
def _stage(
    stage: Sequence[tuple[TrainableLinear, GradientStats]],
    settings: Sequence[Setting],
    weight_rows: int,
    fits: int,
    rng: torch.Generator,
) -> list[Sensitivity]:
    """Predict for linears that share an input: their rows go through one pass of error feedback."""
    hessian, T = stage[0][1].take_calibrated(), stage[0][1].tokens
    by = factor(hessian, DAMP, act_order=True)
    K, in_sample = len(by.order), _in_sample(hessian, by, T)
    del hessian
    taken = to_measure(dict.fromkeys(_in_row(s, K) for s in settings))
    grids, others = [s for s in taken if isinstance(s, BitConfig)], [s for s in taken if not isinstance(s, BitConfig)]
    matrices = [_Matrix(linear, stats, by) for linear, stats in stage]
    left = matrices
    for _ in range(_PORTIONS):
        rows = [m.sample(weight_rows, rng) for m in left]
        target = torch.cat([m.weight[r] for m, r in zip(left, rows, strict=True)])
        at_once = max(1, fits // (_COPIES * target.numel()))
        found: list[list[Tensor]] = [[] for _ in left]
        for begin in range(0, len(grids), at_once):
            changes = fast_errors(target, by, grids[begin : begin + at_once])
            for m, change, losses in zip(left, torch.split(changes, [len(r) for r in rows], 1), found, strict=True):
                losses.append(m.losses(change))
        for m, some, losses in zip(left, rows, found, strict=True):
            if others:
                losses.append(m.losses(torch.stack([s.row_errors(m.weight, some, by) for s in others])))
            m.add(torch.cat(losses))
        left = [m for m in left if m.unsure]
        if not left:
            break
    return [m.sensitivity([*grids, *others], settings, in_sample) for m in matrices]


def _in_sample(hessian: Tensor, by: LDLFactor, T: int) -> float:
    """Return the factor by which errors look smaller to the T tokens that they were fitted to."""
    damping = float((by.damped.diagonal() - hessian.diagonal()).double().mean())
    free = len(hessian) - damping * float(inverse_diagonal(by).double().sum())
    return max(_LEAST, 1 - free / (2 * max(1, T)))


def _guess(weight: Tensor, cost: Tensor) -> Tensor:
    """Return a guess [N] at the errors of the rows, up to a factor: of roundings as wide as their groups' ranges."""
    group = min(_RANGE, weight.shape[1])
    grouped, _ = to_groups(weight, group)  # [N, C, G]; padding widens the last range by 0 at most
    ranges = (grouped.amax(-1) - grouped.amin(-1)).square()
    guess = ranges @ to_groups(cost[None], group)[0][0].sum(-1)
    return guess + 0.25 * guess.mean()  # a row can lose more than its ranges let guess


def sample_rows(chances: Tensor, limit: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample `limit` different rows; return them and the probability with which each is among them.

    Probabilities are in proportion to the chances f64 [N], but none above 1: systematic sampling, which varies less
    than independent draws.
    """
    N = len(chances)
    if limit >= N or not chances.sum() > 0:
        return torch.arange(N), torch.ones(N, dtype=torch.float64)
    inclusion = torch.zeros_like(chances)
    certain = torch.zeros(N, dtype=torch.bool)
    while True:  # rows that would be in more than once are in once, and the others share what is left
        rest = chances.masked_fill(certain, 0.0)
        inclusion = torch.where(certain, 1.0, rest * ((limit - int(certain.sum())) / rest.sum().clamp(min=1e-300)))
        over = (inclusion > 1) & ~certain
        if not over.any():
            break
        certain |= over
    ends = inclusion.cumsum(0)
    places = torch.arange(limit) + torch.rand(1, generator=rng, dtype=torch.float64)
    rows = torch.searchsorted(ends, places[places < ends[-1]], right=True)
    return rows, inclusion[rows]
