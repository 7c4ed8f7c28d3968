"""Integer weights and activations with 8-bit outlier channels (Atom, arXiv 2310.19102; format: crelle.formats.grouped).

    0. folds        the layer is changed so that it computes the same and its activations lose less: heads of values
                    lie on their principal axes, the largest values of channels are negative (not in the paper;
                    crelle.quantizers.calibration.scale_folds)
    1. order        input channels by the square sum of their activations, ascending: groups hold channels of like size,
                    and the last `outliers` ones have 8 bits
    2. activations  `a` bits per token and group; one clip factor per input, with the least error of the outputs on a
                    sample. Everything after this sees the quantized input, so the weights compensate its error too
                    (`target`), which is not in the paper
                    hadamard: blocks of 128 channels are rotated before they are rounded, weights too (not in the paper)
    3. scales       of weights: per output and group the clip factor with the least weighted error
    4. codes        one pass with error feedback (GPTQ), outliers last: they absorb what the others leave
    5. refine       least squares for the scales, coordinate descent over the codes
    6. training     tune=short and tune=full: weights and scales, through the rounding of weights and activations

levels=2 stores the two-level format (crelle.formats.two_level), at w=4; with a=8 activations have one scale per token,
and one for its outliers: sums of integers are scaled once or twice, not in every group.
`kv` is the KV cache that the checkpoint is meant for; a=16 does not quantize activations. For comparisons:
clip=false, gptq=false (round to nearest), outlier_bits=16, folds=false, hadamard=false.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.activations import BITS, MAX_GROUP, ActivationSpec
from crelle.formats.base import Spec
from crelle.formats.grouped import GroupedTensor
from crelle.formats.kv.pages import KVFormat
from crelle.formats.two_level import TwoLevelTensor
from crelle.quantizers.base import Group
from crelle.quantizers.calibration.calibrate import LayerCalibration
from crelle.quantizers.calibration.scale_folds import fold_scales, rotate_values, signs
from crelle.quantizers.calibration.stats import InputRounding, Stats, require_stats
from crelle.quantizers.schemes.atom_grids import (
    Columns,
    one_level,
    solve_unit,
    store_one_level,
    store_two_levels,
    two_levels,
)
from crelle.quantizers.schemes.hessian_base import HessianConfig
from crelle.quantizers.schemes.trained import Train, TrainedConfig, Tune
from crelle.quantizers.solvers.gptq_solver import Fit, LDLFactor, Levels, descend, factor, feedback, improve, solve
from crelle.quantizers.solvers.grouping import require_finite, row_slabs

_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


class _Input(NamedTuple):
    """What all matrices that read an input share: its columns as stored, and its Hessian in that order."""

    columns: Columns
    perm: Tensor
    activation: ActivationSpec | None
    by: LDLFactor
    hessian: Tensor  # f32, rotated as the activations are, padded

    def rotated(self, w: Tensor) -> Tensor:
        """Return columns in stored order as they are stored."""
        return w if self.activation is None else self.activation.rotated(w)


@dataclass(frozen=True, slots=True)
class Atom(TrainedConfig, HessianConfig):
    """Weights of w bits, activations of a bits, outlier channels of 8."""

    scheme: ClassVar[str] = "atom"
    w: int = 4
    a: int = 4
    kv: str = "16"
    group: Group = 128
    outliers: int = 128
    levels: int = 1
    outlier_bits: int = 8
    clip: bool = True
    gptq: bool = True
    folds: bool = True
    hadamard: bool = True  # of activations below 8 bits, in groups of at most 128
    act_order: ClassVar[bool] = True  # type: ignore[misc]
    damp: float = 0.2
    refine: int = 1
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
        if self.w not in BITS or self.a not in (*BITS, 16):
            raise SchemeError(f"in atom, w must be 3, 4 or 8 and a must be 3, 4, 8 or 16, got {self}")
        if self.outliers < 0 or self.outlier_bits not in (8, 16):
            raise SchemeError("outliers must be at least 0, and outlier_bits 8 or 16")
        if self.levels not in (1, 2) or (self.levels == 2 and (self.w != 4 or self.outlier_bits != 8)):
            raise SchemeError("levels must be 1, or 2 with w=4 and outlier_bits=8")
        KVFormat.parse(self.kv)

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.w

    @property
    def bits_for_rate(self) -> float:
        return self.w

    def __str__(self) -> str:
        # What W, A and KV are is said even where it is the default.
        rest = HessianConfig.__str__(self).partition(":")[2].split(",")
        said = {"w": self.w, "a": self.a, "kv": self.kv, "group": self.group, "outliers": self.outliers}
        others = [item for item in rest if item.partition("=")[0] not in said]
        return f"{self.scheme}:" + ",".join([*(f"{k}={v}" for k, v in said.items()), *others])

    def columns(self, K: int) -> Columns:
        """Return how K inputs lie in groups."""
        n = min(self.outliers, K)
        return Columns(K, max(1, K - n, n) if self.group == "row" else min(self.group, max(K, MAX_GROUP)), n)

    def activation(self, K: int, clip: float = 1.0) -> ActivationSpec | None:
        """Return the activations of K inputs."""
        c = self.columns(K)
        if self.a == 16:
            return None
        group = K if self.levels == 2 and self.a == 8 else c.group
        rotated = self.hadamard and self.a < 8 and c.group <= 128  # what the encoders of GPUs rotate
        return ActivationSpec(self.a, group, c.outliers, self.outlier_bits if c.outliers else 8, clip, rotated)

    def before_layer(self, layer: LayerCalibration) -> dict[str, Tensor]:
        """Make activations easier to round, in ways that cost nothing; with 8 bits or more that gains nothing."""
        changed: dict[str, Tensor] = {}
        if not self.folds or self.a >= 8:
            return changed
        if self.outliers:
            rotate_values(layer)
        for fold in layer.full.folds():
            sample = layer.stats(fold.readers[0]).sample
            assert sample is not None
            found = signs(sample)
            if (found < 0).any():
                changed |= fold_scales(layer, fold, found)
        return changed

    def rounding(self, stats: Stats) -> InputRounding | None:
        """Choose order and clip factor of an input."""
        K = len(stats.hessian)
        if self.a == 16:
            return None
        key = "rounding", self.clip, self.activation(K)
        if key not in stats.kept:
            perm = stats.hessian.diagonal().argsort(stable=True)
            clip = self._activation_clip(stats, perm) if self.clip and self.a < 8 else 1.0
            spec = self.activation(K, clip)
            assert spec is not None
            stats.kept[key] = InputRounding(perm, spec)
        found: InputRounding = stats.kept[key]
        return found

    def _activation_clip(self, stats: Stats, perm: Tensor) -> float:
        if stats.sample is None:
            return 1.0
        x = stats.sample[:, perm]
        readers = None if stats.readers is None else stats.readers[perm][:, perm]
        errors = []
        for clip in _CLIPS:
            spec = self.activation(len(perm), clip)
            assert spec is not None
            change = spec.dequantize(spec.quantize(x)) - x
            errors.append(float(((change if readers is None else change @ readers) * change).sum()))
        return _CLIPS[errors.index(min(errors))]

    def fit(self, weight: Tensor, stats: Stats | None = None) -> GroupedTensor | TwoLevelTensor:
        """Return the weight [N, K] in integers."""
        N, K = weight.shape
        stats = require_stats(stats, self.scheme, K)
        weight = require_finite(weight)
        target = stats.target(weight, self.damp) if self.target and self.gptq else weight
        given = self._input(stats)
        padded = given.columns.pad(given.rotated(target[:, given.perm]))
        fits = [self._fit_rows(padded[rows], given) for rows in row_slabs(N, padded.shape[1], padded.device)]
        store = store_one_level if self.levels == 1 else store_two_levels
        floats = None
        if self.outlier_bits == 16:
            error = padded - torch.cat([f.levels.decode(f.codes) for f in fits])
            floats = target[:, given.perm[given.columns.normal :]] + self._absorbed(error, given)
        return store(fits, given.columns, self.w, given.perm, given.activation, floats)

    def _input(self, stats: Stats) -> _Input:
        key = "atom", self.group, self.outliers, self.damp, self.gptq, self.activation(len(stats.hessian))
        if key not in stats.kept:
            columns = self.columns(len(stats.hessian))
            found = stats.rounding
            perm = (
                stats.hessian.diagonal().argsort(stable=True) if found is None else found.perm.to(stats.hessian.device)
            )
            spec = None if self.a == 16 else found.spec if found is not None else self.activation(len(perm))
            hessian = stats.hessian[perm][:, perm]
            if spec is not None:
                hessian = spec.rotated(spec.rotated(hessian).T).T
            hessian = columns.pad(columns.pad(hessian).T).T.contiguous()
            by = factor(hessian, self.damp, act_order=False, order=columns.pass_order(hessian.diagonal()))
            if not self.gptq:
                by = by._replace(mix=torch.zeros_like(by.mix))
            stats.kept[key] = _Input(columns, perm, spec, by, hessian)
        kept: _Input = stats.kept[key]
        return kept

    def _fit_rows(self, target: Tensor, given: _Input) -> Fit:
        cost = given.by.cost if self.gptq else torch.ones_like(given.by.cost)
        make = one_level if self.levels == 1 else two_levels
        levels: Levels = make(target, cost, given.columns, self.w, clip=self.clip)
        fit = feedback(target, given.by, levels)
        if not self.gptq:
            return fit
        scales = solve if self.levels == 1 else solve_unit
        steps = [scales, descend] * self.refine + [scales] * (self.refine > 0)
        return improve(target, given.hessian, given.by.damped, fit, steps)

    def _absorbed(self, error: Tensor, given: _Input) -> Tensor:
        """Return the change of the outliers [N, n], which are floats, that best compensates the others' error."""
        begin = given.columns.groups[0] * given.columns.group
        at = slice(begin, begin + given.columns.outliers)
        if not self.gptq:
            return torch.zeros_like(error[:, at])
        H = given.by.damped
        found: Tensor = torch.linalg.solve(H[at, at], (error[:, :begin] @ H[:begin, at]).T)
        return found.T

    def storage(self, shape: tuple[int, int]) -> Spec:
        N, K = shape
        c, act = self.columns(K), self.activation(K)
        spec = {"shape": [N, K], "bits": self.w, "group": c.group, "outliers": c.outliers, "permuted": True}
        spec |= {"activation": None if act is None else act.to_json()}
        if self.levels == 2:
            return {"format": TwoLevelTensor.format, **spec}
        return {"format": GroupedTensor.format, **spec, "outlier_bits": self.outlier_bits if c.outliers else 8}
