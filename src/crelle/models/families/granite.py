"""Granite: Llama with factors of the embedding, the scores, the residual stream and the logits."""

from dataclasses import replace
from functools import partial
from typing import Any

from crelle.kernels.spec import DecoderSpec, LayerSpec
from crelle.models.families import llama
from crelle.models.families.base import Config, Family
from crelle.models.settings import Setting, setting

_KEYS = {
    "embedding_multiplier": Setting(float, 1e-6, 1e6, 1.0, "factor of the embedding"),
    "attention_multiplier": Setting(float, 1e-6, 1e6, 1.0, "factor of the scores"),
    "residual_multiplier": Setting(float, 1e-6, 1e6, 1.0, "factor of what is added to the residual stream"),
    "logits_scaling": Setting(float, 1e-6, 1e6, 1.0, "divisor of the logits"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=_KEYS)
    base = llama.spec(c)

    def layer(s: LayerSpec) -> LayerSpec:
        attention = replace(s.attention, scale=get("attention_multiplier"))
        return replace(s, attention=attention, residual_scale=get("residual_multiplier"))

    return replace(
        base,
        layers=tuple(map(layer, base.layers)),
        embedding_scale=get("embedding_multiplier"),
        logit_scale=1 / get("logits_scaling"),
    )


FAMILY = Family(model_types=("granite",), spec=spec, names=llama.FAMILY.names)
