"""Which matrices Hugging Face stores the other way round.

A linear layer's weight is [outputs, inputs]. GPT-2 is older than that custom: its layers (Conv1D in transformers) are
stored [inputs, outputs], under names that look like any other.
"""

from collections.abc import Mapping
from typing import Any

_CONV1D = {"gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


def is_conv1d(config: Mapping[str, Any], name: str) -> bool:
    """Tell whether Hugging Face's own files store the tensor `name` as [inputs, outputs]."""
    family = config.get("model_type")
    ends = _CONV1D.get(family, ()) if isinstance(family, str) else ()
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.endswith(tuple(f".{end}" for end in ends))
