"""GPT-J: attention and feed-forward in parallel after one layer norm; rope of neighbouring channels."""

from functools import partial
from typing import Any

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.families.gpt2 import ACTIVATIONS, KEYS
from crelle.models.rope import rope_of
from crelle.models.settings import Setting, setting

_KEYS = KEYS | {"rotary_dim": Setting(int, 2, 1 << 12, None, "channels of a head that are rotated; default: all")}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=_KEYS)
    if (act := get("activation_function", "gelu_new")) not in ACTIVATIONS:
        raise UnsupportedError(f"the activation {shown(act)} is not one of GPT-J's ({', '.join(ACTIVATIONS)})")
    width, heads = get("n_embd"), get("n_head")
    if width % heads:
        raise FormatError(f"'n_embd' is {width}, which 'n_head' = {heads} does not divide")
    size = width // heads
    rotated = get("rotary_dim", size)
    if rotated % 2 or rotated > size:
        raise FormatError(
            f"'rotary_dim' is {rotated}, which should be an even number of at most {size}, a head's width"
        )
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_size=size,
        scale=size**-0.5,
        rope=rope_of({}, rotated, interleaved=True),
    )
    norm = NormSpec("layer", get("layer_norm_epsilon"))
    mlp = MlpSpec(inner=get("n_inner", 4 * width), activation=ACTIVATIONS[act], gated=False)
    layer = LayerSpec(attention=attention, mlp=mlp, norm=norm, parallel=True, shared_norm=True)
    return DecoderSpec(
        width=width,
        vocabulary=get("vocab_size"),
        context=get("n_positions", 2048),
        layers=(layer,) * get("n_layer"),
        norm=norm,
        tied=get("tie_word_embeddings"),
    )


_NAMES = TensorNames(
    embedding="transformer.wte",
    layer="transformer.h.{}",
    norm="transformer.ln_f",
    **{"q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.out_proj"},
    norm_attention="ln_1",
    up="mlp.fc_in",
    down="mlp.fc_out",
)
FAMILY = Family(
    model_types=("gptj",),
    spec=spec,
    names=lambda _: _NAMES,
    dropped=(".attn.bias", ".attn.masked_bias"),  # the causal mask
)
