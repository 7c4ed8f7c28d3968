"""GPT-Neo: GPT-2 with a window in every other layer and scores that are not scaled."""

from functools import partial
from typing import Any

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.families.gpt2 import ACTIVATIONS
from crelle.models.settings import SETTINGS, Setting, setting

_KEYS = SETTINGS | {
    "num_layers": SETTINGS["num_hidden_layers"],
    "num_heads": SETTINGS["num_attention_heads"],
    "intermediate_size": Setting(int, 1, 1 << 22, None, "width of the feed-forward; default: 4 hidden_size"),
    "layer_norm_epsilon": Setting(float, 0, 1, 1e-5, "added to the variance in norms"),
    "window_size": Setting(int, 1, 1 << 30, 256, "tokens that local attention sees"),
    "attention_types": Setting(list, default=None, means="global or local, and how often"),
    "attention_layers": Setting(list, default=None, means="global or local, for each layer"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=_KEYS)
    if (act := get("activation_function", "gelu_new")) not in ACTIVATIONS:
        raise UnsupportedError(f"the activation {shown(act)} is not one of GPT-Neo's ({', '.join(ACTIVATIONS)})")
    width, heads = get("hidden_size"), get("num_heads")
    if width % heads:
        raise FormatError(f"'hidden_size' is {width}, which 'num_heads' = {heads} does not divide")
    norm = NormSpec("layer", get("layer_norm_epsilon"))
    mlp = MlpSpec(inner=get("intermediate_size", 4 * width), activation=ACTIVATIONS[act], gated=False)

    def layer(kind: str) -> LayerSpec:
        window = get("window_size") if kind == "local" else None
        attention = AttentionSpec(heads=heads, kv_heads=heads, head_size=width // heads, scale=1.0, window=window)
        return LayerSpec(attention=attention, mlp=mlp, norm=norm)

    return DecoderSpec(
        width=width,
        vocabulary=get("vocab_size"),
        context=get("max_position_embeddings"),
        layers=tuple(map(layer, _kinds(get))),
        norm=norm,
        tied=get("tie_word_embeddings", True),
        learned_positions=0,
    )


def _kinds(get: Any) -> list[str]:
    """Read `attention_types`, [[["global", "local"], 12]], or the list that it amounts to."""
    layers, kinds, types = get("num_layers"), get("attention_layers"), get("attention_types")
    if kinds is None:
        try:
            found = [
                (list(names), range(min(times, layers))) for names, times in types or [[["global", "local"], layers]]
            ]
            kinds = [name for names, times in found for _ in times for name in names]
        except (TypeError, ValueError):
            raise FormatError(f"'attention_types' should be [[[kind, …], times], …], but is {shown(types)}") from None
        kinds = kinds[:layers] if types is None else kinds
    if len(kinds) != layers or not all(k in ("global", "local") for k in kinds):
        raise FormatError(f"the layers' attention should be global or local for {layers} layers, but is {shown(kinds)}")
    return list(kinds)


_NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    norm="transformer.ln_f",
    **{slot: f"attn.attention.{slot}_proj" for slot in "qkv"},
    o="attn.attention.out_proj",
    norm_attention="ln_1",
    norm_mlp="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
FAMILY = Family(
    model_types=("gpt_neo",),
    spec=spec,
    names=lambda _: _NAMES,
    dropped=(".attn.attention.bias", ".attn.attention.masked_bias"),  # the causal mask
)
