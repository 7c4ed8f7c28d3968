"""A matrix whose inputs, and outputs, are rotated: RotatedTensor, a wrapper around any format.

    W = diag(out_signs) H' * inner * H diag(signs)         y = W x = out_signs (H' (inner * (H (signs x))))

H multiplies blocks of inputs by Hadamard matrices (crelle.formats.wrappers.hadamard). With random signs before it, a
large weight or a large input is spread over its block, and both become nearly Gaussian: what fixed levels and trellis
codes are made for. H' does so with outputs, or is left out. The product is the same: H, H' and signs are orthogonal.

Layout, in addition to the tensors of inner:
    signs      uint8 [ceil(K/8)]     bit k % 8 of byte k // 8: 1 where input k changes its sign; padding bits are 0
    out_signs  uint8 [ceil(N/8)]     the same of outputs, where the spec has an `out_block`
`block` (of inputs) and `out_block` divide K and N, and are orders of known Hadamard matrices; 1: no matrix. Bits per
weight: those of inner + 1 / N (+ 1 / K).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor, Spec, expect, format_of, register_format, shape_of, take
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.mixed import MixedTensor
from crelle.formats.packing import pack_stream, unpack_stream
from crelle.formats.parallel import stacked
from crelle.formats.storage.io import shown
from crelle.formats.trellis import TrellisTensor
from crelle.formats.wrappers.composite import WrappedTensor
from crelle.formats.wrappers.hadamard import MOST_CHANNELS, block_size, hadamard_blocks, paley_order

INNER = tuple(c.format for c in (UniformTensor, AffineTensor, BCQTensor, MixedTensor, TrellisTensor))
MAX_BLOCK = 1024  # of what quantizers make: powers of two up to this are rotated by every kernel
_SEED = 0x7E11  # of signs


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """H diag(signs) of K channels."""

    packed: Tensor  # uint8 [ceil(K/8)]
    K: int
    block: int

    @property
    def simple(self) -> bool:
        """Whether every kernel that rotates can do it: blocks are powers of two up to MAX_BLOCK."""
        return self.block <= MAX_BLOCK and self.block == block_size(self.block)

    @classmethod
    def random(cls, K: int, generator: torch.Generator, block: int | None = None) -> Self:
        """Return a rotation with random signs; block: the greatest power of two up to MAX_BLOCK."""
        signs = torch.randint(2, (K,), generator=generator, device=generator.device, dtype=torch.uint8)
        return cls(pack_stream(signs, 1), K, min(MAX_BLOCK, block_size(K)) if block is None else block)

    @classmethod
    def of_inputs(cls, K: int, block: int | None = None) -> Self:
        """Return the rotation that quantizers give K inputs: the same in every matrix, so that q, k and v share x."""
        return cls.random(K, torch.Generator().manual_seed(_SEED + K), block)

    @classmethod
    def of_outputs(cls, N: int, block: int | None = None) -> Self:
        """Return the rotation that quantizers give N outputs."""
        return cls.random(N, torch.Generator().manual_seed(_SEED - N), block)

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

    def part(self, begin: int, end: int) -> "Rotation":
        """Return the rotation of some channels: whole blocks, and whole bytes of signs."""
        return Rotation(self.packed[begin // 8 : -(-end // 8)].contiguous(), end - begin, self.block)

    def to(self, device: torch.device | str) -> "Rotation":
        return Rotation(self.packed.to(device), self.K, self.block)

    def clone(self) -> "Rotation":
        return Rotation(self.packed.clone(), self.K, self.block)

    def equal(self, other: "Rotation") -> bool:
        return self.block == other.block and (self.packed is other.packed or torch.equal(self.packed, other.packed))


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class RotatedTensor(WrappedTensor):
    """An encoded matrix, the rotation of its inputs, and of its outputs if they are rotated."""

    format: ClassVar[str] = "rotated"
    rotation: Rotation
    outputs: Rotation | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        w = self.rotation.undone(self.inner.dequantize(wide))
        return (w if self.outputs is None else self.outputs.undone(w.T).T.contiguous()).to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        found = {**self.inner.tensors(), "signs": self.rotation.packed}
        return found if self.outputs is None else {**found, "out_signs": self.outputs.packed}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "RotatedTensor":
        return replace(self, inner=self.inner.with_scales(scales))

    def spec(self) -> Spec:
        shape, block = list(self.shape), self.rotation.block
        out = {} if self.outputs is None else {"out_block": self.outputs.block}
        return {"format": self.format, "shape": shape, "block": block, **out, "inner": self.inner.spec()}

    def rows(self, which: slice | Tensor) -> "RotatedTensor | DenseTensor":
        """Return some rows; of rotated outputs whole blocks in this format, others decoded."""
        if (outputs := self.outputs) is None:
            return replace(self, inner=self.inner.rows(which))
        N = self.shape[0]
        if isinstance(which, slice):
            begin, end, step = which.indices(N)
            if step == 1 and begin < end and not any(at % outputs.block or at % 8 for at in (begin, end) if at < N):
                return replace(self, inner=self.inner.rows(which), outputs=outputs.part(begin, end))
        wanted = torch.arange(N, device=self.device)[which]
        blocks = (wanted // outputs.block).unique()  # type: ignore[no-untyped-call]
        needed = (blocks[:, None] * outputs.block + torch.arange(outputs.block, device=self.device)).flatten()
        w = self.rotation.undone(self.inner.rows(needed).dequantize())  # [rows of these blocks, K]
        w = hadamard_blocks(w.T, outputs.block).T * outputs.signs()[needed, None]
        return DenseTensor(w[torch.searchsorted(needed, wanted.contiguous())])

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
        inner = self.inner.columns(begin, end)  # type: ignore[attr-defined]
        return replace(self, inner=inner, rotation=self.rotation.part(begin, end))

    @classmethod
    def stacked(cls, matrices: Sequence[Any]) -> QuantTensor | None:
        """Return one matrix with the rows of all, if the inputs of all are rotated alike."""
        rotation, outputs = matrices[0].rotation, None
        if not all(m.rotation.equal(rotation) for m in matrices):
            return None
        if matrices[0].outputs is not None:  # the blocks are equal (crelle.formats.parallel)
            if any(m.outputs.K % 8 for m in matrices[:-1]):
                return None
            packed = torch.cat([m.outputs.packed for m in matrices])
            outputs = Rotation(packed, sum(m.outputs.K for m in matrices), matrices[0].outputs.block)
        inner = stacked([m.inner for m in matrices])
        return None if inner is None else cls(inner, rotation, outputs)

    def to(self, device: torch.device | str) -> "RotatedTensor":
        outputs = None if self.outputs is None else self.outputs.to(device)
        return RotatedTensor(self.inner.to(device), self.rotation.to(device), outputs)

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        inner = _inner(spec)
        return [*format_of(inner).parts(inner), "signs", *(["out_signs"] if "out_block" in spec else [])]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        rotates_outputs = "out_block" in spec
        take(spec, cls, {"format", "shape", "block", "inner"} | ({"out_block"} if rotates_outputs else set()))
        (N, K), inner = shape_of(spec), _inner(spec)
        blocks = _block(spec, "block", K), _block(spec, "out_block", N) if rotates_outputs else 0
        matrix = format_of(inner).from_parts(inner, tensors)
        if matrix.shape != (N, K):
            raise FormatError(f"rotated: the matrix is {N} x {K}, but the inner matrix is {list(matrix.shape)}")
        rotation = Rotation(_signs(tensors, "signs", K, "inputs"), K, blocks[0])
        if not rotates_outputs:
            return cls(matrix, rotation)
        return cls(matrix, rotation, Rotation(_signs(tensors, "out_signs", N, "outputs"), N, blocks[1]))

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        inner = _inner(spec)
        matrix = format_of(inner).random(inner, generator)
        N, K = matrix.shape
        outputs = Rotation.of_outputs(N, spec["out_block"]).to(generator.device) if "out_block" in spec else None
        return cls(matrix, Rotation.of_inputs(K, spec["block"]).to(generator.device), outputs)

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Those of a row inside, and its share of the signs, which are stored once for all rows."""
        inner = _inner(spec)
        N, K = shape_of(spec)
        signs = -(-K // 8) + (-(-N // 8) if "out_block" in spec else 0)
        return format_of(inner).row_bits(inner) + -(-8 * signs // max(1, N))


def _block(spec: Mapping[str, Any], name: str, channels: int) -> int:
    """Return how many channels are rotated together, or refuse it."""
    block = spec[name]
    if type(block) is not int or not 1 <= block <= MOST_CHANNELS or channels % block or paley_order(block) is None:
        raise FormatError(
            f"rotated: '{name}' should be the order of a known Hadamard matrix, such as a power of two or 12, 20, 28 "
            f"or 36 times one, up to {MOST_CHANNELS}, and divide {channels}, but is {shown(block)}"
        )
    return block


def _signs(tensors: Mapping[str, Tensor], name: str, channels: int, what: str) -> Tensor:
    """Return packed signs, or refuse them."""
    signs = expect(tensors, name, (-(-channels // 8),), (torch.uint8,), RotatedTensor.format)
    if channels % 8 and signs.device.type != "meta" and bool(signs[-1] >> (channels % 8)):
        raise FormatError(f"rotated: a sign beyond the last of {channels} {what} is not 0")
    return signs


def _inner(spec: Mapping[str, Any]) -> Spec:
    """Return the spec of the matrix inside, or refuse it."""
    inner = spec.get("inner")
    if not isinstance(inner, dict) or inner.get("format") not in INNER:
        raise FormatError(f"rotated: 'inner' should be one of {', '.join(INNER)}, but is {shown(inner)}")
    return inner
