"""gpt-oss: experts with biases and a clamped gated activation, attention sinks, a window in every other layer, yarn."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from crelle.errors import UnsupportedError
from crelle.kernels.spec import DecoderSpec, LayerSpec, MlpSpec
from crelle.models.families import llama
from crelle.models.families.base import Config, Family
from crelle.models.families.mixtral import experts_of
from crelle.models.settings import SETTINGS, Setting, layer_types, setting

LIMIT = 7.0
_KEYS = SETTINGS | {"swiglu_limit": Setting(float, 0, 1e6, LIMIT, "bound of gate and up")}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=_KEYS)
    if (limit := get("swiglu_limit")) != LIMIT:
        raise UnsupportedError(f"gpt-oss is run with gates bounded by {LIMIT:g}, but 'swiglu_limit' is {limit:g}")
    base = llama.spec({"rms_norm_eps": 1e-5, "head_dim": 64, **c, "sliding_window": None})
    mlp = MlpSpec(inner=get("intermediate_size"), activation="swigluoai", gated=True, experts=experts_of(c))
    window = get("sliding_window", 128)
    kinds = layer_types(c, len(base.layers)) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(len(base.layers))
    ]

    def layer(s: LayerSpec, kind: str) -> LayerSpec:
        seen = window if kind == "sliding_attention" else None
        return replace(s, mlp=mlp, attention=replace(s.attention, window=seen, sinks=True, bias=True))

    return replace(base, layers=tuple(map(layer, base.layers, kinds)))


_NAMES = replace(llama.FAMILY.names(()), router="mlp.router", expert="mlp.experts.{}", sinks="self_attn.sinks")
FAMILY = Family(model_types=("gpt_oss",), spec=spec, names=lambda _: _NAMES, required_biases=True, half=torch.bfloat16)
