"""Random models of several families as Hugging Face directories, and their logits by several roads."""

from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import write_tokenizer
from torch import Tensor

from crelle.models.loader import load

COMMON = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 258}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SMALL, "intermediate_size": 96, "head_dim": 16}),
    "gemma3": (
        "Gemma3",
        {**SMALL, "intermediate_size": 96, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6},
    ),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "opt": (
        "OPT",
        {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    ),
    "phi": ("Phi", {**SMALL, "num_key_value_heads": 4, "intermediate_size": 96}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SMALL,
            "head_dim": 16,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mixtral": ("Mixtral", {**SMALL, "intermediate_size": 32, "num_local_experts": 4, "head_dim": 16}),
    "gpt_neox": ("GPTNeoX", {**SMALL, "intermediate_size": 96}),
    "phi3": ("Phi3", {**SMALL, "intermediate_size": 96}),
    "glm4": ("Glm4", {**SMALL, "intermediate_size": 96, "head_dim": 16}),
}


def write_model(family: str, to: Path, **changes: Any) -> Path:
    """Write a random model with a byte-level tokenizer; norms and biases are random too."""
    name, settings = FAMILIES[family]
    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(
        **{"max_position_embeddings": 128, "pad_token_id": None, **COMMON, **settings, **changes}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.1 * torch.randn_like(p)
            else:
                p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


def tokens(count: int = 24) -> Tensor:
    return torch.randint(0, 256, (2, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(tokens()).logits
    return found.float()


@torch.no_grad()
def own_logits(checkpoint: Path, bits: int | None = None) -> Tensor:
    """Those of Crelle's own engine."""
    model, _ = load(checkpoint, device="cpu", bits=bits)
    return torch.stack([model(row[None], model.new_cache())[0] for row in tokens()])


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference against the largest logit."""
    return float((got - want).abs().max() / want.abs().max())
