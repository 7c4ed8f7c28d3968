"""From a path to a model that runs: the config's model type says which family it is."""

from pathlib import Path
from typing import Any

import torch

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.source import Weights, open_weights
from crelle.models import llama, opt
from crelle.models.builder import Builder
from crelle.models.llama import Llama, LlamaConfig
from crelle.models.opt import OPT, OPTConfig
from crelle.models.precisions import offered

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
    try:
        if (kind := weights.config.get("model_type")) not in CONFIGS:
            raise UnsupportedError(f"model type '{kind}' is not one that Crelle runs ({', '.join(CONFIGS)})")
        return CONFIGS[kind].from_hf(weights.config)
    except KeyError as e:
        raise FormatError(f"{weights.path}: the model's config lacks the key {e}") from e
    except (TypeError, ArithmeticError) as e:
        raise FormatError(f"{weights.path}: the model's config makes no sense ({e})") from e


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
    builder = Builder(weights, frozenset(weights.names()), dtype, device, kernel, bits, made)
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
