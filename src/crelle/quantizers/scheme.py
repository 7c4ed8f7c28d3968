"""Schemes: a quantizer and its settings as a short string that round-trips.

    fp16    bf16    fp32                 not quantized, only stored at that width
    keep                                 every matrix as the source has it, encoded or not: a lossless conversion
    rtn:bits=4,group=128                 round to nearest on a uniform grid            [symmetric=false]
    bcq:bits=3,group=128                 binary coding, alternating least squares      [rounds=20, bias=true]
    gptq:bits=3,group=128                uniform grid, error feedback, refinement      [settings: see its module]
    awq:bits=4,group=128                 activation-aware scales, clipping, rounding   [clip=true, steps=20]
    hbcq:bits=3,group=128                binary coding by the layer's output error     [settings: see its module]
    bcq-nested:bits=4,group=128          2, 3 and 4 bits in one checkpoint             [settings: see its module]
    mixed:group=16,four=0.25             2 and 4 bits in one matrix, 16-bit outliers   [outliers=0.002; see its module]
    atom:w=4,a=4,kv=4,group=128,outliers=128   integer weights and activations, outlier channels in 8 bits
    trellis:bits=2                       trellis codes, 1 to 4 bits in half steps: least error, slowest to find
    mxfp4, nvfp4                         four-bit floats in groups of 32 and 16, rounded to nearest

`group=row` shares the scales over a whole row. Schemes that look at data take `guidance`, 0 to 1: how much the loss of
the model, and not the error of a layer, says what a token counts (crelle.quantizers.calibration.guidance). A config is
a frozen dataclass: `parse` builds it from the string, `str` writes it back, with settings at their defaults left out
except bits and group.
"""

from collections.abc import Mapping

from crelle.errors import SchemeError
from crelle.quantizers.base import Cast, GroupedConfig, Passthrough, Quantizer
from crelle.quantizers.schemes.atom import Atom
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.awq import AWQ
from crelle.quantizers.schemes.bcq import BCQ
from crelle.quantizers.schemes.fp4 import MXFP4, NVFP4
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.hbcq import HBCQ
from crelle.quantizers.schemes.mixed import Mixed
from crelle.quantizers.schemes.nested import Nested
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.schemes.trellis import Trellis

CONFIGS: dict[str, type[GroupedConfig]] = {
    c.scheme: c for c in (RTN, BCQ, GPTQ, HBCQ, AWQ, Nested, Mixed, Atom, Auto, MXFP4, NVFP4, Trellis)
}


def parse(scheme: str) -> Quantizer:
    """Return the quantizer that a scheme string names."""
    name, _, rest = scheme.strip().partition(":")
    if name in (*Cast.DTYPES, "keep"):
        if rest:
            raise SchemeError(f"scheme '{name}' takes no settings, got '{rest}'")
        return Passthrough() if name == "keep" else Cast(name)
    if name not in CONFIGS:
        raise SchemeError(f"unknown scheme '{name}'; known schemes: {', '.join([*Cast.DTYPES, *CONFIGS, 'keep'])}")
    return CONFIGS[name].from_settings(settings_of(scheme))


def settings_of(scheme: str) -> dict[str, str]:
    """Return the settings that a scheme string names, as it writes them."""
    _, _, rest = scheme.strip().partition(":")
    settings: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, eq, value = (part.strip() for part in item.partition("="))
        if not eq or not value:
            raise SchemeError(f"in scheme '{scheme}', '{item}' must have the form key=value")
        if key in settings:
            raise SchemeError(f"in scheme '{scheme}', {key} is given twice")
        settings[key] = value
    return settings


def with_settings(scheme: str, more: Mapping[str, str]) -> str:
    """Return a scheme string with more settings."""
    if not more:
        return scheme
    name, _, _ = scheme.strip().partition(":")
    return f"{name}:" + ",".join(f"{k}={v}" for k, v in {**settings_of(scheme), **more}.items())
