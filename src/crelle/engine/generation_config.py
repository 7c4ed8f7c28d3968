"""The sampling that a model's authors recommend: generation_config.json, which comes with most chat models."""

from math import isfinite
from pathlib import Path
from typing import Any

from crelle.engine.sampling.sampler import Sampling
from crelle.errors import FormatError, SchemeError
from crelle.formats.storage.io import read_json, shown
from crelle.formats.storage.open import Weights

FILE = "generation_config.json"
_FIELDS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}
_LARGEST = 1 << 62
_CHOOSE = {"temperature", "top_k", "top_p", "min_p"}  # without one of these a file says nothing about sampling


def recommended_sampling(weights: Weights) -> dict[str, float]:
    """Return the fields of Sampling that generation_config.json sets; {} if it is missing or asks for no sampling."""
    file = weights.path / FILE
    if not file.is_file():
        return {}
    config = read_json(file)
    if config.get("do_sample") is False:
        return {}
    given = {name: kind for name, kind in _FIELDS.items() if config.get(name) is not None}
    found = {name: _number(config[name], name, kind, file) for name, kind in given.items()}
    if not found.keys() & _CHOOSE and config.get("do_sample") is not True:
        return {}
    found = {"temperature": 1.0} | found
    try:
        Sampling(**found)  # type: ignore[arg-type]
    except SchemeError as e:
        raise FormatError(f"{file}: {e}") from e
    return found


def _number(value: Any, name: str, kind: type, file: Path) -> float:
    """Return a value of the file as the type that Sampling has, or refuse it."""
    # An integer of hundreds of digits is no float, which `isfinite` would have to make of it.
    fits = type(value) in (int, float) and abs(value) <= _LARGEST and isfinite(value)
    if not fits or value != kind(value):
        wanted = "an integer" if kind is int else "a number"
        raise FormatError(f"{file}: '{name}' must be {wanted}, got {shown(value)}")
    return kind(value)  # type: ignore[no-any-return]
