"""Hugging Face models as GGUF files, with the changes that llama.cpp's converter makes; names by the gguf package."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from tiny_gguf import Array, byte_tokenizer

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 96,
    "n_inner": 160,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "vocab_size": 260,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 260,
    "tie_word_embeddings": True,
}
_SMALL = {
    "vocab_size": 260,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SMOLLM3 = _SMALL | {"model_type": "smollm3", "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e6}}
OLMO2 = SMOLLM3 | {"model_type": "olmo2"}
STARCODER2 = _SMALL | {"model_type": "starcoder2", "norm_epsilon": 1e-5, "rope_parameters": {"rope_theta": 1e6}}
_ARCHITECTURES = {
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
}
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def random_tensors(config: Mapping[str, Any]) -> dict[str, Array]:
    """Return random f32 tensors under their Hugging Face names, in Hugging Face's layout."""
    random = np.random.default_rng(0)

    def of(*shape: int) -> Array:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    if config["model_type"] == "gpt2":
        width, inner = config["n_embd"], config["n_inner"]
        matrices = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        matrices |= {"mlp.c_fc": (width, inner), "mlp.c_proj": (inner, width)}  # [inputs, outputs]
        tensors = {
            "transformer.wte.weight": of(config["vocab_size"], width),
            "transformer.wpe.weight": of(config["n_positions"], width),
        }
        for at in (f"transformer.h.{i}" for i in range(config["n_layer"])):
            tensors |= {f"{at}.{n}.weight": of(*s) for n, s in matrices.items()}
            tensors |= {f"{at}.{n}.bias": of(s[1]) for n, s in matrices.items()}
            tensors |= {f"{at}.{n}.{k}": of(width) for n in ("ln_1", "ln_2") for k in ("weight", "bias")}
        return tensors | {f"transformer.ln_f.{k}": of(width) for k in ("weight", "bias")}
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    matrices = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
    matrices = {f"self_attn.{n}_proj": s for n, s in matrices.items()}
    matrices |= {f"mlp.{n}_proj": s for n, s in (("gate", (inner, width)), ("up", (inner, width)))}
    matrices["mlp.down_proj"] = (width, inner)
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    tensors = {"model.embed_tokens.weight": of(config["vocab_size"], width), "model.norm.weight": of(width)}
    for at in (f"model.layers.{i}" for i in range(config["num_hidden_layers"])):
        tensors |= {f"{at}.{n}.weight": of(*s) for n, s in matrices.items()}
        tensors |= {f"{at}.{n}.weight": of(width) for n in norms}
        tensors |= {f"{at}.self_attn.{n}_norm.weight": of(head) for n in "qk"}
    return tensors


def converted(config: Mapping[str, Any], name: str, w: Array) -> Array:
    """Return a Hugging Face tensor as llama.cpp's converter writes it."""
    if config["model_type"] == "gpt2" and name.endswith(_CONV1D):
        return np.ascontiguousarray(w.T)
    if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
        return w + np.float32(1)
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if config["model_type"] == "smollm3" and name.endswith(f"{part}.weight"):  # rope pairs side by side
            by_pair = w.reshape(config[heads], 2, -1, w.shape[1]).swapaxes(1, 2)
            return np.ascontiguousarray(by_pair).reshape(w.shape)
    return w


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array] | None = None,
    *,
    kind: Type = Type.F32,
    change: Callable[[GGUFWriter], None] | None = byte_tokenizer,
    without: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
) -> Path:
    """Write a model of a Hugging Face config: matrices as `kind` where their rows fill its blocks, others f32.

    without: names of metadata to leave out.  plain: ends of the names of matrices that stay f32.
    """
    arch = _ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    gpt2 = config["model_type"] == "gpt2"
    layers = config["n_layer" if gpt2 else "num_hidden_layers"]
    said = {
        "context_length": config["n_positions" if gpt2 else "max_position_embeddings"],
        "embedding_length": config["n_embd" if gpt2 else "hidden_size"],
        "block_count": layers,
        "feed_forward_length": config["n_inner" if gpt2 else "intermediate_size"],
        "head_count": config["n_head" if gpt2 else "num_attention_heads"],
    }
    if gpt2:
        said["layer_norm_eps"] = config["layer_norm_epsilon"]
    else:
        said |= {
            "head_count_kv": config["num_key_value_heads"],
            "layer_norm_eps" if "norm_epsilon" in config else "layer_norm_rms_eps": config.get(
                "norm_epsilon", config.get("rms_norm_eps")
            ),
            "rope_freq_base": 1e6,
        }
    if "head_dim" in config:
        said |= {"key_length": config["head_dim"], "value_length": config["head_dim"]}
    if "sliding_window" in config:
        said["sliding_window"] = config["sliding_window"]
    for key, value in said.items():
        if key not in without:
            getattr(writer, f"add_{key}")(value)
    if change:
        change(writer)
    names = gguf.get_tensor_name_map(arch, layers)
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    for name, w in (random_tensors(config) if tensors is None else tensors).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        w = converted(config, name, w)
        as_kind = kind if w.ndim == 2 and w.shape[1] % block == 0 and not name.endswith(plain) else Type.F32
        writer.add_tensor(stored, gguf.quants.quantize(w, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
