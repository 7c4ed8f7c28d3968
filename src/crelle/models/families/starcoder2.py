"""StarCoder2: layer norms, biases, a plain gelu feed-forward, rope, a window."""

from functools import partial
from typing import Any

from crelle.errors import UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.families.gpt2 import ACTIVATIONS
from crelle.models.families.llama import attention_sizes
from crelle.models.rope import context_of, rope_of
from crelle.models.settings import SETTINGS, Setting, setting

_KEYS = SETTINGS | {
    "norm_epsilon": Setting(float, 0, 1, 1e-5, "added to the variance in norms"),
    "use_bias": Setting(bool, default=True, means="linears have biases"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=_KEYS)
    if (act := get("hidden_act", "gelu_pytorch_tanh")) not in ACTIVATIONS:
        raise UnsupportedError(f"the activation {shown(act)} is not one of StarCoder2's ({', '.join(ACTIVATIONS)})")
    heads, kv_heads, head_size = attention_sizes(c)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        window=get("sliding_window"),
        rope=rope_of(c, head_size),
        bias=get("use_bias"),
    )
    norm = NormSpec("layer", get("norm_epsilon"))
    mlp = MlpSpec(inner=get("intermediate_size"), activation=ACTIVATIONS[act], gated=False)
    return DecoderSpec(
        width=get("hidden_size"),
        vocabulary=get("vocab_size"),
        context=context_of(c),
        layers=(LayerSpec(attention=attention, mlp=mlp, norm=norm),) * get("num_hidden_layers"),
        norm=norm,
        tied=get("tie_word_embeddings", True),
    )


_NAMES = TensorNames(
    embedding="model.embed_tokens", layer="model.layers.{}", norm="model.norm", up="mlp.c_fc", down="mlp.c_proj"
)
FAMILY = Family(model_types=("starcoder2",), spec=spec, names=lambda _: _NAMES, required_biases=True)
