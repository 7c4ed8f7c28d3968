"""What a target of the fuzzer is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crelle.formats.storage.open import Weights


@dataclass(frozen=True)
class Target:
    """A loader: `run` takes an input; `words` are those of its format."""

    run: Callable[[Any], object]
    seeds: list[Any]
    words: list[Any]


def read_all(weights: Weights) -> None:
    for name in weights.names():
        if len(weights.shape(name)) == 2:
            weights.matrix(name.removesuffix(".weight")).dequantize()
        else:
            weights.read(name)
