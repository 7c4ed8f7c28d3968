"""What every weight format answers, and the table that finds a format by its name.

A QuantTensor is a weight matrix W [N outputs, K inputs] in some encoding. It is immutable, knows its cost in bytes,
can be turned back into numbers, and can be taken apart into plain tensors (for a file) and put together again:

    cls.from_parts(q.spec(), q.tensors())  ==  q
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from crelle.errors import FormatError

Spec = dict[str, Any]  # JSON-able: {"format": name, "shape": [N, K], ...}; with the tensors it is the whole matrix


@runtime_checkable
class QuantTensor(Protocol):
    """A weight matrix [N, K] in one of our encodings."""

    format: ClassVar[str]

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def bits(self) -> int:
        """Bits of one code, scales not counted."""
        ...

    @property
    def group(self) -> int:
        """Inputs that share one set of scales; K where a whole row does."""
        ...

    @property
    def device(self) -> torch.device: ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers that the bits stand for, [N, K]."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by their short names; their bytes are the format's whole cost."""
        ...

    def spec(self) -> Spec:
        """Return what a reader must know besides the tensors."""
        ...

    def rows(self, which: slice | Tensor) -> Self:
        """Return some output rows, by slice or by index, as a tensor of the same format."""
        ...

    def to(self, device: torch.device | str) -> Self: ...

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        """Return the names of the tensors that a matrix with this spec stores."""
        ...

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Check and assemble; raises FormatError with a sentence when the parts do not fit."""
        ...


def nbytes(w: QuantTensor) -> int:
    """Bytes of everything the format stores: codes, scales, zero points."""
    return sum(t.numel() * t.element_size() for t in w.tensors().values())


def bits_per_weight(w: QuantTensor) -> float:
    """Stored bits per weight, every scale counted."""
    N, K = w.shape
    return 8 * nbytes(w) / (N * K)


def take(spec: Mapping[str, Any], cls: type, keys: set[str]) -> None:
    """Refuse a spec that has keys we do not know or lacks keys that we need."""
    given = set(spec)
    if unknown := sorted(given - keys):
        raise FormatError(
            f"format '{cls.__name__}' does not know the key '{unknown[0]}'; "
            f"this file may come from a newer Crelle (known: {', '.join(sorted(keys))})"
        )
    if missing := sorted(keys - given):
        raise FormatError(f"format '{cls.__name__}' needs the key '{missing[0]}', which the checkpoint does not give")


def shape_of(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return (N, K) of a spec, or refuse it."""
    shape = spec.get("shape")
    if not (isinstance(shape, list | tuple) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
        raise FormatError(f"a weight's shape must be two positive integers, got {shape!r}")
    return shape[0], shape[1]


def expect(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], where: str
) -> Tensor:
    """Return tensors[name] after checking its shape and dtype."""
    if name not in tensors:
        raise FormatError(f"{where}: the tensor '{name}' is missing")
    t = tensors[name]
    if tuple(t.shape) != shape or t.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise FormatError(
            f"{where}: '{name}' should be {wanted} {list(shape)}, "
            f"but is {str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
        )
    return t
