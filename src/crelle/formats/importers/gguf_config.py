"""The Hugging Face config that the metadata of a GGUF file amounts to."""

from typing import Any

import numpy as np

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.importers.gguf_architectures import ROPE_FACTORS, Architecture
from crelle.formats.importers.gguf_metadata import Metadata
from crelle.formats.storage.io import shown

_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_GEMMA3_27B_LAYERS = 62


def hf_config(m: Metadata, arch: Architecture) -> dict[str, Any]:
    """Return config.json as the original model had it."""
    m.count("attention.head_count")
    config: dict[str, Any] = {"architectures": [arch.model_class], "model_type": arch.model_type}
    config |= {key: m.of_arch(source) for key, source in arch.sizes.items()}
    config[arch.epsilon[0]] = m.decimal(arch.epsilon[1])
    if arch.rope:
        heads = config["num_attention_heads"]
        config["num_key_value_heads"] = m.count("attention.head_count_kv", heads)
        config["head_dim"] = m.of_arch("attention.key_length", config["hidden_size"] // heads)
        config["rope_parameters"] = _rope(m)
        config["attention_bias"] = "blk.0.attn_q.bias" in m.tensors
    config |= {
        "vocab_size": m.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in m.tensors,
        **arch.constants,
        "bos_token_id": m.get("tokenizer.ggml.bos_token_id", -1),
        "eos_token_id": m.get("tokenizer.ggml.eos_token_id", -1),
    }
    return config | _gemma3(m, config) if arch.model_type == "gemma3_text" else config


def _rope(m: Metadata) -> dict[str, Any]:
    theta = m.decimal("rope.freq_base", 10000.0)
    # llama.cpp takes a factor without a type for a linear one.
    kind = m.of_arch("rope.scaling.type", "linear" if m.of_arch("rope.scaling.factor", None) else "none")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": m.of_arch("rope.scaling.factor")}
    if kind != "none":
        raise UnsupportedError(f"{m.path} uses rope scaling '{kind}', which Crelle does not read from GGUF")
    if ROPE_FACTORS not in m.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    return _llama3_rope(m, theta)


def _llama3_rope(m: Metadata, theta: float) -> dict[str, Any]:
    """Find the Llama 3 parameters that give the file's table of factors."""
    info = m.tensors[ROPE_FACTORS]
    if info.kind != "F32":
        raise FormatError(f"{m.path}: '{ROPE_FACTORS}' should be F32, but is {info.kind}")
    table = m.header.array(info).flatten()
    found = float(table.max())
    wavelength = 2 * np.pi * theta ** (np.arange(len(table)) / len(table))
    for original in (8192, 4096, 16384):
        smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / found + smooth), table, rtol=1e-3):
            sizes = {"factor": found, "original_max_position_embeddings": original}
            return {**_LLAMA3_ROPE, "rope_theta": theta, **sizes}
    raise UnsupportedError(f"{m.path} has rope factors that are not those of Llama 3")


def _gemma3(m: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has: windows by layer, a rope for each kind of layer, a scale of its own for the scores."""
    kinds = _layer_types(m)
    # llama.cpp stores no scale: the 27B model has one of its own, and is known by its number of layers.
    large = len(kinds) == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    local = {"rope_type": "default", "rope_theta": m.decimal("rope.freq_base_swa", 10000.0)}
    extra = {
        "layer_types": kinds,
        "sliding_window": m.of_arch("attention.sliding_window", None),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "query_pre_attn_scalar": scalar,
    }
    if cap := m.of_arch("final_logit_softcapping", 0.0):
        extra["final_logit_softcapping"] = float(cap)
    return extra


def _layer_types(m: Metadata) -> list[str]:
    """Return the kind of each layer: every sixth attends to everything, unless the file says otherwise."""
    layers = m.count("block_count")
    if layers > len(m.tensors):
        raise FormatError(f"{m.path} claims {layers} layers, but has only {len(m.tensors)} tensors")
    pattern = m.of_arch("attention.sliding_window_pattern", 6)
    if not m.of_arch("attention.sliding_window", 0):
        sliding = [False] * layers
    elif isinstance(pattern, list) and len(pattern) == layers:
        sliding = [bool(s) for s in pattern]
    elif type(pattern) is int and pattern >= 0:  # a period, whose last layer is full; 0: none is
        sliding = [pattern == 0 or (i + 1) % pattern != 0 for i in range(layers)]
    else:
        raise FormatError(
            f"{m.path}: '{m.arch}.attention.sliding_window_pattern' should be a period or a value for each layer, "
            f"not {shown(pattern)}"
        )
    return ["sliding_attention" if s else "full_attention" for s in sliding]
