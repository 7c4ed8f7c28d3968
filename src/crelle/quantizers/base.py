"""What a quantizer is: the protocols, the config base class with bits and group, and the schemes without settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, Union, get_args, get_origin, runtime_checkable

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor, Spec
from crelle.formats.bcq import MAX_BITS
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.io import shown
from crelle.quantizers.calibration.calibrate import LayerCalibration
from crelle.quantizers.calibration.stats import InputRounding, Stats

Group = int | Literal["row"]
_MAX_TEXT = 100  # characters of a number in a scheme; one of 400 digits is no float


class BitConfig(NamedTuple):
    """Bits and group size of one matrix: what a search chooses."""

    bits: int
    group: Group

    def group_for(self, K: int) -> int:
        """Return the group size in a matrix of K inputs: never more than a row."""
        return K if self.group == "row" else min(self.group, K)

    def __str__(self) -> str:
        return f"{self.bits}/{self.group}"


class Quantizer(Protocol):
    """A config that can encode a weight matrix."""

    def fit(self, weight: Tensor, stats: Stats | None = None) -> QuantTensor:
        """Encode a weight [N, K]; schemes with `calibrated` need the stats of its inputs, the others ignore them."""
        ...

    def storage(self, shape: tuple[int, int]) -> Spec:
        """Return the spec of what `fit` returns for a weight of this shape, without fitting anything."""
        ...

    @property
    def calibrated(self) -> bool: ...

    def __str__(self) -> str: ...


@runtime_checkable
class LayerQuantizer(Protocol):
    """A config that also works on a decoder layer as a whole, before or after its matrices are fitted."""

    def before_layer(self, layer: LayerCalibration) -> dict[str, Tensor]:
        """Change the layer's weights without changing what it computes; return changed tensors that are no matrices."""
        ...

    def after_layer(self, layer: LayerCalibration, fitted: dict[str, QuantTensor]) -> dict[str, QuantTensor]:
        """Improve the fitted matrices together."""
        ...


@runtime_checkable
class ActivationQuantizer(Protocol):
    """A config that also quantizes the inputs of the matrices that it fits."""

    def rounding(self, stats: Stats) -> InputRounding | None:
        """Choose how an input is quantized, the same for all that read it; None: not at all."""
        ...


@runtime_checkable
class CacheConfig(Protocol):
    """A config of models that are meant for a certain KV cache."""

    @property
    def kv(self) -> str: ...


@runtime_checkable
class GuidedConfig(Protocol):
    """A config that can weight the calibration's tokens by the loss (crelle.quantizers.calibration.guidance)."""

    @property
    def guidance(self) -> float:
        """Return the exponent of those weights, 0 to 1; 0: tokens count by the layer's relative error alone."""
        ...


def check_guidance(guidance: float) -> None:
    """Refuse an exponent outside 0 to 1."""
    if not 0 <= guidance <= 1:
        raise SchemeError(f"guidance must be 0 to 1, got {guidance}")


@dataclass(frozen=True, slots=True)
class Cast:
    """Store a matrix unquantized, in f16, bf16 or f32."""

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
            raise SchemeError(f"a weight is outside the range of {self.name}; use bf16 or fp32")
        return DenseTensor(stored)

    def storage(self, shape: tuple[int, int]) -> Spec:
        dtype = str(self.DTYPES[self.name]).removeprefix("torch.")
        return {"format": DenseTensor.format, "shape": list(shape), "dtype": dtype}

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Passthrough:
    """Leave a matrix as the source stores it: the pipeline copies it, encoded or not, without calling `fit`."""

    calibrated: ClassVar[bool] = False

    def fit(self, weight: Tensor, stats: Stats | None = None) -> DenseTensor:
        return DenseTensor(weight)

    def storage(self, shape: tuple[int, int]) -> Spec:
        raise SchemeError(f"the scheme '{self}' needs a source model and cannot be used with random weights")

    def __str__(self) -> str:
        return "keep"


class GroupedConfig:
    """Base of the configs with `bits` and `group`: checks them, and formats the config as a scheme string."""

    __slots__ = ()
    scheme: ClassVar[str]
    bits: int
    group: Group
    calibrated: ClassVar[bool] = False  # whether `fit` needs stats
    searchable: ClassVar[bool] = False  # whether each matrix may have bits and group of its own

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits must be 1 to {MAX_BITS}, got {self.bits}")
        if self.group != "row" and self.group < 1:
            raise SchemeError(f"group must be at least 1, or 'row' for a whole row, got {self.group}")

    def fit(self, weight: Tensor, stats: Stats | None = None) -> QuantTensor:
        raise NotImplementedError

    def group_for(self, K: int) -> int:
        """Return the group size in a matrix of K inputs: never more than a row."""
        return BitConfig(self.bits, self.group).group_for(K)

    def format_settings(self) -> Spec:
        """Return the format that `fit` stores and its settings, besides shape, bits and group."""
        raise NotImplementedError

    def storage(self, shape: tuple[int, int]) -> Spec:
        return self.storage_at(BitConfig(self.bits, self.group), shape)

    def storage_at(self, setting: BitConfig, shape: tuple[int, int]) -> Spec:
        """Return what `storage` would at other bits and group."""
        sizes = {"shape": list(shape), "bits": setting.bits, "group": setting.group_for(shape[1])}
        return {**self.format_settings(), **sizes}

    def at(self, setting: BitConfig) -> Self:
        """Return this config at other bits and group."""
        return replace(self, bits=setting.bits, group=setting.group)  # type: ignore[type-var]

    def __str__(self) -> str:
        shown = [f for f in fields(self) if f.name in ("bits", "group") or getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{self.scheme}:" + ",".join(f"{f.name}={_format_value(getattr(self, f.name))}" for f in shown)

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> Self:
        """Build the config from key=value strings; an unknown key or a bad value raises SchemeError."""
        types = {f.name: f.type for f in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for key, text in settings.items():
            if key not in types:
                raise SchemeError(f"scheme '{cls.scheme}' has no setting '{key}'; it has: {', '.join(types)}")
            values[key] = _read(cls.scheme, key, types[key], text)
        return cls(**values)


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(scheme: str, key: str, kind: Any, text: str) -> Any:
    """Read a setting of type bool, int, float, str, a Literal of names, or a union of these."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    names = [name for k in kinds if get_origin(k) is Literal for name in get_args(k)]
    if bool in kinds:
        names += ["true", "false"]
    if str in kinds:
        return text
    if text in names:
        return text == "true" if bool in kinds else text
    number = float if float in kinds else int if int in kinds else None
    if number is not None and len(text) <= _MAX_TEXT:
        try:
            if math.isfinite(value := number(text)):
                return value
        except ValueError:
            pass
    quoted = names if bool in kinds else [f"'{name}'" for name in names]
    choices = [*({int: ["an integer"], float: ["a number"]}[number] if number else []), *quoted]
    raise SchemeError(f"in scheme '{scheme}', {key} must be {' or '.join(choices)}, got {shown(text)}")
