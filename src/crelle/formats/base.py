"""The QuantTensor protocol that every weight format implements, and the registry that finds a format by its name.

A QuantTensor is a weight matrix W [N outputs, K inputs] in some encoding. It is immutable, knows its cost in bytes,
can be dequantized, and can be taken apart into plain tensors (for a file) and put together again:

    cls.from_parts(q.spec(), q.tensors())  ==  q

Hooks. Search, training, random weights, `inspect` and the reference kernel know a format by these alone:

    cls.random(spec, generator)     random weights for speed and tests, in the bytes that a real matrix has
    cls.row_bits(spec)              stored bits of one output row, known before anything is quantized (search, sizes)
    q.scales(), q.with_scales(...)  the floating-point scales that train while the codes stay; `dequantize` must be
                                    differentiable in them
    q.quantized                     whether the matrix counts as quantized in sizes and bits per weight
    q.cut(k)                        optional, for tensor parallelism (crelle.formats.parallel): None if a share of the
                                    inputs can begin or end at input k, else the reason
    q.columns(begin, end)           where `cut` allows both ends: these inputs, in the same format
    cls.stacked(matrices)           optional, likewise: one matrix with the rows of all, or None
    q.activation, q.round_input     optional, of formats with quantized activations: their ActivationSpec (or None), and
                                    x [..., K] as the integer product sees it

A `spec` is what `q.spec()` returns: "format", "shape" and the format's own settings. Nothing requires one number of
bits or one group size for the whole matrix: where they differ inside it, `bits` is the average and `group` is None.
A new format is a module with a class under `@register_format`; crelle.formats.builtin imports those
that come with Crelle.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.storage.io import shown

Spec = dict[str, Any]  # JSON-able: {"format": name, "shape": [N, K], ...}; with the tensors it is the whole matrix


MAX_SIZE = 1 << 31  # outputs or inputs of a matrix are fewer


@runtime_checkable
class QuantTensor(Protocol):
    """A weight matrix [N, K] in one of our encodings."""

    format: ClassVar[str]
    quantized: ClassVar[bool]  # False for plain floating-point matrices

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def bits(self) -> float:
        """Bits of one code, scales not counted; the average where codes differ in width."""
        ...

    @property
    def group(self) -> int | None:
        """Inputs that share one set of scales, K where a whole row does; None where group sizes differ."""
        ...

    @property
    def device(self) -> torch.device: ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that the codes stand for, [N, K]; differentiable in the scales."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by their short names; their bytes are the format's whole cost."""
        ...

    def scales(self) -> dict[str, Tensor]:
        """Return the trainable scale tensors by their names in `tensors`; {} where there are none to train.

        The first one is the step size of a group, [..., N, C]: training measures the others of that shape in it.
        """
        ...

    def with_scales(self, scales: Mapping[str, Tensor]) -> Self:
        """Return a copy with the same codes and these scales, of any floating-point type; others stay as they are."""
        ...

    def spec(self) -> Spec:
        """Return what a reader must know besides the tensors."""
        ...

    def rows(self, which: slice | Tensor) -> "QuantTensor":
        """Return some output rows, by slice or by index, in the same format where it allows that."""
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

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        """Return random weights of standard deviation 1/sqrt(K) with this spec, on the generator's device."""
        ...

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Return the stored bits of one output row of a matrix with this spec, every scale counted."""
        ...


FORMATS: dict[str, type[QuantTensor]] = {}  # by name: every format that a checkpoint may hold
_Format = TypeVar("_Format", bound=type[QuantTensor])


def register_format(cls: _Format) -> _Format:
    """Class decorator: make a format known by its name."""
    if (known := FORMATS.get(cls.format)) is not None and known.__qualname__ != cls.__qualname__:
        raise FormatError(f"the format '{cls.format}' is registered twice: {known.__name__} and {cls.__name__}")
    FORMATS[cls.format] = cls
    return cls


def format_of(spec: Mapping[str, Any]) -> type[QuantTensor]:
    """Return the class of the format that a spec names."""
    name = spec.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise FormatError(f"unknown format {name!r} (known: {', '.join(sorted(FORMATS))})")
    return FORMATS[name]


def group_bits(w: QuantTensor) -> Tensor | None:
    """Return the bits of a code in each group of inputs, uint8 [C], where a format lets them differ; else None."""
    found: Tensor | None = getattr(w, "group_bits", None)
    return found


def input_rounding(w: QuantTensor) -> Callable[[Tensor], Tensor] | None:
    """Return what a matrix with quantized activations does to x [..., K] before the product; None where x stays."""
    if getattr(w, "activation", None) is None:
        return None
    found: Callable[[Tensor], Tensor] = w.round_input  # type: ignore[attr-defined]
    return found


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
        raise FormatError(f"format '{cls.__name__}' needs the key '{missing[0]}', which the checkpoint does not have")


def shape_of(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return (N, K) of a spec, or refuse it."""
    shape = spec.get("shape")
    sizes = shape if isinstance(shape, list | tuple) else ()
    if len(sizes) != 2 or not all(type(n) is int and 0 < n < MAX_SIZE for n in sizes):
        raise FormatError(f"a weight's shape must be two positive integers below 2^31, got {shown(shape)}")
    return sizes[0], sizes[1]


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
