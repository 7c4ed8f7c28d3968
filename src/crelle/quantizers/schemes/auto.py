"""The recommended recipe: `auto:bits=X` is the best model we can make in at most X bits per weight.

    1. mixed precision           bits and group of every matrix, on affine grids, or 2 and 4 bits in one matrix
                                 (crelle.quantizers.search.bit_allocation, crelle.quantizers.schemes.mixed);
                                 prefer=quality: affine grids or trellis codes (crelle.quantizers.schemes.trellis)
    2. codes                     GPTQ that also compensates the error of its inputs, refined
    (crelle.quantizers.schemes.gptq)
    3. block by block            weights, scales and lows trained with an STE (crelle.quantizers.training.blockwise)
    4. tune=full                 all of them end to end against the full-precision model
    (crelle.quantizers.training.blockwise)

Which of these steps are taken, and how many, is the effort's to say (crelle.quantize_job.effort).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor, Spec, format_of
from crelle.formats.trellis import BITS
from crelle.quantizers.base import GroupedConfig, check_guidance
from crelle.quantizers.calibration.layer_api import CalibrationModel, Progress
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.mixed import Mixed
from crelle.quantizers.schemes.trained import Train, TrainedConfig, Tune
from crelle.quantizers.schemes.trellis import Trellis
from crelle.quantizers.search.bit_allocation import ParetoFront
from crelle.quantizers.search.sensitivity import candidates, planning_rows, sensitivities
from crelle.quantizers.solvers.fast_error import Setting

# Matrices of 2- and 4-bit groups, 2.5 to 3.6 bits per weight: less loss there than affine grids, whose f16 scales for
# small groups are a good part of the bits.
MIXED = tuple(Mixed(group=16, four=four, outliers=0) for four in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7))
TRELLIS = tuple(Trellis(bits=bits) for bits in BITS)
_GROUPS = (32, 40, 48, 64, 72, 80, 96, 112, 128, 144, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class Auto(TrainedConfig, GroupedConfig):
    """At most `bits` per weight, every scale counted."""

    scheme: ClassVar[str] = "auto"
    calibrated: ClassVar[bool] = True
    bits: float = 3.35  # type: ignore[assignment]
    tune: Tune = "short"
    search: bool = True  # bits and group per matrix, by measured sensitivity; otherwise the same everywhere
    steps: int = 64
    rate: float = 0.0
    end: int = -1
    own: int = -1
    train: Train = "all"
    seed: int = 0
    guidance: float = 0.0
    prefer: Literal["speed", "quality"] = "speed"  # quality: trellis codes too, which are slow to find and to multiply
    group: ClassVar[int] = 0  # type: ignore[misc]  # chosen per matrix

    def __post_init__(self) -> None:
        if not 1.1 <= self.bits <= 8.5:
            raise SchemeError(f"in auto, bits must be 1.1 to 8.5, got {self.bits}")
        self.check_training()
        check_guidance(self.guidance)

    @property
    def bits_for_rate(self) -> float:
        return self.bits

    def grid_for(self, K: int) -> GPTQ:
        """Return the default for K inputs: as many bits as fit, and the smallest group that then fits."""
        for bits in range(min(8, int(self.bits)), 0, -1):
            for group in (*(g for g in _GROUPS if g <= K), K):
                if bits + 32 * -(-K // group) / K <= self.bits:
                    return GPTQ(bits=bits, group=group, free=True, guidance=self.guidance)
        raise SchemeError(f"{self.bits} bits per weight are too few for a row of {K} inputs")

    def default_for(self, shape: tuple[int, int]) -> GPTQ | Trellis:
        """Return what a matrix [N, K] gets without the search: as many bits as fit."""
        if self.prefer == "quality" and self.bits < max(BITS) + 1:
            for one in reversed(TRELLIS):
                spec = one.storage(shape)
                if format_of(spec).row_bits(spec) <= self.bits * shape[1]:
                    return replace(one, guidance=self.guidance)
        return self.grid_for(shape[1])

    def plan(
        self,
        model: CalibrationModel,
        tokens: Tensor,
        device: torch.device,
        progress: Progress | None,
        memory: int | None = None,
    ) -> dict[str, str]:
        """Return the scheme of every matrix, by module; empty where there is nothing to choose.

        Measured on some of the calibration sequences [S, T]; memory: bytes of the device that may be used.
        """
        if not self.search:
            return {}
        rows = planning_rows(model, tokens)
        measured = sensitivities(
            model, rows, self.settings(), device=device, seed=self.seed, memory=memory, progress=progress
        )
        front = ParetoFront(measured, recipe=GPTQ(free=True, guidance=self.guidance))
        return front.at(self.bits).overrides if front.least_bits <= self.bits else {}

    def settings(self) -> tuple[Setting, ...]:
        """Return what the search chooses from."""
        mixed = tuple(replace(one, guidance=self.guidance) for one in MIXED)
        if self.prefer == "quality":
            trellis = (replace(one, guidance=self.guidance) for one in TRELLIS)
            return (*candidates(self.bits), *trellis)
        return (*candidates(self.bits), *(mixed if 2 <= self.bits <= 4 else ()))

    def fit(self, weight: Tensor, stats: Stats | None = None) -> QuantTensor:
        N, K = weight.shape
        return self.default_for((N, K)).fit(weight, stats)

    def storage(self, shape: tuple[int, int]) -> Spec:
        """The default for every matrix, as without the search."""
        return self.default_for(shape).storage(shape)
