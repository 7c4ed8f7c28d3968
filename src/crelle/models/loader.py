"""From a path to a model that runs: the config's model type says which family it is."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.io import shown
from crelle.formats.open import Weights, open_weights
from crelle.formats.ownership import CONFIG
from crelle.models import llama, opt
from crelle.models.builder import Builder
from crelle.models.llama import Llama, LlamaConfig
from crelle.models.opt import OPT, OPTConfig
from crelle.models.precisions import offered

_LAYER = re.compile(r"\.layers\.(\d{1,9})\.")
Config = LlamaConfig | OPTConfig
Model = Llama | OPT
CONFIGS: dict[str, type[LlamaConfig] | type[OPTConfig]] = {
    **dict.fromkeys(llama.MODEL_TYPES, LlamaConfig),
    **dict.fromkeys(opt.MODEL_TYPES, OPTConfig),
}


def choose_device(device: str) -> torch.device:
    """Turn cpu | cuda | auto into a device, or say why not."""
    if device not in ("cpu", "cuda", "auto"):
        raise UnsupportedError(f"there is no device '{device}'; choose cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device is visible to torch; use --device cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def read_config(weights: Weights) -> Config:
    """Return the model's config in our terms, or say what is wrong with it."""
    where = weights.path / CONFIG if weights.path.is_dir() else weights.path
    try:
        kind = weights.config.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIGS:
            raise UnsupportedError(f"model type {shown(str(kind))} is not one that Crelle runs ({', '.join(CONFIGS)})")
        return CONFIGS[kind].from_hf(weights.config)
    except CrelleError as e:
        raise type(e)(f"{where}: {e}") from e


def _require_layers(weights: Weights, names: Collection[str], layers: int) -> None:
    """Say which layer is missing before any is built."""
    present = {int(m[1]) for name in names if (m := _LAYER.search(name))}
    if (missing := next((i for i in range(layers) if i not in present), None)) is not None:
        raise FormatError(
            f"{weights.path}: the model's config says that it has {layers} layers ('num_hidden_layers'), but there is "
            f"no tensor of layer {missing}"
        )


def tied_to(weights: Weights) -> str | None:
    """Return the embedding that is also the output head's matrix, where the head has none of its own."""
    config = read_config(weights)
    if not config.tied:
        return None
    return f"{opt.root(weights.names())}.embed_tokens" if isinstance(config, OPTConfig) else "model.embed_tokens"


def never_fused(weights: Weights) -> str | None:
    """Return why no model of this family decodes in the fused C++ step, or None where crelle.models.fused decides."""
    return opt.NOT_FUSED if isinstance(read_config(weights), OPTConfig) else None


def build(
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    bits: int | None = None,
) -> Model:
    """Build the model that the weights' config describes. Default dtype: f32 on a CPU, f16 on a GPU.

    `bits` chooses a precision of a nested checkpoint; default: the finest.
    """
    config = read_config(weights)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.float16)
    made: dict[str, Any] | None = {} if offered(weights) else None  # to be shared among precisions, where there are
    names = frozenset(weights.names())
    _require_layers(weights, names, config.layers)
    builder = Builder(weights, names, dtype, device, kernel, bits, made)
    model = (OPT(builder, config) if isinstance(config, OPTConfig) else Llama(builder, config)).eval()
    if kernel and all(layer.kernel != kernel for layer in model.linears()):
        raise UnsupportedError(f"kernel '{kernel}' has nothing to do in {weights.path}: no matrix there is quantized")
    return model


def load(
    path: str | Path, device: str = "auto", kernel: str | None = None, bits: int | None = None
) -> tuple[Model, Weights]:
    """Open a path and build its model."""
    weights = open_weights(path)
    return build(weights, choose_device(device), kernel=kernel, bits=bits), weights
