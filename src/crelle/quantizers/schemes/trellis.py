"""Trellis codes by the layer's output error (formats: crelle.formats.trellis and rotated).

    1. rotation  random signs and Hadamard blocks on the inputs, the same for all matrices with as many inputs
                 (hadamard=any: of any known order, not of powers of two only; rotate_outputs=true: on the outputs, too)
    2. codes     LDLQ: a Viterbi search for 4 inputs at a time, their error compensated by the inputs after them
    3. scales    least squares, one a row

No other format here has so little error at a size: at 2 bits 0.073 of a Gaussian's variance, where the best four levels
leave 0.118. The search tries 2^16 states for every second weight, so it takes its time: see docs/notes/trellis.md.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor, Spec
from crelle.formats.trellis import BITS, CODES, Code, TrellisTensor
from crelle.formats.wrappers.hadamard import known_orders
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.quantizers.calibration.stats import Stats, require_stats
from crelle.quantizers.schemes.hessian_base import HessianConfig, check_hessian_settings
from crelle.quantizers.solvers.gptq_solver import LDLFactor, factor, solve_damped
from crelle.quantizers.solvers.grouping import require_finite
from crelle.quantizers.solvers.trellis_solver import LEFT, BlockFactor, encode
from crelle.quantizers.stage_times import FACTOR, TARGET, timed

_SEED = 0x7E11  # of noise


class _Prepared(NamedTuple):
    """What the matrices of one input share."""

    rotation: Rotation | None
    by: LDLFactor
    blocks: BlockFactor


@dataclass(frozen=True, slots=True)
class Trellis(HessianConfig):
    """1 to 4 bits in half steps."""

    scheme: ClassVar[str] = "trellis"
    group: ClassVar[int] = 0  # type: ignore[misc]  # a scale belongs to a row
    act_order: ClassVar[bool] = False  # type: ignore[misc]
    refine: ClassVar[int] = 0  # type: ignore[misc]
    bits: float = 2.0  # type: ignore[assignment]
    code: Literal["auto", "pair", "mul1"] = "auto"
    rotate: bool = True
    rotate_outputs: bool = False
    hadamard: Literal["two", "any"] = "two"
    damp: float = 0.2
    target: bool = True
    guidance: float = 0.0

    def __post_init__(self) -> None:
        check_hessian_settings(self)
        if self.bits not in BITS:
            raise SchemeError(f"trellis has {', '.join(f'{b:g}' for b in BITS)} bits, got {self.bits:g}")
        if (self.values.weights * self.bits) % 1:
            raise SchemeError(f"code={self.code} needs whole bits, got {self.bits:g}; use code=pair")
        if not self.rotate and (self.rotate_outputs or self.hadamard != "two"):
            raise SchemeError("rotate=false leaves nothing for rotate_outputs and hadamard; leave out one of them")

    @property
    def values(self) -> Code:
        """Return the code: two weights a state where that costs little, or where bits are not whole."""
        auto = "mul1" if self.bits >= 3 and self.bits % 1 == 0 else "pair"
        return CODES[auto if self.code == "auto" else self.code]

    def fit(self, weight: Tensor, stats: Stats | None = None) -> QuantTensor:
        """Return the weight [N, K] in trellis codes."""
        N, K = weight.shape
        stats = require_stats(stats, self.scheme, K)
        target, blocks = self.aim(require_finite(weight), stats)
        outputs = Rotation.of_outputs(N, self._block(N)).to(weight.device) if self.rotate_outputs else None
        if outputs is not None:
            target = outputs(target.T).T.contiguous()
        codes, scale = encode(target, blocks, self.values, self.bits)
        inner = TrellisTensor(codes, scale, K, self.bits, self.values)
        rotate = self._prepared(stats).rotation
        return inner if rotate is None else RotatedTensor(inner, rotate.clone(), outputs)  # files share no memory

    def aim(self, weight: Tensor, stats: Stats) -> tuple[Tensor, BlockFactor]:
        """Return the target weight [N, K], its inputs rotated, and the factor of the Hessian of rotated inputs."""
        with timed(FACTOR):
            shared = self._prepared(stats)
        with timed(TARGET):
            target = stats.target(weight, self.damp, lambda b: _solved(b, shared)) if self.target else weight
            return target.float() if shared.rotation is None else shared.rotation(target.float()), shared.blocks

    def blocks(self, stats: Stats) -> BlockFactor:
        """Return the factor of the Hessian of rotated inputs."""
        return self._prepared(stats).blocks

    def row_errors(self, weight: Tensor, rows: Tensor, by: LDLFactor) -> Tensor:
        """Return an error W - Ŵ of some rows such as the search would leave: noise of its size, fed back likewise."""
        if (key := "trellis") not in by.kept:
            rotation = self._rotation(len(by.cost)).to(weight.device)
            mix = factor(_rotated(by.damped, rotation), 0.0, act_order=False).mix
            mix.diagonal().add_(1)
            by.kept[key] = mix
        target = weight[rows].float()
        size = target.square().mean(1, keepdim=True).sqrt() * LEFT[self.values.name][self.bits] ** 0.5
        noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(_SEED)).to(target.device) * size
        left = torch.linalg.solve_triangular(by.kept[key], noise, upper=True, unitriangular=True, left=False)
        return self._rotation(len(by.cost)).to(weight.device).undone(left)

    def _block(self, channels: int) -> int | None:
        """Return how many channels are rotated together; None: as many as every kernel rotates."""
        return known_orders(channels)[-1] if self.hadamard == "any" else None

    def _rotation(self, K: int) -> Rotation:
        return Rotation.of_inputs(K, self._block(K))

    def _prepared(self, stats: Stats) -> _Prepared:
        key = self.scheme, self.damp, self.rotate, self.hadamard
        if key not in stats.kept:
            H = stats.hessian
            rotation = self._rotation(len(H)).to(H.device) if self.rotate else None
            by = factor(H if rotation is None else _rotated(H, rotation), self.damp, act_order=False)
            stats.kept[key] = _Prepared(rotation, by, BlockFactor.of(by))
        found: _Prepared = stats.kept[key]
        return found

    def format_settings(self) -> Spec:
        return {"format": TrellisTensor.format, "code": self.values.name}

    def storage(self, shape: tuple[int, int]) -> Spec:
        inner = {**self.format_settings(), "shape": list(shape), "bits": self.bits}
        if not self.rotate:
            return inner
        N, K = shape
        out = {"out_block": Rotation.of_outputs(N, self._block(N)).block} if self.rotate_outputs else {}
        block = self._rotation(K).block
        return {"format": RotatedTensor.format, "shape": [N, K], "block": block, **out, "inner": inner}

    def __str__(self) -> str:
        text = HessianConfig.__str__(self)
        return text.replace(f"bits={self.bits}", f"bits={self.bits:g}")


def _rotated(hessian: Tensor, rotation: Rotation) -> Tensor:
    """Return the Hessian of the inputs after their rotation."""
    return rotation(rotation(hessian.float()).T).T


def _solved(b: Tensor, shared: _Prepared) -> Tensor:
    """Return b H⁻¹ for the damped Hessian of the inputs as they are."""
    if (rotation := shared.rotation) is None:
        return solve_damped(shared.by, b)
    return rotation.undone(solve_damped(shared.by, rotation(b)))
