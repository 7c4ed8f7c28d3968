"""Small random models of every dense family, and of what no family has alone, whose every tensor matters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from cuda_models import GEMMA3, GPT2, LLAMA, OPT
from torch import Tensor

from crelle.bench.model_shapes import RandomWeights
from crelle.kernels.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families import families, llama
from crelle.models.families.base import Config
from crelle.models.loader import Model, build

SIZES = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 512}
LONG = {"rope_type": "longrope", "short_factor": [1 + i / 8 for i in range(24)], "long_factor": [9.0] * 24}
OPT_SMALL = {**OPT, "num_hidden_layers": 2, "max_position_embeddings": 512}
GPT2_SMALL = {**GPT2, "n_layer": 2, "n_positions": 512}
GPT_NEO = {"model_type": "gpt_neo", "hidden_size": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
CHATGLM = {"model_type": "chatglm", "hidden_size": 256, "ffn_hidden_size": 384, "num_layers": 2, "kv_channels": 64}
NEOX = {**SIZES, "model_type": "gpt_neox"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 20},
    "opt": OPT_SMALL,
    "opt-350m": {**OPT_SMALL, "do_layer_norm_before": False, "word_embed_proj_dim": 128},
    "opt, norms without weights": {**OPT_SMALL, "layer_norm_elementwise_affine": False, "enable_bias": False},
    "opt, no last norm": {**OPT_SMALL, "_remove_final_layer_norm": True},
    "gpt2": GPT2_SMALL,
    "gpt2, plain silu": {**GPT2_SMALL, "activation_function": "silu", "scale_attn_weights": False},
    "gpt-neo": {**GPT_NEO, "max_position_embeddings": 512, "window_size": 20, "attention_layers": ["global", "local"]},
    "gpt-neox": NEOX,
    "gpt-neox, one after the other": {**NEOX, "use_parallel_residual": False},
    "gpt-j": {**GPT2_SMALL, "model_type": "gptj", "rotary_dim": 16},
    "phi-3": {**SIZES, "model_type": "phi3", "sliding_window": 20},
    "phi-4-mini": {
        **SIZES,
        "model_type": "phi3",
        "rope_parameters": {**LONG, "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        "original_max_position_embeddings": 512,
        "max_position_embeddings": 1024,
    },
    "starcoder2": {**SIZES, "model_type": "starcoder2", "sliding_window": 20},
    "smollm3": {**SIZES, "model_type": "smollm3", "no_rope_layer_interval": 2},
    "granite": {**SIZES, "model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.3}
    | {"residual_multiplier": 0.7, "logits_scaling": 0.5},
    "olmo2": {**SIZES, "model_type": "olmo2"},
    "glm": {**SIZES, "model_type": "glm", "head_dim": 64},
    "glm4": {**SIZES, "model_type": "glm4", "head_dim": 64},
    "chatglm": {**CHATGLM, "num_attention_heads": 4, "padded_vocab_size": 1000, "seq_length": 512}
    | {"multi_query_attention": True, "multi_query_group_num": 2},
    "gemma2": {**GEMMA3, "model_type": "gemma2", "num_hidden_layers": 2, "max_position_embeddings": 512}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3, scores by another root": {**GEMMA3, "num_hidden_layers": 2, "query_pre_attn_scalar": 37},
    "gpt-oss, its attention": {**SIZES, "model_type": "sinks"},
    "sandwich of layer norms, gated relu": {**SIZES, "model_type": "layer-sandwich"},
}


def _sinks(c: Config) -> DecoderSpec:
    """gpt-oss without its experts."""
    base = llama.spec({**c, "model_type": "llama"})
    mlp = MlpSpec(inner=c["intermediate_size"], activation="swigluoai", gated=True)

    def layer(s: LayerSpec, window: int | None) -> LayerSpec:
        return replace(s, mlp=mlp, attention=replace(s.attention, window=window, sinks=True))

    return replace(base, layers=tuple(map(layer, base.layers, (20, None))))


def _layer_sandwich(c: Config) -> DecoderSpec:
    """What no family has: layer norms behind layers and of heads, gate and relu."""
    base, norm = llama.spec({**c, "model_type": "llama"}), NormSpec("layer", 1e-5)
    mlp = MlpSpec(inner=c["intermediate_size"], activation="relu", gated=True)

    def layer(s: LayerSpec) -> LayerSpec:
        return replace(s, mlp=mlp, norm=norm, placement="sandwich", attention=replace(s.attention, qk_norm=norm))

    return replace(base, layers=tuple(map(layer, base.layers)))


_NAMES = replace(
    llama.FAMILY.names(()),
    sinks="self_attn.sinks",
    post_attention_norm="post_attention",
    post_mlp_norm="post_mlp",
)
OTHERS = {
    "sinks": replace(llama.FAMILY, model_types=("sinks",), spec=_sinks, names=lambda _: _NAMES),
    "layer-sandwich": replace(
        llama.FAMILY, model_types=("layer-sandwich",), spec=_layer_sandwich, names=lambda _: _NAMES
    ),
}


@contextmanager
def other_families() -> Iterator[None]:
    """Register what CONFIGS has beside real families."""
    families().update(OTHERS)
    try:
        yield
    finally:
        for name in OTHERS:
            del families()[name]


class _Weights(RandomWeights):
    """Norms and sinks of which no two values are the same."""

    def read(self, name: str) -> Tensor:
        shape = self.shape(name)
        if len(shape) == 2:
            return super().read(name)
        random = torch.randn(shape, generator=self._random(name), dtype=torch.float32, device=self.device)
        is_norm = "norm" in name or "ln_" in name or "layernorm" in name or "post_" in name
        mean = 1.0 if is_norm and name.endswith(".weight") else 1.0 if name.endswith("sinks") else 0.0
        return (mean + 0.2 * random).half()


def make_dense(name: str, scheme: str, device: str, dtype: torch.dtype | None = torch.float16) -> Model:
    """Return a random model of CONFIGS; without a dtype in what its family computes in."""
    where = torch.device(device)
    with other_families():
        return build(_Weights(CONFIGS[name], scheme, where, seed=3), where, dtype=dtype)
