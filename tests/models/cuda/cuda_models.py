"""Small models of every kind that the CUDA step runs, and their logits by the reference on a CPU."""

from typing import Any

import torch

from crelle.bench.model_shapes import RandomWeights
from crelle.models.loader import Model, build

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 256,
    "ffn_dim": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 256,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 20}
WIDE = {**LLAMA, "intermediate_size": 512, "num_attention_heads": 2}  # all epilogues encode
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 1024}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 20,
    "norm_weight_offset": 0.0,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
QWEN2_MOE = {
    **LLAMA,
    "model_type": "qwen2_moe",
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 136,
    "shared_expert_intermediate_size": 320,
    "mlp_only_layers": [1],
}
GPT_OSS = {  # inputs are no multiple of a block, nor of 128
    **LLAMA,
    "model_type": "gpt_oss",
    "hidden_size": 320,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 20,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
MIXTURES = {"mixtral": MIXTRAL, "qwen2-moe": QWEN2_MOE, "qwen3-moe": QWEN3_MOE, "gpt-oss": GPT_OSS}
CONFIGS = {
    "llama": LLAMA,
    "opt": OPT,
    "mistral": MISTRAL,
    "wide": WIDE,
    "gpt2": GPT2,
    "gemma3": GEMMA3,
}

# Schemes with quantized activations, and how far logits of a model of one layer may be from the reference's: 16-bit
# floats round some codes the other way, and a model on the CPU in 16 bits is 0.02, 0.2, 0.4 away (8, 4, 3 bits).
ATOM = {
    "atom:w=4,a=4,group=128,outliers=128": 0.4,
    "atom:w=4,a=8,group=128,outliers=128": 0.05,
    "atom:w=8,a=8,group=128,outliers=0": 0.05,
    "atom:w=3,a=3,group=64,outliers=64": 0.7,
    "atom:w=4,a=4,levels=2,group=128,outliers=128": 0.4,
    "atom:w=4,a=8,levels=2,group=128,outliers=128": 0.05,
}


def make(config: dict[str, object], scheme: str, device: str, dtype: torch.dtype | None = None) -> Model:
    where = torch.device(device)
    return build(RandomWeights(config, scheme, where, seed=3), where, dtype=dtype)


def reference_logits(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """What a model of `make` computes on the CPU, in f32, by the integer reference; its weights are on a GPU."""
    source = model.build.weights

    class OnCpu:
        """The weights, brought over: random ones differ from device to device."""

        def __getattr__(self, name: str) -> Any:
            return getattr(source, name)

        def read(self, name: str) -> torch.Tensor:
            return source.read(name).cpu()

        def matrix(self, module: str) -> Any:
            return source.matrix(module).to("cpu")

    plain = build(OnCpu(), torch.device("cpu"), dtype=torch.float32)  # type: ignore[arg-type]
    with torch.inference_mode():
        return plain(tokens, plain.new_cache(len(tokens)))
