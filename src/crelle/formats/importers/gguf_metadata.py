"""The metadata of a GGUF file by key, with sentences that name the file."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crelle.errors import FormatError
from crelle.formats.importers.gguf_header import Header, TensorInfo
from crelle.formats.storage.io import shown

_REQUIRED: Any = object()


class Metadata:
    """What a GGUF file says besides its weights; `arch` is its `general.architecture`."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self.arch = str(self.get("general.architecture"))

    @property
    def fields(self) -> Collection[str]:
        """The keys that the file has."""
        return self.header.fields

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors under GGUF's own names."""
        return self.header.tensors

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a value, or the default; without a default its absence is an error."""
        if key in self.header.fields:
            try:
                return self.header.get(key)
            except FormatError as e:
                raise FormatError(f"{self.path}: {e}") from e
        if default is _REQUIRED:
            raise FormatError(f"{self.path} has no metadata '{key}'")
        return default

    def of_arch(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the value of `<architecture>.<key>`."""
        return self.get(f"{self.arch}.{key}", default)

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        """Return a positive integer of the architecture."""
        value = self.of_arch(key, default)
        if type(value) is not int or value < 1:
            raise FormatError(f"{self.path}: '{self.arch}.{key}' should be a positive integer, not {shown(value)}")
        return value

    def decimal(self, key: str, default: Any = _REQUIRED) -> float:
        """Return a float as it was meant before it became f32: 9.999999747378752e-06 is 1e-05."""
        return float(str(np.float32(self.of_arch(key, default))))
