"""Schemes: a quantizer and its settings as a short string that round-trips.

    fp16    bf16    fp32                 not quantized, only stored at that width
    rtn:bits=4,group=128                 round to nearest on a uniform grid            [symmetric=false]
    bcq:bits=3,group=128                 binary coding, alternating least squares      [rounds=20, bias=true]

`group=row` shares the scales over a whole row. A config is a frozen dataclass: `parse` builds it from the string,
`str` writes it back, with settings at their defaults left out except bits and group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import MAX_BITS
from crelle.formats.dense import DenseTensor

Group = int | Literal["row"]


class Quantizer(Protocol):
    """A config that can encode a weight matrix."""

    def fit(self, weight: Tensor) -> QuantTensor: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Store:
    """Keep a matrix as numbers, at 16 or 32 bits."""

    name: str

    DTYPES: ClassVar[Mapping[str, torch.dtype]] = {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
    }

    def fit(self, weight: Tensor) -> DenseTensor:
        stored = weight.to(self.DTYPES[self.name])
        if not torch.isfinite(stored).all():
            raise SchemeError(f"a weight does not fit the range of {self.name}; use bf16 or fp32")
        return DenseTensor(stored)

    def __str__(self) -> str:
        return self.name


class Grid:
    """Base of the configs with `bits` and `group`: checks them, and writes the config as a scheme string."""

    __slots__ = ()
    scheme: ClassVar[str]
    bits: int
    group: Group

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits must be 1 to {MAX_BITS}, got {self.bits}")
        if self.group != "row" and self.group < 1:
            raise SchemeError(f"group must be at least 1, or 'row' for a whole row; got {self.group}")

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
    if kind is bool:
        if text not in ("true", "false"):
            raise SchemeError(f"in scheme '{scheme}', {key} must be true or false, got '{text}'")
        return text == "true"
    if text == "row" and kind == Group:
        return text
    try:
        return int(text)
    except ValueError:
        choices = "a whole number" + (" or 'row'" if "row" in str(get_args(kind)) else "")
        raise SchemeError(f"in scheme '{scheme}', {key} must be {choices}, got '{text}'") from None


def parse(scheme: str) -> Quantizer:
    """Return the quantizer that a scheme string names."""
    from crelle.quantizers.bcq import BCQ
    from crelle.quantizers.rtn import RTN

    name, _, rest = scheme.strip().partition(":")
    known: dict[str, type[RTN] | type[BCQ]] = {c.scheme: c for c in (RTN, BCQ)}
    if name in Store.DTYPES:
        if rest:
            raise SchemeError(f"scheme '{name}' takes no settings, got '{rest}'")
        return Store(name)
    if name not in known:
        raise SchemeError(f"there is no scheme '{name}'; known are: {', '.join([*Store.DTYPES, *known])}")
    settings: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, eq, value = (part.strip() for part in item.partition("="))
        if not eq or not value:
            raise SchemeError(f"in scheme '{scheme}', '{item}' should read key=value")
        if key in settings:
            raise SchemeError(f"in scheme '{scheme}', {key} is given twice")
        settings[key] = value
    return known[name].from_settings(settings)
