"""A small random mixture of experts, and its family as somebody outside of the tree would describe it."""

from pathlib import Path
from typing import Any

import torch
import transformers

from crelle.kernels.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.rope import rope_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 259,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
NAMES = {"embedding": "model.embed_tokens", "layer": "model.layers.{}"}


def attention_of(c: Config, *, kv_heads: int, rotated: float = 1.0, bias: bool = False) -> AttentionSpec:
    """Rope over a share of each head."""
    size = c["hidden_size"] // c["num_attention_heads"]
    rope = rope_of(c, int(size * rotated))
    heads = c["num_attention_heads"]
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_size=size, scale=size**-0.5, rope=rope, bias=bias)


def decoder_of(c: Config, layer: LayerSpec) -> DecoderSpec:
    """Equal layers, and their norm once more before the head."""
    return DecoderSpec(
        width=c["hidden_size"],
        vocabulary=c["vocab_size"],
        context=c["max_position_embeddings"],
        layers=(layer,) * c["num_hidden_layers"],
        norm=layer.norm,
        tied=False,
    )


def mixtral(c: Config) -> DecoderSpec:
    attention = attention_of(c, kv_heads=c["num_key_value_heads"])
    experts = ExpertsSpec(count=c["num_local_experts"], top=c["num_experts_per_tok"])
    mlp = MlpSpec(inner=c["intermediate_size"], activation="silu", gated=True, experts=experts)
    layer = LayerSpec(attention=attention, mlp=mlp, norm=NormSpec("rms", c["rms_norm_eps"]))
    return decoder_of(c, layer)


MIXTRAL = Family(
    model_types=("mixtral",),
    spec=mixtral,
    names=lambda _: TensorNames(
        **NAMES,
        norm="model.norm",
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        gate="w1",
        up="w3",
        down="w2",
    ),
)


def mixtral_config(**changes: Any) -> transformers.MixtralConfig:
    sizes = SIZES | {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2} | changes
    return transformers.MixtralConfig(**sizes)


def randomize(model: torch.nn.Module) -> None:
    """Give it weights that are large enough for its tokens to differ."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=p.shape[-1] ** -0.5)
            else:
                p.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.2)


def write_mixtral(to: Path, **changes: Any) -> Path:
    torch.manual_seed(7)
    model = transformers.MixtralForCausalLM(mixtral_config(**changes))
    randomize(model)
    model.save_pretrained(to)
    return to
