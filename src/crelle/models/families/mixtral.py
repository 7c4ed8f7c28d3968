"""Mixtral: Llama whose feed-forwards are mixtures of experts."""

from dataclasses import replace
from functools import partial
from typing import Any

from crelle.errors import FormatError
from crelle.kernels.spec import DecoderSpec, ExpertsSpec
from crelle.models.families import llama
from crelle.models.families.base import Config, Family
from crelle.models.settings import Setting, setting

MAX_EXPERTS = 1 << 12
KEYS = {
    "num_local_experts": Setting(int, 1, MAX_EXPERTS, None, "experts of a layer"),
    "num_experts": Setting(int, 1, MAX_EXPERTS, None, "experts of a layer"),
    "num_experts_per_tok": Setting(int, 1, MAX_EXPERTS, means="experts of a token"),
    "norm_topk_prob": Setting(bool, default=False, means="the weights of a token's experts add up to 1"),
    "shared_expert_intermediate_size": Setting(int, 1, 1 << 22, means="width of the expert that all tokens take"),
    "moe_intermediate_size": Setting(int, 1, 1 << 22, means="width of an expert"),
    "decoder_sparse_step": Setting(int, 1, 1 << 16, 1, "one layer in this many has experts"),
    "mlp_only_layers": Setting(list, default=None, means="layers without experts"),
}


def experts_of(c: Config, normalize: bool = True, shared: int = 0) -> ExpertsSpec:
    """Read how many experts there are and how many a token takes."""
    get: Any = partial(setting, c, table=KEYS)
    count, top = get("num_local_experts") or get("num_experts"), get("num_experts_per_tok")
    if count is None:
        raise FormatError("the model's config lacks the key 'num_local_experts' or 'num_experts' (experts of a layer)")
    if top > count:
        raise FormatError(f"'num_experts_per_tok' is {top}, but a layer has {count} experts")
    return ExpertsSpec(count=count, top=top, normalize=normalize, shared=shared)


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    base, experts = llama.spec(c), experts_of(c)
    return replace(base, layers=tuple(replace(layer, mlp=replace(layer.mlp, experts=experts)) for layer in base.layers))


_NAMES = replace(
    llama.FAMILY.names(()),
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    **{"gate": "w1", "up": "w3", "down": "w2"},
)
FAMILY = Family(model_types=("mixtral",), spec=spec, names=lambda _: _NAMES)
