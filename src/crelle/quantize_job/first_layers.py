"""The first layers of a model as if they were all of it."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.storage.open import Weights

_LAYER = re.compile(r"^.*?\.(\d+)\.")
_COUNTS = ("num_hidden_layers", "n_layer")  # how families call it


def layer_count(weights: Weights) -> int:
    """Return how many numbered layers the tensors of a model have."""
    return 1 + max((int(found[1]) for n in weights.names() if (found := _LAYER.match(n))), default=-1)


def in_layer(name: str) -> bool:
    """Tell whether a tensor is one of a numbered layer's."""
    return _LAYER.match(name) is not None


class FirstLayers:
    """Weights without the layers behind the first so many."""

    def __init__(self, inner: Weights, layers: int) -> None:
        self.inner, self.path = inner, inner.path
        self.config: dict[str, Any] = dict(inner.config)
        for key in _COUNTS:
            if key in self.config:
                self.config[key] = layers
        if isinstance(kinds := self.config.get("layer_types"), list):
            self.config["layer_types"] = kinds[:layers]
        self._names = [n for n in inner.names() if not (found := _LAYER.match(n)) or int(found[1]) < layers]

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def read(self, name: str) -> Tensor:
        return self.inner.read(name)

    def matrix(self, module: str) -> QuantTensor:
        return self.inner.matrix(module)

    def packed(self, name: str) -> bool:
        """Tell whether f32 was unpacked from fewer bits (GGUF)."""
        packed = getattr(self.inner, "packed", None)
        return packed is not None and bool(packed(name))

    def transposed(self, name: str) -> bool:
        return self.inner.transposed(name)

    def copy_tokenizer(self, to: Path) -> None:
        self.inner.copy_tokenizer(to)
