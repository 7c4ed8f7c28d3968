"""The models that `crelle bench serve` puts under load: from files, or of a real shape with random weights."""

from pathlib import Path
from typing import cast

import torch

from crelle.bench.decode_cuda import does_not_fit, free_memory
from crelle.bench.load.no_tokenizer import NoTokenizer
from crelle.bench.model_shapes import RandomWeights
from crelle.engine.llm import LLM
from crelle.engine.loaded_model import LoadedModel
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import CapacityError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.models.loader import Model, build


def random_llm(
    shape: str, scheme: str, device: torch.device, *, layers: int | None = None, kernel: str | None = None
) -> LLM:
    """Build a real shape with random weights in a scheme, or say that it does not fit."""
    weights = RandomWeights(shape, scheme, device, layers=layers)
    if reason := does_not_fit(weights, device):
        raise CapacityError(reason)
    model = build(weights, device, kernel=None if scheme == "fp16" else kernel)
    return LLM(model, cast(Tokenizer, NoTokenizer()), weights)


def quantizes_activations(model: Model) -> bool:
    """Whether some matrix of a model is multiplied by integers that x was rounded to."""
    return any(linear.problem.activation != "float" for linear in model.linears())


def checked_part(llm: LoadedModel) -> LoadedModel:
    """Return the model itself, or of one with random weights, whose roundings grow layer by layer, the first layer."""
    weights = llm.weights
    if not isinstance(weights, RandomWeights) or not quantizes_activations(llm.model):
        return llm
    kernel = next(linear.kernel for linear in llm.model.linears() if linear.problem.activation != "float")
    first = RandomWeights(weights.config, str(weights.scheme), weights.device, weights.seed, layers=1)
    model = build(first, llm.model.device, llm.model.dtype, kernel=kernel)
    return LLM(model, llm.tokenizer, first)


def stored_llm(path: Path, device: str, kernel: str | None = None) -> tuple[LLM, str]:
    """Load a model's files; return it and what a row says of its scheme."""
    llm = LLM.load(path, device=device, kernel=kernel)
    return llm, str(llm.weights.scheme) if isinstance(llm.weights, Checkpoint) else "as stored"


__all__ = ["NoTokenizer", "checked_part", "free_memory", "quantizes_activations", "random_llm", "stored_llm"]
