"""GPT-2: layer norms, learned positions, a plain gelu feed-forward, biases.

Its linears are stored as Conv1D, transposed, with q, k and v as one matrix; crelle.models.tensor_view takes them apart.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import Activation, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, StoredMatrix, TensorNames
from crelle.models.settings import SETTINGS, Setting, setting

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
KEYS = SETTINGS | {
    "n_embd": Setting(int, 1, 1 << 20, means="width of the residual stream"),
    "n_layer": Setting(int, 1, 1 << 12, means="layers"),
    "n_head": Setting(int, 1, 1 << 14, means="heads"),
    "n_inner": Setting(int, 1, 1 << 22, None, "width of the feed-forward; default: 4 n_embd"),
    "n_positions": Setting(int, 1, 1 << 24, 1024, "tokens of the context"),
    "layer_norm_epsilon": Setting(float, 0, 1, 1e-5, "added to the variance in norms"),
    "scale_attn_weights": Setting(bool, default=True, means="scores are divided by the root of the head size"),
    "scale_attn_by_inverse_layer_idx": Setting(bool, default=False, means="and by the number of the layer"),
    "add_cross_attention": Setting(bool, default=False, means="layers attend to an encoder too"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    get: Any = partial(setting, c, table=KEYS)
    if (act := get("activation_function", "gelu_new")) not in ACTIVATIONS:
        raise UnsupportedError(f"the activation {shown(act)} is not one of GPT-2's ({', '.join(ACTIVATIONS)})")
    if get("add_cross_attention"):
        raise UnsupportedError("GPT-2 with an encoder beside it ('add_cross_attention') is not supported")
    width, heads = get("n_embd"), get("n_head")
    if width % heads:
        raise FormatError(f"'n_embd' is {width}, which 'n_head' = {heads} does not divide")
    size = width // heads
    scale = size**-0.5 if get("scale_attn_weights") else 1.0
    norm = NormSpec("layer", get("layer_norm_epsilon"))
    mlp = MlpSpec(inner=get("n_inner", 4 * width), activation=ACTIVATIONS[act], gated=False)

    def layer(i: int) -> LayerSpec:
        by = i + 1 if get("scale_attn_by_inverse_layer_idx") else 1
        attention = AttentionSpec(heads=heads, kv_heads=heads, head_size=size, scale=scale / by, bias=True)
        return LayerSpec(attention=attention, mlp=mlp, norm=norm)

    return DecoderSpec(
        width=width,
        vocabulary=get("vocab_size"),
        context=get("n_positions"),
        layers=tuple(map(layer, range(get("n_layer")))),
        norm=norm,
        tied=get("tie_word_embeddings", True),
        learned_positions=0,
    )


def names(tensors: Collection[str]) -> TensorNames:
    """The first checkpoints were saved without the outer `transformer`."""
    root = "" if "wte.weight" in tensors else "transformer."
    return TensorNames(
        embedding=f"{root}wte",
        positions=f"{root}wpe",
        layer=f"{root}h.{{}}",
        norm=f"{root}ln_f",
        **{"q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.o_proj"},
        norm_attention="ln_1",
        norm_mlp="ln_2",
        up="mlp.up_proj",
        down="mlp.down_proj",
    )


def _conv1d(module: str, *parts: str) -> StoredMatrix:
    return StoredMatrix(module=module, parts=parts, transposed=True)


FAMILY = Family(
    model_types=("gpt2",),
    spec=spec,
    names=names,
    stored=(
        _conv1d("attn.c_attn", "attn.q_proj", "attn.k_proj", "attn.v_proj"),
        _conv1d("attn.c_proj", "attn.o_proj"),
        _conv1d("mlp.c_fc", "mlp.up_proj"),
        _conv1d("mlp.c_proj", "mlp.down_proj"),
    ),
    dropped=(".attn.bias", ".attn.masked_bias"),  # the causal mask
    required_biases=True,
)
