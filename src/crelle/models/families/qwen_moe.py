"""Qwen2-MoE (with an expert that all tokens take) and Qwen3-MoE: Qwen with mixtures of experts in some layers."""

from dataclasses import replace
from functools import partial
from typing import Any

from crelle.errors import FormatError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import DecoderSpec, LayerSpec
from crelle.models.families import llama
from crelle.models.families.base import Config, Family
from crelle.models.families.mixtral import KEYS, experts_of
from crelle.models.settings import setting


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=KEYS)
    base = llama.spec(c)
    shared = get("shared_expert_intermediate_size") if c["model_type"] == "qwen2_moe" else 0
    experts, inner = experts_of(c, get("norm_topk_prob"), shared), get("moe_intermediate_size")
    every, plain = get("decoder_sparse_step"), get("mlp_only_layers") or []
    if not all(type(i) is int for i in plain):
        raise FormatError(f"'mlp_only_layers' should be a list of layers, but is {shown(plain)}")

    def layer(i: int, s: LayerSpec) -> LayerSpec:
        if i in plain or (i + 1) % every:
            return s
        return replace(s, mlp=replace(s.mlp, inner=inner, experts=experts))

    return replace(base, layers=tuple(layer(i, s) for i, s in enumerate(base.layers)))


_NAMES = replace(
    llama.FAMILY.names(()),
    router="mlp.gate",
    expert="mlp.experts.{}",
    shared_expert="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
)
FAMILY = Family(model_types=("qwen2_moe", "qwen3_moe"), spec=spec, names=lambda _: _NAMES)
