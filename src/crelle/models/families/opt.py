"""OPT (arXiv 2205.01068): learned positions, biases, ReLU; norms before attention and feed-forward, in 350M behind.

Only the 350M model has an embedding narrower than its layers, hence the projections; it has no last norm.
"""

from collections.abc import Collection

from crelle.errors import UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.settings import setting

_ACTIVATIONS = ("relu", "gelu")  # gelu: Galactica
_FIRST = 2  # row of the first position; the rows before were for padding


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    if (act := setting(c, "activation_function")) not in _ACTIVATIONS:
        raise UnsupportedError(f"the activation {shown(act)} is not one of OPT's ({', '.join(_ACTIVATIONS)})")
    heads, width = setting(c, "num_attention_heads"), setting(c, "hidden_size")
    if width % heads:
        raise UnsupportedError(f"OPT's width {width} cannot be shared out among {heads} heads")
    before = setting(c, "do_layer_norm_before")
    norm = NormSpec("layer", 1e-5, affine=setting(c, "layer_norm_elementwise_affine"))
    head_size = width // heads
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_size=head_size,
        scale=head_size**-0.5,
        bias=setting(c, "enable_bias"),
    )
    mlp = MlpSpec(inner=setting(c, "ffn_dim"), activation=act, gated=False)
    layer = LayerSpec(attention=attention, mlp=mlp, norm=norm, placement="pre" if before else "post")
    return DecoderSpec(
        width=width,
        vocabulary=setting(c, "vocab_size"),
        context=setting(c, "max_position_embeddings"),
        layers=(layer,) * setting(c, "num_hidden_layers"),
        norm=norm if before and not setting(c, "_remove_final_layer_norm") else None,
        tied=setting(c, "tie_word_embeddings", True),
        words=setting(c, "word_embed_proj_dim", width),
        learned_positions=_FIRST,
    )


def names(tensors: Collection[str]) -> TensorNames:
    """Some checkpoints were saved without the outer `model`."""
    root = "decoder" if "decoder.embed_tokens.weight" in tensors else "model.decoder"
    return TensorNames(
        embedding=f"{root}.embed_tokens",
        positions=f"{root}.embed_positions",
        project_in=f"{root}.project_in",
        project_out=f"{root}.project_out",
        layer=f"{root}.layers.{{}}",
        norm=f"{root}.final_layer_norm",
        o="self_attn.out_proj",
        norm_attention="self_attn_layer_norm",
        norm_mlp="final_layer_norm",
        up="fc1",
        down="fc2",
    )


FAMILY = Family(model_types=("opt",), spec=spec, names=names, required_biases=True)
