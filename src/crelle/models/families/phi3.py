"""Phi-3, Phi-4: Llama with q, k and v in one matrix, gate and up in another; Phi-4-mini rotates a part of each head."""

from crelle.models.families import llama
from crelle.models.families.base import Family, StoredMatrix

JOINED_MLP = StoredMatrix(module="mlp.gate_up_proj", parts=("mlp.gate_proj", "mlp.up_proj"))
FAMILY = Family(
    model_types=("phi3",),
    spec=llama.spec,
    names=llama.FAMILY.names,
    stored=(
        StoredMatrix(
            module="self_attn.qkv_proj",
            parts=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            split="qkv",
        ),
        JOINED_MLP,
    ),
)
