"""A small gpt-oss as it is published: experts as blocks and scales of MXFP4, everything else in 16 or 32 bits."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import write_tokenizer
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def write_gpt_oss(to: Path, **changes: Any) -> Path:
    torch.manual_seed(6)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES | changes))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2)
    model.save_pretrained(to)
    write_tokenizer(to)
    tensors, g = load_file(to / "model.safetensors"), torch.Generator().manual_seed(7)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (E, N, K // 32, 16), generator=g, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 124, (E, N, K // 32), generator=g, dtype=torch.uint8)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (to / "config.json").write_text(json.dumps(config))
    return to
