"""GPT-NeoX, Pythia: attention and feed-forward side by side, each with a layer norm of its own; partial rope.

q, k and v are one matrix, head by head.
"""

from functools import partial
from typing import Any

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, StoredMatrix, TensorNames
from crelle.models.families.gpt2 import ACTIVATIONS
from crelle.models.rope import rope_of, rotated_channels
from crelle.models.settings import SETTINGS, Setting, setting

_KEYS = SETTINGS | {
    "layer_norm_eps": Setting(float, 0, 1, 1e-5, "added to the variance in norms"),
    "use_parallel_residual": Setting(bool, default=True, means="attention and feed-forward read the same x"),
    "attention_bias": Setting(bool, default=True, means="the linears of attention have biases"),
    "rotary_pct": Setting(float, 0, 1, 0.25, "share of a head's channels that are rotated"),
    "rotary_emb_base": Setting(float, 1, 1e15, 10000.0, "base of the rotary frequencies"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=_KEYS)
    if (act := get("hidden_act", "gelu")) not in ACTIVATIONS:
        raise UnsupportedError(f"the activation {shown(act)} is not one of GPT-NeoX's ({', '.join(ACTIVATIONS)})")
    width, heads = get("hidden_size"), get("num_attention_heads")
    if width % heads:
        raise FormatError(f"'hidden_size' is {width}, which 'num_attention_heads' = {heads} does not divide")
    size = width // heads
    older = {"rope_theta": get("rotary_emb_base"), **c}
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_size=size,
        scale=size**-0.5,
        rope=rope_of(older, rotated_channels(c, size, get("rotary_pct"))),
        bias=get("attention_bias"),
    )
    norm = NormSpec("layer", get("layer_norm_eps"))
    mlp = MlpSpec(inner=get("intermediate_size"), activation=ACTIVATIONS[act], gated=False)
    layer = LayerSpec(attention=attention, mlp=mlp, norm=norm, parallel=get("use_parallel_residual"))
    return DecoderSpec(
        width=width,
        vocabulary=get("vocab_size"),
        context=get("max_position_embeddings"),
        layers=(layer,) * get("num_hidden_layers"),
        norm=norm,
        tied=get("tie_word_embeddings"),
    )


_QKV = {"q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj"}
_NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    **_QKV,
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
FAMILY = Family(
    model_types=("gpt_neox",),
    spec=spec,
    names=lambda _: _NAMES,
    stored=(StoredMatrix(module="attention.query_key_value", parts=tuple(_QKV.values()), split="heads"),),
    dropped=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),  # masks, frequencies
    required_biases=True,
)
