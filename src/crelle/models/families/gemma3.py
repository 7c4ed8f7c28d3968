"""Gemma 3 (text): sandwich norms, norms of heads, two ropes, a window in five of six layers.

Gemma 2 has one rope, a window in every other layer, capped scores and logits, and no norms of heads.
Norms multiply by 1 + weight; crelle.models.tensor_view adds the 1.
"""

from functools import partial
from typing import Any

import torch

from crelle.errors import UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.families.llama import attention_sizes
from crelle.models.rope import rope_of
from crelle.models.settings import SETTINGS, Setting, layer_types, setting

_KEYS = SETTINGS | {
    "hidden_activation": Setting(str, default="gelu_pytorch_tanh", means="activation of the feed-forward"),
    "query_pre_attn_scalar": Setting(float, 1e-3, 1 << 20, 256.0, "scores are divided by its root"),
    "attn_logit_softcapping": Setting(float, 1e-3, 1e6, None, "bound of the scores"),
    "final_logit_softcapping": Setting(float, 1e-3, 1e6, None, "bound of the logits"),
    "rope_local_base_freq": Setting(float, 1, 1e15, 10000.0, "base of the rotary frequencies in layers with a window"),
    "sliding_window_pattern": Setting(int, 1, 1 << 12, None, "every so many layers one has no window"),
    "use_bidirectional_attention": Setting(bool, default=False, means="tokens see those behind them"),
    "norm_weight_offset": Setting(float, 0, 1, 1.0, "added to the weights of norms"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=_KEYS)
    if (act := get("hidden_activation")) != "gelu_pytorch_tanh":
        raise UnsupportedError(f"the activation {shown(act)} is not Gemma's (gelu_pytorch_tanh)")
    if get("use_bidirectional_attention"):
        raise UnsupportedError("Gemma with 'use_bidirectional_attention' is an encoder, which is not supported")
    layers, width = get("num_hidden_layers"), get("hidden_size")
    third = c["model_type"] == "gemma3_text"
    heads, kv_heads, head_size = attention_sizes({"head_dim": 256, **c})
    norm = NormSpec("rms", get("rms_norm_eps"), offset=get("norm_weight_offset"))
    mlp = MlpSpec(inner=get("intermediate_size"), activation="gelu_tanh", gated=True)
    rope, local = _ropes(c, get, head_size) if third else (rope_of(c, head_size),) * 2
    window, every = get("sliding_window", 4096), get("sliding_window_pattern", 6 if third else 2)
    kinds = layer_types(c, layers) or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]

    def layer(kind: str) -> LayerSpec:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            scale=get("query_pre_attn_scalar") ** -0.5,
            window=window if kind == "sliding_attention" else None,
            rope=local if kind == "sliding_attention" else rope,
            qk_norm=norm if third else None,
            softcap=None if third else get("attn_logit_softcapping"),
        )
        return LayerSpec(attention=attention, mlp=mlp, norm=norm, placement="sandwich")

    return DecoderSpec(
        width=width,
        vocabulary=get("vocab_size"),
        context=get("max_position_embeddings", 131072),
        layers=tuple(map(layer, kinds)),
        norm=norm,
        tied=get("tie_word_embeddings", True),
        embedding_scale=width**0.5,
        softcap=get("final_logit_softcapping"),
    )


def _ropes(c: Config, get: Any, head_size: int) -> tuple[RopeSpec, RopeSpec]:
    """Those of layers without and with a window; newer configs have one entry for each."""
    both = get("rope_parameters") or {}
    full, local = both.get("full_attention"), both.get("sliding_attention")
    old = {"rope_theta": get("rope_local_base_freq")}
    every = rope_of({"rope_theta": 1e6, **c, "rope_parameters": full}, head_size)
    return every, rope_of({"rope_parameters": local} if local else old, head_size)


_NAMES = TensorNames(
    embedding="model.embed_tokens",
    layer="model.layers.{}",
    norm="model.norm",
    post_attention_norm="post_attention_layernorm",
    norm_mlp="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
FAMILY = Family(
    model_types=("gemma3_text", "gemma2"), spec=spec, names=lambda _: _NAMES, norm_offset=1.0, half=torch.bfloat16
)
