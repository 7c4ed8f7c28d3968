"""OLMo 2: Llama with norms after attention and feed-forward instead of before them, and of all heads of q and of k."""

from dataclasses import replace

from crelle.kernels.spec import DecoderSpec, LayerSpec
from crelle.models.families import llama
from crelle.models.families.base import Config, Family


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    base = llama.spec(c)

    def layer(s: LayerSpec) -> LayerSpec:
        attention = replace(s.attention, qk_norm=s.norm, whole_qk_norm=True)
        return replace(s, attention=attention, placement="reordered")

    return replace(base, layers=tuple(map(layer, base.layers)))


_NAMES = replace(
    llama.FAMILY.names(()), norm_attention="post_attention_layernorm", norm_mlp="post_feedforward_layernorm"
)
FAMILY = Family(model_types=("olmo2",), spec=spec, names=lambda _: _NAMES)
