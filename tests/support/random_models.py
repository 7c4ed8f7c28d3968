"""Small random models of several families, as transformers saves them; of sizes that vLLM's CPU kernels take."""

from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = {"intermediate_size": 192, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
_GEMMA = {**_GATED, "tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": _GATED,
    "Qwen2": _GATED | {"use_sliding_window": False},
    "Gemma3": _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "OPT": {"ffn_dim": 192, "word_embed_proj_dim": 128},
    "Bert": {"intermediate_size": 192, "hidden_act": "gelu"},
    "GPT2": {"n_embd": 128, "n_head": 4, "n_layer": 2},
    "Mixtral": _GATED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": _GATED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def write_random(to: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random model; large enough weights that its tokens are not all the same."""
    torch.manual_seed(1)
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**_SIZES | CONFIGS[family] | changes)
    head = {"GPT2": "GPT2LMHeadModel", "Bert": "BertModel"}.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, head)(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                # A tied embedding of the usual size would only ever repeat the last token.
                p.normal_(std=0.02 if family.startswith("Gemma") and "embed" in name else p.shape[-1] ** -0.5)
            elif "norm" in name or name.endswith("bias"):
                p.add_(0.2 * torch.randn_like(p))
    model.to(dtype).save_pretrained(to)
    return to
