"""A matrix whose inputs are rotated before they are multiplied: RotatedTensor, a wrapper around any format.

    W = inner * H * diag(signs)         y = W x = inner * (H (signs x))

H multiplies blocks of inputs by Hadamard matrices (crelle.formats.wrappers.hadamard). With random signs before it, a
large weight or a large input is spread over its block, and both become nearly Gaussian: what fixed levels and trellis
codes are made for. The product is the same, since H diag(signs) is orthogonal.

Layout, in addition to the tensors of inner:
    signs  uint8 [ceil(K/8)]     bit k % 8 of byte k // 8: 1 where input k changes its sign; padding bits are 0
`block` is a power of two that divides K; 1: no Hadamard matrix. Bits per weight: those of inner + 1 / N.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor, Spec, expect, format_of, register_format, shape_of, take
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.mixed import MixedTensor
from crelle.formats.packing import pack_stream, unpack_stream
from crelle.formats.parallel import stacked
from crelle.formats.storage.io import shown
from crelle.formats.trellis import TrellisTensor
from crelle.formats.wrappers.composite import WrappedTensor
from crelle.formats.wrappers.hadamard import block_size, hadamard_blocks

INNER = tuple(c.format for c in (UniformTensor, AffineTensor, BCQTensor, MixedTensor, TrellisTensor))
MAX_BLOCK = 1024
_SEED = 0x7E11  # of signs


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """H diag(signs)."""

    packed: Tensor  # uint8 [ceil(K/8)]
    K: int
    block: int

    @classmethod
    def random(cls, K: int, generator: torch.Generator) -> Self:
        """Return the widest rotation of K inputs that there is, with random signs."""
        signs = torch.randint(2, (K,), generator=generator, device=generator.device, dtype=torch.uint8)
        return cls(pack_stream(signs, 1), K, min(MAX_BLOCK, block_size(K)))

    @classmethod
    def of_inputs(cls, K: int) -> Self:
        """Return the rotation that quantizers give K inputs: the same in every matrix, so that q, k and v share x."""
        return cls.random(K, torch.Generator().manual_seed(_SEED + K))

    def signs(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ±1 [K]."""
        return 1 - 2 * unpack_stream(self.packed, 1, self.K).to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return H (signs x) for x [..., K], in f32 (or f64 as x)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return hadamard_blocks(x.to(wide) * self.signs(wide), self.block)

    def undone(self, w: Tensor) -> Tensor:
        """Return w H diag(signs) for w [..., K]: what `__call__` was applied to."""
        return hadamard_blocks(w, self.block) * self.signs(w.dtype)

    def to(self, device: torch.device | str) -> "Rotation":
        return Rotation(self.packed.to(device), self.K, self.block)

    def clone(self) -> "Rotation":
        return Rotation(self.packed.clone(), self.K, self.block)

    def equal(self, other: "Rotation") -> bool:
        return self.block == other.block and (self.packed is other.packed or torch.equal(self.packed, other.packed))


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class RotatedTensor(WrappedTensor):
    """An encoded matrix, and the rotation of its inputs."""

    format: ClassVar[str] = "rotated"
    rotation: Rotation

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return self.rotation.undone(self.inner.dequantize(wide)).to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.inner.tensors(), "signs": self.rotation.packed}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "RotatedTensor":
        return RotatedTensor(self.inner.with_scales(scales), self.rotation)

    def spec(self) -> Spec:
        shape = list(self.shape)
        return {"format": self.format, "shape": shape, "block": self.rotation.block, "inner": self.inner.spec()}

    def rows(self, which: slice | Tensor) -> "RotatedTensor":
        return RotatedTensor(self.inner.rows(which), self.rotation)

    def cut(self, k: int) -> str | None:
        """Return why no share of the inputs can begin or end at input k; None: it can."""
        if k % self.rotation.block:
            return f"{self.rotation.block} inputs are rotated together"
        if k % 8:
            return "signs are stored in bytes of 8 inputs"
        cut = getattr(self.inner, "cut", None)
        found: str | None = f"the format '{self.inner.format}' does not support it" if cut is None else cut(k)
        return found

    def columns(self, begin: int, end: int) -> "RotatedTensor":
        """Return some inputs."""
        r = self.rotation
        part = Rotation(r.packed[begin // 8 : -(-end // 8)].contiguous(), end - begin, r.block)
        return RotatedTensor(self.inner.columns(begin, end), part)  # type: ignore[attr-defined]

    @classmethod
    def stacked(cls, matrices: Sequence[Any]) -> QuantTensor | None:
        """Return one matrix with the rows of all, if the inputs of all are rotated alike."""
        rotation = matrices[0].rotation
        inner = stacked([m.inner for m in matrices]) if all(m.rotation.equal(rotation) for m in matrices) else None
        return None if inner is None else cls(inner, rotation)

    def to(self, device: torch.device | str) -> "RotatedTensor":
        return RotatedTensor(self.inner.to(device), self.rotation.to(device))

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        inner = _inner(spec)
        return [*format_of(inner).parts(inner), "signs"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "block", "inner"})
        (N, K), inner, block = shape_of(spec), _inner(spec), spec["block"]
        if type(block) is not int or not 1 <= block <= MAX_BLOCK or block & (block - 1) or K % block:
            raise FormatError(
                f"rotated: 'block' should be a power of two up to {MAX_BLOCK} that divides {K}, but is {shown(block)}"
            )
        matrix = format_of(inner).from_parts(inner, tensors)
        if matrix.shape != (N, K):
            raise FormatError(f"rotated: the matrix is {N} x {K}, but the inner matrix is {list(matrix.shape)}")
        signs = expect(tensors, "signs", (-(-K // 8),), (torch.uint8,), cls.format)
        if K % 8 and signs.device.type != "meta" and bool(signs[-1] >> (K % 8)):
            raise FormatError(f"rotated: a sign beyond the last of {K} inputs is not 0")
        return cls(matrix, Rotation(signs, K, block))

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        inner = _inner(spec)
        matrix = format_of(inner).random(inner, generator)
        rotation = Rotation.of_inputs(matrix.shape[1]).to(generator.device)
        return cls(matrix, Rotation(rotation.packed, rotation.K, spec["block"]))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Those of a row inside, and its share of the signs, which are stored once for all rows."""
        inner = _inner(spec)
        N, K = shape_of(spec)
        return format_of(inner).row_bits(inner) + -(-8 * -(-K // 8) // max(1, N))


def _inner(spec: Mapping[str, Any]) -> Spec:
    """Return the spec of the matrix inside, or refuse it."""
    inner = spec.get("inner")
    if not isinstance(inner, dict) or inner.get("format") not in INNER:
        raise FormatError(f"rotated: 'inner' should be one of {', '.join(INNER)}, but is {shown(inner)}")
    return inner
