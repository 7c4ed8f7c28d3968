"""Schemes: a quantizer and its settings as a short string that round-trips.

    fp16    bf16    fp32                 not quantized, only stored at that width
    keep                                 every matrix as the source has it, encoded or not: a lossless conversion
    rtn:bits=4,group=128                 round to nearest on a uniform grid            [symmetric=false]
    bcq:bits=3,group=128                 binary coding, alternating least squares      [rounds=20, bias=true]
    gptq:bits=3,group=128                uniform grid, error feedback, refinement      [settings: see its module]
    awq:bits=4,group=128                 activation-aware scales, clipping, rounding   [clip=true, steps=20]
    hbcq:bits=3,group=128                binary coding by the layer's output error     [settings: see its module]
    bcq-nested:bits=4,group=128          2, 3 and 4 bits in one checkpoint             [settings: see its module]

`group=row` shares the scales over a whole row. A config is a frozen dataclass: `parse` builds it from the string,
`str` writes it back, with settings at their defaults left out except bits and group.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, Union, get_args, get_origin, runtime_checkable

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import MAX_BITS
from crelle.formats.dense import DenseTensor
from crelle.quantizers.stats import Stats

if TYPE_CHECKING:
    from crelle.quantizers.calibrate import LayerWalk

Group = int | Literal["row"]


class Quantizer(Protocol):
    """A config that can encode a weight matrix."""

    def fit(self, weight: Tensor, stats: Stats | None = None) -> QuantTensor:
        """Encode a weight [N, K]; schemes with `calibrated` need the stats of its inputs, the others ignore them."""
        ...

    @property
    def calibrated(self) -> bool: ...

    def __str__(self) -> str: ...


@runtime_checkable
class LayerQuantizer(Protocol):
    """A config that also works on a layer as a whole, before or after its matrices are fitted."""

    def before_layer(self, walk: "LayerWalk") -> dict[str, Tensor]:
        """Change the layer's weights without changing what it computes; return changed tensors that are no matrices."""
        ...

    def after_layer(self, walk: "LayerWalk", fitted: dict[str, QuantTensor]) -> dict[str, QuantTensor]:
        """Improve the fitted matrices together."""
        ...


@dataclass(frozen=True, slots=True)
class Store:
    """Keep a matrix as numbers, at 16 or 32 bits."""

    name: str

    calibrated: ClassVar[bool] = False
    DTYPES: ClassVar[Mapping[str, torch.dtype]] = {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
    }

    def fit(self, weight: Tensor, stats: Stats | None = None) -> DenseTensor:
        stored = weight.to(self.DTYPES[self.name])
        if not torch.isfinite(stored).all():
            raise SchemeError(f"a weight does not fit the range of {self.name}; use bf16 or fp32")
        return DenseTensor(stored)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave a matrix as the source stores it; the driver takes it from there encoded, without asking `fit`."""

    calibrated: ClassVar[bool] = False

    def fit(self, weight: Tensor, stats: Stats | None = None) -> DenseTensor:
        return DenseTensor(weight)

    def __str__(self) -> str:
        return "keep"


class Grid:
    """Base of the configs with `bits` and `group`: checks them, and writes the config as a scheme string."""

    __slots__ = ()
    scheme: ClassVar[str]
    bits: int
    group: Group
    calibrated: ClassVar[bool] = False  # whether `fit` needs stats

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits must be 1 to {MAX_BITS}, got {self.bits}")
        if self.group != "row" and self.group < 1:
            raise SchemeError(f"group must be at least 1, or 'row' for a whole row; got {self.group}")

    def fit(self, weight: Tensor, stats: Stats | None = None) -> QuantTensor:
        raise NotImplementedError

    def group_for(self, K: int) -> int:
        """Return the group size in a matrix of K inputs: never more than a row."""
        return K if self.group == "row" else min(self.group, K)

    def __str__(self) -> str:
        shown = [f for f in fields(self) if f.name in ("bits", "group") or getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{self.scheme}:" + ",".join(f"{f.name}={_written(getattr(self, f.name))}" for f in shown)

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> Self:
        """Build the config from key=value strings; an unknown key or a bad value is a sentence."""
        types = {f.name: f.type for f in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for key, text in settings.items():
            if key not in types:
                raise SchemeError(f"scheme '{cls.scheme}' has no setting '{key}'; it has: {', '.join(types)}")
            values[key] = _read(cls.scheme, key, types[key], text)
        return cls(**values)


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(scheme: str, key: str, kind: Any, text: str) -> Any:
    """Read a setting of type bool, int, float, a Literal of names, or a union of these."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    names = [name for k in kinds if get_origin(k) is Literal for name in get_args(k)]
    if bool in kinds:
        names += ["true", "false"]
    if text in names:
        return text == "true" if bool in kinds else text
    number = float if float in kinds else int if int in kinds else None
    if number is not None:
        try:
            if math.isfinite(value := number(text)):
                return value
        except ValueError:
            pass
    quoted = names if bool in kinds else [f"'{name}'" for name in names]
    choices = [*({int: ["a whole number"], float: ["a number"]}[number] if number else []), *quoted]
    raise SchemeError(f"in scheme '{scheme}', {key} must be {' or '.join(choices)}, got '{text}'")


def _configs() -> dict[str, type[Grid]]:
    """Return the configs with settings by their names; imported here, because they import this module."""
    from crelle.quantizers.auto import Auto
    from crelle.quantizers.awq import AWQ
    from crelle.quantizers.bcq import BCQ
    from crelle.quantizers.gptq import GPTQ
    from crelle.quantizers.hbcq import HBCQ
    from crelle.quantizers.nested import Nested
    from crelle.quantizers.rtn import RTN

    return {c.scheme: c for c in (RTN, BCQ, GPTQ, HBCQ, AWQ, Nested, Auto)}


def parse(scheme: str) -> Quantizer:
    """Return the quantizer that a scheme string names."""
    name, _, rest = scheme.strip().partition(":")
    known = _configs()
    if name in (*Store.DTYPES, "keep"):
        if rest:
            raise SchemeError(f"scheme '{name}' takes no settings, got '{rest}'")
        return Keep() if name == "keep" else Store(name)
    if name not in known:
        raise SchemeError(f"there is no scheme '{name}'; known are: {', '.join([*Store.DTYPES, *known, 'keep'])}")
    settings: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, eq, value = (part.strip() for part in item.partition("="))
        if not eq or not value:
            raise SchemeError(f"in scheme '{scheme}', '{item}' should read key=value")
        if key in settings:
            raise SchemeError(f"in scheme '{scheme}', {key} is given twice")
        settings[key] = value
    return known[name].from_settings(settings)
