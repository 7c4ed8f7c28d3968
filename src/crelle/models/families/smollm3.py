"""SmolLM3: Llama without rope in every fourth layer."""

from dataclasses import replace
from typing import Any

from crelle.errors import FormatError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import DecoderSpec
from crelle.models.families import llama
from crelle.models.families.base import Config, Family
from crelle.models.settings import Setting, setting

_KEYS = {
    "no_rope_layers": Setting(list, default=None, means="0 for layers without rope, 1 for others"),
    "no_rope_layer_interval": Setting(int, 1, 1 << 12, 4, "one layer in this many has no rope"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    base = llama.spec({"tie_word_embeddings": True, **c})
    every: Any = setting(c, "no_rope_layer_interval", table=_KEYS)
    rotated = setting(c, "no_rope_layers", table=_KEYS)
    if not rotated:
        rotated = [int((i + 1) % every != 0) for i in range(len(base.layers))]
    if len(rotated) != len(base.layers) or not all(type(r) is int and r in (0, 1) for r in rotated):
        raise FormatError(f"'no_rope_layers' should be {len(base.layers)} times 0 or 1, but is {shown(rotated)}")
    layers = tuple(
        layer if r else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, r in zip(base.layers, rotated, strict=True)
    )
    return replace(base, layers=layers)


FAMILY = Family(model_types=("smollm3",), spec=spec, names=llama.FAMILY.names)
