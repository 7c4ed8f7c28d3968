"""From a path to a model that runs: the config's model type says which family it is."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.formats.storage.open import Weights, open_weights
from crelle.formats.storage.ownership import CONFIG
from crelle.kernels.cuda.experts.host_memory import ExpertOffload
from crelle.kernels.spec import DecoderSpec
from crelle.models.builder import Builder
from crelle.models.decoder import DecoderModel
from crelle.models.encoder import EncoderModel
from crelle.models.families import families
from crelle.models.families.base import Architecture, Family
from crelle.models.nested import offered
from crelle.models.tensor_view import as_specified

Model = DecoderModel
Built = TypeVar("Built", DecoderModel, EncoderModel)


def choose_device(device: str) -> torch.device:
    """Turn cpu | cuda | auto into a device, or say why not."""
    if device not in ("cpu", "cuda", "auto"):
        raise UnsupportedError(f"there is no device '{device}'; choose cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device is visible to torch; use `device='cpu'`")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def family_of(weights: Weights) -> Family:
    """Return the family that a model's config names."""
    kind = weights.config.get("model_type")
    known = families()
    if not isinstance(kind, str) or kind not in known:
        raise UnsupportedError(f"model type {shown(str(kind))} is not one that Crelle runs ({', '.join(known)})")
    return known[kind]


def read_spec(weights: Weights) -> DecoderSpec:
    """Return what the model's config describes, or say what is wrong with it."""
    where = weights.path / CONFIG if weights.path.is_dir() else weights.path
    try:
        return family_of(weights).spec(weights.config)
    except CrelleError as e:
        raise type(e)(f"{where}: {e}") from e


def in_usual_form(weights: Weights) -> Weights:
    """Return weights in which every linear is stored as [N, K] under a name of its own; most are already."""
    kind = weights.config.get("model_type")
    family = families().get(kind) if isinstance(kind, str) else None
    return weights if family is None else as_specified(weights, family)


def architecture(weights: Weights, tensors: Collection[str] | None = None) -> Architecture:
    """Return the spec of a model and the names of its tensors; `tensors`: instead of those that the weights have."""
    spec, family = read_spec(weights), family_of(weights)
    return Architecture(spec, family.names(weights.names() if tensors is None else tensors), family.required_biases)


def require_layers(weights: Weights, names: Collection[str], arch: Architecture) -> None:
    """Say which layer is missing before any is built."""
    before, after = arch.names.layer.split("{}")
    number = re.compile(rf"{re.escape(before)}(\d{{1,9}}){re.escape(after)}\.")
    present = {int(m[1]) for name in names if (m := number.match(name))}
    layers = len(arch.spec.layers)
    if (missing := next((i for i in range(layers) if i not in present), None)) is not None:
        raise FormatError(
            f"{weights.path}: the model's config says that it has {layers} layers ('num_hidden_layers'), but there is "
            f"no tensor of layer {missing}"
        )


def tied_to(weights: Weights) -> str | None:
    """Return the embedding that is also the output head's matrix, where the head has none of its own."""
    arch = architecture(weights)
    return arch.names.embedding if arch.spec.tied else None


def build(
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    bits: int | None = None,
    offload: ExpertOffload | None = None,
) -> Model:
    """Build the model that the weights' config describes. Default dtype: f32 on a CPU, its family's on a GPU.

    `bits` chooses a precision of a nested checkpoint; default: the finest. `offload` takes the experts that do not fit.
    """
    if read_spec(weights).encoder:
        raise UnsupportedError(
            f"{weights.path}: a '{weights.config['model_type']}' model is an encoder and generates no text; use "
            "`crelle embed` or crelle.Embedder"
        )
    return _built(DecoderModel, weights, device, dtype, kernel, bits, offload)


def build_encoder(
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    bits: int | None = None,
) -> EncoderModel:
    """Build the encoder that the weights' config describes; the arguments are those of `build`."""
    if not read_spec(weights).encoder:
        raise UnsupportedError(
            f"{weights.path}: a '{weights.config['model_type']}' model is a decoder; embeddings need an encoder (bert)"
        )
    return _built(EncoderModel, weights, device, dtype, kernel, bits)


def default_dtype(weights: Weights, device: torch.device) -> torch.dtype:
    """Return what a model computes in where nothing was asked for."""
    return torch.float32 if device.type == "cpu" else family_of(weights).half


def _built(
    kind: type[Built],
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype | None,
    kernel: str | None,
    bits: int | None,
    offload: ExpertOffload | None = None,
) -> Built:
    dtype = dtype or default_dtype(weights, device)
    made: dict[str, Any] | None = {} if offered(weights) else None  # to be shared among precisions, where there are
    weights = in_usual_form(weights)
    arch, names = architecture(weights), frozenset(weights.names())
    require_layers(weights, names, arch)
    offload = offload if made is None else None  # precisions share experts, which must stay where they are
    model = kind(Builder(weights, names, dtype, device, kernel, bits, made, offload=offload), arch).eval()
    if kernel and all(layer.kernel != kernel for layer in model.linears()):
        raise UnsupportedError(f"kernel '{kernel}' has nothing to do in {weights.path}: no matrix there is quantized")
    return model


def load(
    path: str | Path, device: str = "auto", kernel: str | None = None, bits: int | None = None
) -> tuple[Model, Weights]:
    """Open a path and build its model."""
    weights = open_weights(path)
    return build(weights, choose_device(device), kernel=kernel, bits=bits), weights
