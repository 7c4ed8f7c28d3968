"""Llama 1, 2, 3, SmolLM2, Mistral, Qwen2, Qwen3: RMS norms, rotary positions, a gated feed-forward."""

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.rope import context_of, rope_of, rotated_channels
from crelle.models.settings import layer_types, setting


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    if (act := setting(c, "hidden_act")) != "silu":
        raise UnsupportedError(f"the activation {shown(act)} is not one of the Llama family's (silu)")
    heads, kv_heads, head_size = attention_sizes(c)
    norm = NormSpec("rms", setting(c, "rms_norm_eps"))
    mlp = MlpSpec(inner=setting(c, "intermediate_size"), activation="silu", gated=True)
    rope = rope_of(c, rotated_channels(c, head_size))
    qk_norm = norm if c["model_type"] in ("qwen3", "qwen3_moe") else None

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            window=window,
            rope=rope,
            qk_norm=qk_norm,
        )
        return LayerSpec(attention=attention, mlp=mlp, norm=norm)

    return DecoderSpec(
        width=setting(c, "hidden_size"),
        vocabulary=setting(c, "vocab_size"),
        context=context_of(c),
        layers=tuple(layer(window) for window in _windows(c)),
        norm=norm,
        tied=setting(c, "tie_word_embeddings"),
    )


def attention_sizes(c: Config) -> tuple[int, int, int]:
    """Return (heads, key heads, head size), checked against each other."""
    heads, width = setting(c, "num_attention_heads"), setting(c, "hidden_size")
    kv_heads = setting(c, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise FormatError(f"'num_attention_heads' is {heads}, which 'num_key_value_heads' = {kv_heads} cannot share")
    if (head_size := setting(c, "head_dim")) is None:
        if width % heads:
            raise FormatError(f"'hidden_size' is {width}, which 'num_attention_heads' = {heads} does not divide")
        head_size = width // heads
    if head_size % 2:
        raise FormatError(f"heads are {head_size} wide, and rotary positions need an even number ('head_dim')")
    return heads, kv_heads, head_size


def _windows(c: Config) -> tuple[int | None, ...]:
    """Mistral slides its window in every layer, Qwen only where `layer_types` or `max_window_layers` says so."""
    layers: int = setting(c, "num_hidden_layers")
    used: bool | None = setting(c, "use_sliding_window")
    if c.get("sliding_window") is None or c["model_type"] == "llama" or used is False:
        return (None,) * layers
    window: int = setting(c, "sliding_window")
    if kinds := layer_types(c, layers):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if c["model_type"] in _SLIDING:
        return (window,) * layers
    if not used:
        return (None,) * layers
    full = setting(c, "max_window_layers")
    return tuple(None if i < full else window for i in range(layers))


_SLIDING = ("mistral", "mixtral", "phi3")
FAMILY = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    spec=spec,
    names=lambda _: TensorNames(embedding="model.embed_tokens", layer="model.layers.{}", norm="model.norm"),
)
