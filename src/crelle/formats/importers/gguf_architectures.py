"""The architectures that are read from GGUF, as data: Hugging Face's name of every tensor and config value.

The keys are those of llama.cpp's `general.architecture`. Mistral's files say "llama".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crelle.errors import UnsupportedError

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's rope scaling; Hugging Face has it in the config
_KINDS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the names of a GGUF file translate to those of a Hugging Face model."""

    model_class: str  # transformers' class
    model_type: str
    layers: str  # the prefix of a layer's tensors, before its index
    outer: Mapping[str, str]  # tensors outside the layers
    inner: Mapping[str, str]  # tensors of a layer
    sizes: Mapping[str, str]  # config keys of integers, from GGUF's keys (without the architecture)
    epsilon: tuple[str, str]  # config key and GGUF key of the norms' epsilon
    constants: Mapping[str, Any] = field(default_factory=dict)  # config values that GGUF leaves unsaid
    rope: bool = True  # rope with grouped heads, as against learned positions
    interleaved: Mapping[str, str] = field(default_factory=dict)
    """Matrices whose rows llama.cpp reorders (rope pairs side by side), and the config key of their heads."""

    def hf_name(self, name: str) -> str | None:
        """Return the Hugging Face name of a GGUF tensor; None for what Hugging Face has in the config."""
        if name == ROPE_FACTORS and self.rope:
            return None
        stem, _, kind = name.rpartition(".")
        if kind in _KINDS and stem in self.outer:
            return f"{self.outer[stem]}.{kind}"
        m = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem, re.ASCII)
        if kind in _KINDS and m and m[2] in self.inner:
            return f"{self.layers}.{m[1]}.{self.inner[m[2]]}.{kind}"
        raise UnsupportedError(f"the GGUF tensor '{name}' does not belong to a '{self.model_type}' model")

    def gguf_name(self, name: str) -> str:
        """Return GGUF's name of a Hugging Face tensor."""
        stem, _, kind = name.rpartition(".")
        outer = {hf: ours for ours, hf in self.outer.items()}
        if kind in _KINDS and stem in outer:
            return f"{outer[stem]}.{kind}"
        layer, _, part = stem.removeprefix(f"{self.layers}.").partition(".")
        inner = {hf: ours for ours, hf in self.inner.items()}
        if kind in _KINDS and stem.startswith(f"{self.layers}.") and layer.isdecimal() and part in inner:
            return f"blk.{layer}.{inner[part]}.{kind}"
        raise UnsupportedError(f"the tensor '{name}' does not belong to a GGUF file of a '{self.model_type}' model")

    def interleaved_heads(self, name: str) -> str | None:
        """Return the config key of the heads of a tensor whose rows llama.cpp reorders; None for all others."""
        module, _, _ = name.rpartition(".")
        return self.interleaved.get(module.removeprefix(f"{self.layers}.").partition(".")[2])


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_RMS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_SILU = {"mlp_bias": False, "hidden_act": "silu"}

ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        "model.layers",
        _OUTER,
        _INNER,
        _SIZES,
        _RMS,
        _SILU,
        interleaved={"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", "model.layers", _OUTER, _INNER, _SIZES, _RMS, _SILU),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", "model.layers", _OUTER, _INNER, _SIZES, _RMS, _SILU),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        "model.layers",
        _OUTER,
        _INNER,
        _SIZES,
        _RMS,
        _SILU,
        interleaved={"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"},
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        "model.layers",
        _OUTER,
        {k: v for k, v in _INNER.items() if k not in ("attn_norm", "ffn_norm")}
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        _SIZES,
        _RMS,
        _SILU,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        "model.layers",
        _OUTER,
        {k: v for k, v in _INNER.items() if k != "ffn_gate"} | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _SIZES,
        ("norm_epsilon", "attention.layer_norm_epsilon"),
        {"use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "model.layers",
        _OUTER,
        _INNER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _SIZES,
        _RMS,
        # llama.cpp stores the norms with their offset of 1 added: see `norm_weight_offset` in Weights.
        {"hidden_activation": "gelu_pytorch_tanh", "norm_weight_offset": 0},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        "transformer.h",
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",  # q, k and v joined, as Hugging Face has them
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "n_embd": "embedding_length",
            "n_inner": "feed_forward_length",
            "n_layer": "block_count",
            "n_head": "attention.head_count",
            "n_positions": "context_length",
        },
        ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
        {"activation_function": "gelu_new"},
        rope=False,
    ),
}
