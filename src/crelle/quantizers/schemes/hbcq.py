"""Binary coding that minimises the layer's output error.

    1. scales   alternating least squares as in crelle.quantizers.schemes.bcq, each weight weighted by its column's
    importance
    2. codes    one pass with error feedback on the 2^P levels of each group (crelle.quantizers.solvers.gptq_solver)
    3. solve    least squares for alpha and z of a whole row
    4. refine   rounds of coordinate descent over the codes, and step 3 again
Scales are rounded to f16 before codes are chosen for them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import Spec
from crelle.formats.bcq import BCQTensor
from crelle.quantizers.base import Group
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.bcq import binary_scales, signs
from crelle.quantizers.schemes.hessian_base import HessianConfig
from crelle.quantizers.solvers.gptq_solver import DAMP, Fit, LDLFactor, Levels, descend, feedback, improve, solve
from crelle.quantizers.solvers.grouping import from_groups, importances, storable, to_groups


@dataclass(frozen=True, slots=True)
class HBCQ(HessianConfig):
    """Binary coding by the layer's output error."""

    scheme: ClassVar[str] = "hbcq"
    searchable: ClassVar[bool] = True
    bits: int = 3
    group: Group = 128
    rounds: int = 20  # of the alternating start
    bias: bool = True  # whether there is a z per group
    feedback: bool = True
    act_order: bool = True
    damp: float = DAMP
    solve: bool = True  # whether the scales of a row are solved at once
    refine: int = 1
    target: bool = True
    guidance: float = 0.0

    def __post_init__(self) -> None:
        HessianConfig.__post_init__(self)
        if self.rounds < 0:
            raise SchemeError(f"rounds must be at least 0 (greedy), got {self.rounds}")

    def fit(self, weight: Tensor, stats: Stats | None = None) -> BCQTensor:
        """Return the weight [N, K] as P planes with their scales."""
        fit = self.solution(weight, stats)
        codes, alpha = _canonical(fit, self.bits)
        z = storable(fit.levels.scales[..., self.bits]) if self.bias else None
        return BCQTensor.from_codes(codes, storable(alpha).movedim(-1, 0), z, fit.levels.group)

    def format_settings(self) -> Spec:
        return {"format": BCQTensor.format, "bias": self.bias}

    def fit_rows(self, target: Tensor, hessian: Tensor, by: LDLFactor) -> Fit:
        levels = self._levels(target, by.cost, self.group_for(target.shape[1]))
        alone = by._replace(
            mix=torch.zeros_like(by.mix), kept={}
        )  # no error propagation: each weight takes the nearest level
        fit = feedback(target, by if self.feedback else alone, levels)
        scales = [solve] if self.solve else []
        return improve(target, hessian, by.damped, fit, scales + [descend, *scales] * self.refine)

    def _levels(self, w: Tensor, cost: Tensor, group: int) -> Levels:
        g, _ = to_groups(w, group)
        N, C, _ = g.shape
        h = importances(cost, group)
        alpha, z = binary_scales(g.flatten(0, 1), h, self.bits, self.rounds, self.bias)
        book = signs(self.bits, w.device)
        if self.bias:
            book = torch.nn.functional.pad(book, (0, 1), value=1.0)
            alpha = torch.cat([alpha, z[:, None]], 1)
        return Levels(book, storable(alpha).float().reshape(N, C, -1), group)


def _canonical(fit: Fit, P: int) -> tuple[Tensor, Tensor]:
    """Return codes and alphas of the same weights with the alphas positive and descending: plane 0 matters most."""
    codes, levels = fit
    alpha = levels.scales[..., :P]
    ordered, order = alpha.abs().sort(stable=True, dim=-1, descending=True)
    grouped, _ = to_groups(codes, levels.group)  # [N, C, G]
    result = torch.zeros_like(grouped)
    for p in range(P):
        plane = order[..., p : p + 1]  # which plane is now at place p
        bit = (grouped >> (P - 1 - plane)) & 1
        negative = alpha.gather(-1, plane) < 0
        result |= ((bit ^ negative) << (P - 1 - p)).to(torch.uint8)
    return from_groups(result, codes.shape[1]), ordered
