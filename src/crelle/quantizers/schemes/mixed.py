"""2 and 4 bits in one matrix, with second-order scales and sparse outliers (format: crelle.formats.mixed).

    1. groups    sensitivity of each group of input channels, S = Σ w² / [H⁻¹]², ranked within the matrix: the most
                 sensitive share `four` of them gets 4 bits
    2. outliers  the weights with the greatest error at 2 bits times sensitivity, a share `outliers` of all weights,
                 from 2-bit groups only
    3. scales    per group the clipped range with the least weighted error, then quantized to 4 bits within 16 outputs
    4. codes     one pass with error feedback through both precisions; an outlier leaves no error
    5. refine    rounds of coordinate descent over codes, scale codes, second-order scales and row scales, each set to
                 the best value that can be stored, given all others

    6. training  tune=short and tune=full: weights, second-order scales, row scales and outliers, under the choices of 1
                 and 2 (crelle.quantizers.training.mixed_ste)

For comparisons: `rank` = range (of the group's weights), hessian (without the weights) or random;
`exclusive=false` takes the outliers from all groups.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import Spec
from crelle.formats.mixed import BLOCK, GROUPS, MixedTensor
from crelle.formats.packing.mixed import MixedCodes, Packing, can_be_aligned, scale_widths
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.hessian_base import HessianConfig
from crelle.quantizers.schemes.trained import Train, TrainedConfig, Tune
from crelle.quantizers.solvers.gptq_solver import LDLFactor, inverse_diagonal
from crelle.quantizers.solvers.grouping import row_slabs, storable, to_groups
from crelle.quantizers.solvers.mixed_solver import MixedFit, descend, feedback, search_grids, second_order, tune_scales


class Assignment(NamedTuple):
    """Which groups have 4 bits, and which weights are outliers."""

    four: Tensor  # bool [C]
    outliers: Tensor  # bool [N, K]


@dataclass(frozen=True, slots=True)
class Mixed(TrainedConfig, HessianConfig):
    """Sensitive groups of input channels at 4 bits, the others at 2, outliers at 16."""

    scheme: ClassVar[str] = "mixed"
    bits: ClassVar[int] = 2  # type: ignore[misc]  # of most groups
    group: int = 16
    four: float = 0.25
    outliers: float = 0.002
    rank: Literal["sensitivity", "range", "hessian", "random"] = "sensitivity"
    exclusive: bool = True
    act_order: bool = True
    damp: float = 0.2  # less fits the calibration text, not others: worse on a test text even with 128k tokens of it
    refine: int = 2
    target: bool = True
    guidance: float = 0.0
    tune: Tune = "none"
    steps: int = 64
    rate: float = 0.0
    end: int = -1
    own: int = -1
    train: Train = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        HessianConfig.__post_init__(self)
        self.check_training()
        if self.group not in GROUPS:
            raise SchemeError(f"group must be one of {', '.join(map(str, GROUPS))}, got {self.group}")
        if not 0 <= self.four <= 1:
            raise SchemeError(f"four (the share of 4-bit groups) must be 0 to 1, got {self.four}")
        if not 0 <= self.outliers <= 0.015:
            raise SchemeError(f"outliers (a share of the weights) must be 0 to 0.015, got {self.outliers}")

    @property
    def bits_for_rate(self) -> float:
        return 2 + 2 * self.four

    def fit(self, weight: Tensor, stats: Stats | None = None) -> MixedTensor:
        """Return the weight [N, K] in 2, 4 and 16 bits."""
        N, K = weight.shape
        target, _, by = self.wanted(weight, stats)
        chosen = self.assign(target, by)
        slabs = row_slabs(N, K, target.device, BLOCK)
        fits = [self.fit_rows_of(target[rows], by, Assignment(chosen.four, chosen.outliers[rows])) for rows in slabs]
        return _stored((N, K), chosen.four, fits)

    def assign(self, target: Tensor, by: LDLFactor) -> Assignment:
        """Choose the 4-bit groups and the outliers."""
        (N, K), G = target.shape, self.group
        weight = inverse_diagonal(by).reciprocal().square()  # 1 / [H⁻¹]²
        four = self._four(target, weight)
        outliers = torch.zeros(N, K, dtype=torch.bool, device=target.device)
        if count := round(self.outliers * N * K):
            error = _error_at_2_bits(target, G) * weight
            if self.exclusive:
                error = error * ~four.repeat_interleave(G)[:K]
            outliers.view(-1)[error.flatten().topk(count).indices] = True
        return Assignment(four, outliers)

    def _four(self, target: Tensor, weight: Tensor) -> Tensor:
        C, K = self.counts(target.shape[1])[0], target.shape[1]
        grouped, _ = to_groups(target, self.group)  # [N, C, G]
        if self.rank == "random":
            score = torch.rand(C, generator=torch.Generator().manual_seed(K)).to(target.device)
        elif self.rank == "range":
            score = (grouped.amax(-1) - grouped.amin(-1)).square().sum(0)
        else:
            each = weight if self.rank == "hessian" else weight * target.square().sum(0)
            score = to_groups(each[None], self.group)[0][0].sum(-1)
        four = torch.zeros(C, dtype=torch.bool, device=target.device)
        four[score.topk(self.counts(K)[1]).indices] = True
        return four

    def row_errors(self, weight: Tensor, rows: Tensor, by: LDLFactor) -> Tensor:
        """Return the error W - Ŵ of some rows of a weight [N, K], without refinement: a fast estimate, for a search."""
        chosen, target = self.assign(weight, by), weight[rows]
        fit = replace(self, refine=0).fit_rows_of(target, by, Assignment(chosen.four, chosen.outliers[rows]))
        return target - fit.weight()

    def counts(self, K: int) -> tuple[int, int]:
        """Return how many groups K inputs have, and how many of them are 4-bit."""
        C = -(-K // self.group)
        return C, round(self.four * C)

    def fit_rows_of(self, target: Tensor, by: LDLFactor, chosen: Assignment) -> MixedFit:
        """Fit some rows, a whole number of blocks of them but for the last."""
        fit = feedback(target, by, self.start(target, by.cost, chosen))
        for _ in range(self.refine):
            fit = tune_scales(target, by.damped, fit)
            fit = descend(target, by.damped, fit)
        return tune_scales(target, by.damped, fit) if self.refine else fit

    def start(self, target: Tensor, cost: Tensor, chosen: Assignment) -> MixedFit:
        """Return the grids with the least weighted error, and no codes yet."""
        (N, K), G = target.shape, self.group
        C, C4 = self.counts(K)
        column4 = chosen.four.repeat_interleave(G)[:K]
        importance = cost.clamp(min=float(cost.mean()) * 1e-6) * ~chosen.outliers  # [N, K]
        two, importance2 = (t[:, ~column4] for t in (target, importance))
        weighted, _ = to_groups(importance2, G)
        # A group of nothing but outliers keeps them, so that it has a range.
        empty = (weighted > 0).sum(-1, keepdim=True) == 0
        scale, zero = search_grids(two, torch.where(empty, 1.0, weighted).flatten(1)[:, : two.shape[1]], G)
        packing: Packing = "aligned" if can_be_aligned(G, C - C4, C4) else "general"
        widths = torch.tensor(scale_widths(packing, C - C4), device=target.device)
        second = second_order(scale, weighted.sum(-1), widths)
        row_scale, row_zero = torch.ones(N, device=target.device), torch.zeros(N, device=target.device)
        if C4:
            here = importance[:, column4]
            none = (here > 0).sum(-1, keepdim=True) == 0
            row_scale, row_zero = GPTQ(bits=4, group="row").grids(target[:, column4], torch.where(none, 1.0, here))
        codes = torch.zeros_like(target, dtype=torch.uint8)
        return MixedFit(chosen.four, chosen.outliers, G, zero, second, row_scale, row_zero, codes, target)

    def storage(self, shape: tuple[int, int]) -> Spec:
        N, K = shape
        C, C4 = self.counts(K)
        packing = "aligned" if can_be_aligned(self.group, C - C4, C4) else "general"
        sizes = {"group": self.group, "packing": packing, "block": BLOCK, "four": C4}
        return {"format": MixedTensor.format, "shape": [N, K], **sizes, "outliers": round(self.outliers * N * K)}


def _error_at_2_bits(target: Tensor, G: int) -> Tensor:
    """Return the squared error of each weight, rounded to the nearest of four levels over its group's range."""
    grouped, _ = to_groups(target, G)
    low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 3).clamp(min=1e-12)
    zero = (-low / step).round()
    error = grouped - ((grouped / step + zero).round().clamp(0, 3) - zero) * step
    share = (grouped.abs() / grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12)) ** 8
    # An outlier leaves its group's grid, so what it costs the others by widening the range counts for it too.
    return error.square().add(step.square() / 12 * share).flatten(1)[:, : target.shape[1]]


def _stored(shape: tuple[int, int], four: Tensor, fits: list[MixedFit]) -> MixedTensor:
    """Pack what was fitted."""
    codes, _ = to_groups(torch.cat([f.codes for f in fits]), fits[0].group)  # [N, C, G]
    second = [f.second for f in fits]
    outliers = torch.cat([torch.where(f.outliers, f.values - f.dense(), 0.0) for f in fits])
    parts = MixedCodes(
        codes[:, ~four],
        codes[:, four],
        torch.cat([s.codes for s in second]).to(torch.uint8),
        (2 * torch.cat([f.zero for f in fits]) - 1).to(torch.uint8),
        torch.cat([s.zero for s in second]).to(torch.uint8),
    )
    row = None
    if four.any():
        row = storable(torch.cat([f.row_scale for f in fits])), torch.cat([f.row_zero for f in fits]).to(torch.uint8)
    scale = storable(torch.cat([s.scale for s in second]))
    return MixedTensor.from_codes(shape, four.to(torch.uint8), parts, scale, row, outliers)
