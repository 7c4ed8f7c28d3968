"""CrelleConfig: the `quantization_config` of a Crelle checkpoint, or what from_pretrained makes of a plain model."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from crelle.errors import FormatError, SchemeError
from crelle.formats.storage.checkpoint import FORMAT_VERSION
from crelle.integrations.transformers.layers import Choice
from crelle.quantizers.base import Passthrough, Quantizer
from crelle.quantizers.scheme import parse

_STORED = ("quant_method", "format_version", "scheme", "overrides", "tensors", "shards")


class CrelleConfig(QuantizationConfigMixin):
    """How a model is, or is to be, quantized.

    CrelleConfig("rtn:bits=4,group=64", overrides={"*.down_proj": "rtn:bits=8,group=64"})    of a plain model
    CrelleConfig(bits=2)                                 of a checkpoint of nested planes: at a precision that it offers

    `overrides` maps patterns of module names to other schemes, the first that matches counts; embeddings and heads
    outside the numbered layers stay as they are unless a pattern names them. `modules_to_not_convert` are modules, by
    their whole name, its end or a pattern, that stay as they are. `kernel` insists on one of Crelle's kernels.
    """

    def __init__(
        self,
        scheme: str = "rtn:bits=4,group=64",
        overrides: Mapping[str, str] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        *,
        bits: int | None = None,
        kernel: str | None = None,
        quant_method: str = "crelle",
        format_version: int = FORMAT_VERSION,
        tensors: Mapping[str, Any] | None = None,
        shards: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        if quant_method != "crelle":
            raise SchemeError(f"CrelleConfig is of the quant_method 'crelle', not '{quant_method}'")
        if format_version != FORMAT_VERSION:
            raise FormatError(
                f"the checkpoint has format version {format_version!r}; this Crelle reads version {FORMAT_VERSION}. "
                "A newer Crelle may read it"
            )
        if unknown:
            first = min(unknown)
            raise SchemeError(
                f"CrelleConfig has no setting '{first}': it may be one of a newer Crelle (known: scheme, overrides, "
                "modules_to_not_convert, bits, kernel)"
            )
        self.quant_method = "crelle"  # type: ignore[assignment]
        self.format_version = format_version
        self.scheme, self.overrides = scheme, dict(overrides or {})
        self.tensors, self.shards = dict(tensors or {}), dict(shards or {})
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.bits, self.kernel = bits, kernel

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json has: not what one load of the checkpoint asked for."""
        return {key: getattr(self, key) for key in _STORED}

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return what a config given beside a checkpoint may choose."""
        chosen = {"bits": self.bits, "kernel": self.kernel}
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def choice(self) -> Choice:
        return Choice(self.bits, self.kernel)

    def quantizers(self) -> tuple[Quantizer, dict[str, Quantizer]]:
        """Return the quantizers of the scheme and of the overrides; an unknown scheme raises SchemeError."""
        return parse(self.scheme), {pattern: parse(scheme) for pattern, scheme in self.overrides.items()}

    def require_no_calibration(self) -> None:
        """Refuse schemes that from_pretrained cannot carry out: it has no data to look at."""
        default, others = self.quantizers()
        for q in (default, *others.values()):
            if q.calibrated:
                raise SchemeError(
                    f"the scheme '{q}' looks at data, which from_pretrained does not have: make a checkpoint with "
                    f"`crelle quantize MODEL OUT --scheme {q} --calib TEXT` and open that, or load the model and call "
                    "crelle.integrations.transformers.quantize(model, scheme, batches)"
                )
        if isinstance(default, Passthrough):
            raise SchemeError("the scheme 'keep' changes nothing: leave quantization_config out")
