"""BERT (arXiv 1810.04805) and the sentence encoders made from it, such as all-MiniLM: attention in both directions.

Layer norms after attention and feed-forward; learned positions; the first row of the token types is added to a single
text. The pooler and the heads of pre-training are not run: `crelle embed` averages the last layer's states.
"""

from collections.abc import Collection

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import Activation, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.settings import SETTINGS, Setting, setting

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
_KEYS = SETTINGS | {
    "layer_norm_eps": Setting(float, 0, 1, 1e-12, "added to the variance in norms"),
    "type_vocab_size": Setting(int, 1, 1 << 16, 2, "rows of the token types"),
    "position_embedding_type": Setting(str, default="absolute", means="kind of positions"),
    "is_decoder": Setting(bool, default=False, means="attention sees no later tokens"),
}


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    if (act := setting(c, "hidden_act", "gelu")) not in _ACTIVATIONS:
        raise UnsupportedError(f"the activation {shown(act)} is not one of BERT's ({', '.join(_ACTIVATIONS)})")
    if (kind := setting(c, "position_embedding_type", table=_KEYS)) != "absolute":
        raise UnsupportedError(f"BERT with {shown(kind)} positions is not supported, only with absolute ones")
    if setting(c, "is_decoder", table=_KEYS):
        raise UnsupportedError("BERT as a decoder ('is_decoder') is not supported")
    width, heads = setting(c, "hidden_size"), setting(c, "num_attention_heads")
    if width % heads:
        raise FormatError(f"'hidden_size' is {width}, which 'num_attention_heads' = {heads} does not divide")
    size, norm = width // heads, NormSpec("layer", setting(c, "layer_norm_eps", table=_KEYS))
    attention = AttentionSpec(heads=heads, kv_heads=heads, head_size=size, scale=size**-0.5, bias=True, causal=False)
    mlp = MlpSpec(inner=setting(c, "intermediate_size"), activation=_ACTIVATIONS[act], gated=False)
    layer = LayerSpec(attention=attention, mlp=mlp, norm=norm, placement="post")
    return DecoderSpec(
        width=width,
        vocabulary=setting(c, "vocab_size"),
        context=setting(c, "max_position_embeddings", 512),
        layers=(layer,) * setting(c, "num_hidden_layers"),
        norm=None,
        tied=True,
        learned_positions=0,
        token_types=setting(c, "type_vocab_size", table=_KEYS),
        embedding_norm=norm,
    )


def names(tensors: Collection[str]) -> TensorNames:
    """Models with a head have an outer `bert`."""
    root = "" if "embeddings.word_embeddings.weight" in tensors else "bert."
    return TensorNames(
        embedding=f"{root}embeddings.word_embeddings",
        positions=f"{root}embeddings.position_embeddings",
        token_types=f"{root}embeddings.token_type_embeddings",
        embedding_norm=f"{root}embeddings.LayerNorm",
        layer=f"{root}encoder.layer.{{}}",
        **{"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value"},
        o="attention.output.dense",
        norm_attention="attention.output.LayerNorm",
        norm_mlp="output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
    )


FAMILY = Family(
    model_types=("bert",), spec=spec, names=names, dropped=("embeddings.position_ids",), required_biases=True
)
