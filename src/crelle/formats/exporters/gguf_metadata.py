"""What llama.cpp wants to know of a model besides its tensors, from its Hugging Face config."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.importers.gguf_architectures import ARCHITECTURES, Architecture
from crelle.formats.storage.io import shown

Array = np.ndarray[Any, Any]
_ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class Rope(NamedTuple):
    """Rotary positions as GGUF says them."""

    theta: float
    linear: float | None = None  # a factor for all frequencies
    factors: Array | None = None  # Llama 3: one divisor for each frequency


def architecture(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Return llama.cpp's name of a model's family, and its tensors' names."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURE_OF:
        known = ", ".join(_ARCHITECTURE_OF)
        raise UnsupportedError(f"GGUF export supports {known}, but this is a {shown(model_type)} model")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"llama.cpp runs this family with silu, but the model has {shown(config['hidden_act'])}")
    name = _ARCHITECTURE_OF[model_type]
    return name, ARCHITECTURES[name]


def head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def values(config: Mapping[str, Any], arch: Architecture) -> dict[str, int | float]:
    """Return the architecture's metadata without its prefix; floats are f32 in the file."""
    missing = next((k for k in (*arch.sizes, arch.epsilon[0]) if not isinstance(config.get(k), int | float)), None)
    if missing:
        raise FormatError(f"its config needs the number '{missing}'")
    found: dict[str, int | float] = {key: int(config[hf]) for hf, key in arch.sizes.items()}
    found["context_length"] = _context(config)
    found["attention.head_count_kv"] = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        found[key] = head_size(config)
    found[arch.epsilon[1]] = float(config[arch.epsilon[0]])
    return found


def _context(config: Mapping[str, Any]) -> int:
    """Return the longest context in which llama.cpp, which has no window for these families, computes the same."""
    length, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    slides = config["model_type"] == "mistral" or config.get("use_sliding_window") is True
    if config["model_type"] == "llama" or not slides or not isinstance(window, int):
        return length
    return min(length, window)


def rope(config: Mapping[str, Any]) -> Rope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` as older files have it."""
    p = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(p.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = p.get("rope_type") or p.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, linear=float(p["factor"]))
    if kind == "llama3":
        return Rope(theta, factors=_llama3(theta, head_size(config), p))
    raise UnsupportedError(f"GGUF export supports default, linear and llama3 rope scaling, not {shown(kind)}")


def _llama3(theta: float, size: int, p: Mapping[str, Any]) -> Array:
    """Return by what each frequency is divided: long wavelengths by the factor, short ones by 1, smooth in between."""
    low, high = float(p["low_freq_factor"]), float(p["high_freq_factor"])
    wavelength = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    smooth = np.clip((float(p["original_max_position_embeddings"]) / wavelength - low) / (high - low), 0.0, 1.0)
    divisors: Array = (1 / ((1 - smooth) / float(p["factor"]) + smooth)).astype(np.float32)
    return divisors
