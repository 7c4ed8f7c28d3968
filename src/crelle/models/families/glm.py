"""GLM-4: Llama with rope of neighbouring channels in half of each head, and gate and up in one matrix.

The newer GLM-4 (0414) has norms after attention and feed-forward too (sandwich).
"""

from dataclasses import replace

from crelle.kernels.spec import DecoderSpec, LayerSpec
from crelle.models.families import llama
from crelle.models.families.base import Config, Family
from crelle.models.families.phi3 import JOINED_MLP
from crelle.models.rope import rope_of, rotated_channels


def spec(c: Config) -> DecoderSpec:
    """Read a Hugging Face config."""
    base = llama.spec(c)
    head = base.head_size
    rope = rope_of(c, rotated_channels(c, head, 0.5), interleaved=True)

    def layer(s: LayerSpec) -> LayerSpec:
        attention = replace(s.attention, rope=rope)
        return replace(s, attention=attention, placement="sandwich" if c["model_type"] == "glm4" else "pre")

    return replace(base, layers=tuple(map(layer, base.layers)))


_NAMES = replace(
    llama.FAMILY.names(()), post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"
)
FAMILY = Family(model_types=("glm", "glm4"), spec=spec, names=lambda _: _NAMES, stored=(JOINED_MLP,))
