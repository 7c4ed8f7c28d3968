"""ChatGLM2, ChatGLM3 and GLM-4 in their own files: GLM under other names, with q, k and v in one matrix."""

from functools import partial
from typing import Any

from crelle.errors import UnsupportedError
from crelle.kernels.spec import DecoderSpec
from crelle.models.families import glm
from crelle.models.families.base import Config, Family, StoredMatrix, TensorNames
from crelle.models.settings import SETTINGS, Setting, setting

_KEYS = SETTINGS | {
    "num_layers": SETTINGS["num_hidden_layers"],
    "kv_channels": Setting(int, 4, 1 << 12, 128, "width of a head"),
    "ffn_hidden_size": SETTINGS["intermediate_size"],
    "multi_query_attention": Setting(bool, default=False, means="heads share keys and values"),
    "multi_query_group_num": Setting(int, 1, 1 << 14, 1, "key and value heads"),
    "padded_vocab_size": SETTINGS["vocab_size"],
    "seq_length": Setting(int, 1, 1 << 30, 2048, "tokens of the context"),
    "layernorm_epsilon": Setting(float, 0, 1, 1e-5, "added to the mean square in norms"),
    "rope_ratio": Setting(float, 1e-3, 1e9, 1.0, "factor of the rotary base"),
    "rmsnorm": Setting(bool, default=True, means="norms are RMS norms"),
    "apply_residual_connection_post_layernorm": Setting(bool, default=False, means="the residual is normed"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a config of THUDM's own code."""
    get: Any = partial(setting, c, table=_KEYS)
    if not get("rmsnorm") or get("apply_residual_connection_post_layernorm"):
        raise UnsupportedError("ChatGLM is run with RMS norms ('rmsnorm') before attention and feed-forward only")
    heads = get("num_attention_heads")
    return glm.spec(
        {
            "model_type": "glm",
            "hidden_size": get("hidden_size"),
            "intermediate_size": get("ffn_hidden_size"),
            "num_hidden_layers": get("num_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("multi_query_group_num") if get("multi_query_attention") else heads,
            "head_dim": get("kv_channels"),
            "vocab_size": get("padded_vocab_size"),
            "max_position_embeddings": get("seq_length"),
            "rms_norm_eps": get("layernorm_epsilon"),
            "rope_theta": 10000.0 * get("rope_ratio"),
            "tie_word_embeddings": get("tie_word_embeddings"),
        }
    )


_QKV = {slot: f"self_attention.{slot}_proj" for slot in "qkv"}
_MLP = {slot: f"mlp.{slot}_proj" for slot in ("gate", "up")}
_NAMES = TensorNames(
    embedding="transformer.embedding.word_embeddings",
    layer="transformer.encoder.layers.{}",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    **_QKV,
    **_MLP,
    o="self_attention.dense",
    down="mlp.dense_4h_to_h",
)
FAMILY = Family(
    model_types=("chatglm",),
    spec=spec,
    names=lambda _: _NAMES,
    stored=(
        StoredMatrix(module="self_attention.query_key_value", parts=tuple(_QKV.values()), split="qkv"),
        StoredMatrix(module="mlp.dense_h_to_4h", parts=tuple(_MLP.values())),
    ),
)
