"""From a path to a model that runs."""

from pathlib import Path

import torch

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.source import Weights, open_weights
from crelle.models.llama import Builder, Llama, LlamaConfig


def choose_device(device: str) -> torch.device:
    """Turn cpu | cuda | auto into a device, or say why not."""
    if device not in ("cpu", "cuda", "auto"):
        raise UnsupportedError(f"there is no device '{device}'; choose cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device is visible to torch; use --device cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def read_config(weights: Weights) -> LlamaConfig:
    """Return the model's config in our terms, or say what is wrong with it."""
    try:
        return LlamaConfig.from_hf(weights.config)
    except KeyError as e:
        raise FormatError(f"{weights.path}: the model's config lacks the key {e}") from e
    except (TypeError, ArithmeticError) as e:
        raise FormatError(f"{weights.path}: the model's config makes no sense ({e})") from e


def build(
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    bits: int | None = None,
) -> Llama:
    """Build the model that the weights' config describes. Default dtype: f32 on a CPU, f16 on a GPU.

    `bits` chooses a precision of a nested checkpoint; default: the finest.
    """
    config = read_config(weights)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.float16)
    builder = Builder(weights, frozenset(weights.names()), dtype, device, kernel, bits, made={})
    model = Llama(builder, config).eval()
    if kernel and all(layer.kernel != kernel for layer in model.linears()):
        raise UnsupportedError(f"kernel '{kernel}' has nothing to do in {weights.path}: no matrix there is quantized")
    return model


def load(
    path: str | Path, device: str = "auto", kernel: str | None = None, bits: int | None = None
) -> tuple[Llama, Weights]:
    """Open a path and build its model."""
    weights = open_weights(path)
    return build(weights, choose_device(device), kernel=kernel, bits=bits), weights
