"""Base of the quantizers that use the Hessian of a layer's inputs: settings, and from a weight to codes and levels."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.quantizers.base import GroupedConfig, check_guidance
from crelle.quantizers.calibration.stats import Stats, require_stats
from crelle.quantizers.solvers.gptq_solver import Fit, LDLFactor, Levels, factor, solve_damped
from crelle.quantizers.solvers.grouping import require_finite, row_slabs
from crelle.quantizers.stage_times import FACTOR, TARGET, timed


class HessianConfig(GroupedConfig):
    """Base of the configs that minimise the error of a layer's output on its calibration inputs."""

    __slots__ = ()
    calibrated: ClassVar[bool] = True
    act_order: bool  # columns with the largest activations are rounded first
    damp: float  # of the Hessian's mean diagonal, added to its diagonal
    refine: int  # rounds of coordinate descent and solving after the feedback
    target: bool  # compensate the error of the layers before too, where that is known
    guidance: float  # exponent of the tokens' weights by the loss; 0: none (crelle.quantizers.calibration.guidance)

    def __post_init__(self) -> None:
        GroupedConfig.__post_init__(self)
        check_hessian_settings(self)

    def solution(self, weight: Tensor, stats: Stats | None) -> Fit:
        """Return codes and levels for a weight [N, K]."""
        N, K = weight.shape
        target, hessian, by = self.wanted(weight, stats)
        fits = [self.fit_rows(target[rows], hessian, by) for rows in row_slabs(N, K, target.device)]
        shifts = [f.levels.shift for f in fits if f.levels.shift is not None]
        levels = Levels(
            book=fits[0].levels.book,
            scales=torch.cat([f.levels.scales for f in fits]),
            group=self.group_for(K),
            shift=torch.cat(shifts) if shifts else None,
        )
        return Fit(torch.cat([f.codes for f in fits]), levels)

    def wanted(self, weight: Tensor, stats: Stats | None) -> tuple[Tensor, Tensor, LDLFactor]:
        """Return the target weight [N, K], the Hessian and its factorization; raises on stats that do not fit."""
        K = weight.shape[1]
        stats = require_stats(stats, self.scheme, K)
        weight = require_finite(weight)
        key = self.damp, self.act_order
        if key not in stats.kept:
            with timed(FACTOR):
                stats.kept[key] = factor(stats.hessian, self.damp, act_order=self.act_order)
        by: LDLFactor = stats.kept[key]
        with timed(TARGET):
            target = stats.target(weight, self.damp, partial(solve_damped, by)) if self.target else weight
        return target, stats.hessian, by

    def fit_rows(self, target: Tensor, hessian: Tensor, by: LDLFactor) -> Fit:
        """Return codes and levels for some rows of the target weight."""
        raise NotImplementedError


def check_hessian_settings(config: HessianConfig) -> None:
    """Refuse settings that no config of this kind can have."""
    if not 0 <= config.damp <= 1:
        raise SchemeError(f"damp must be 0 to 1, got {config.damp}")
    check_guidance(config.guidance)
    if config.refine < 0:
        raise SchemeError(f"refine must be at least 0, got {config.refine}")
