"""GGUF files: one file with weights, config and tokenizer, as llama.cpp uses them.

Tensors are presented under their Hugging Face names (gguf_architectures.py), with a Hugging Face config
(gguf_config.py). Types: F32, F16, BF16, and every quantized type that the `gguf` package can decode (gguf_types.py);
those come as f32, or, for a file that is opened `encoded`, as one of our tensors, without loss. The header is read by
gguf_header.py, which checks every length in it: the package's own reader allocates whatever a file claims.

What llama.cpp's converter changed:
    undone here              the rows of q and k in the `llama` architecture are reordered (pairs interleaved for rope);
                             Llama 3's rope scaling is stored as a table of factors
    told, and not undone     GPT-2's matrices are [outputs, inputs]: `transposed`;
                             Gemma's norm weights have 1 added: config["norm_weight_offset"] is 0
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.importers.gguf_architectures import ARCHITECTURES
from crelle.formats.importers.gguf_config import hf_config
from crelle.formats.importers.gguf_header import Header, TensorInfo, read_header
from crelle.formats.importers.gguf_metadata import Metadata
from crelle.formats.importers.gguf_tokenizer import write_tokenizer
from crelle.formats.importers.gguf_types import FLOATS, decode, dequantize
from crelle.formats.storage.hf_layout import is_conv1d
from crelle.formats.storage.io import shown


class GGUFFile:
    """A GGUF file behind the interface of `Weights`."""

    def __init__(self, path: Path, encoded: bool = False, header: Header | None = None) -> None:
        """header: where it has been read already."""
        self.path, self.encoded = path, encoded
        self.header = header or read_header(path)
        try:
            self._understand()
        except CrelleError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError) as e:
            raise FormatError(f"{path}: the metadata of this GGUF file is invalid ({e})") from e

    def _understand(self) -> None:
        path, self.metadata = self.path, Metadata(self.path, self.header)
        if (parts := self.get("split.count", 1)) > 1:
            raise UnsupportedError(f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` first")
        if self.metadata.arch not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedError(f"{path} is a {shown(self.metadata.arch)} model; Crelle reads {known} from GGUF")
        self.arch = ARCHITECTURES[self.metadata.arch]
        if "token_embd.weight" not in self.header.tensors:
            raise FormatError(f"{path} has no tensor 'token_embd.weight', so it is not a complete model")
        self.config = hf_config(self.metadata, self.arch)
        self._where = {hf: t for t in self.header.tensors if (hf := self.arch.hf_name(t)) is not None}

    @property
    def fields(self) -> Collection[str]:
        """The names of the metadata."""
        return self.metadata.fields

    def get(self, key: str, *default: Any) -> Any:
        """Return a metadata value, or the default; without a default its absence is an error."""
        return self.metadata.get(key, *default)

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def transposed(self, name: str) -> bool:
        return is_conv1d(self.config, name)

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self._where:
            raise FormatError(f"{self.path} has no tensor '{name}'")
        return self.header.tensors[self._where[name]]

    def packed(self, name: str) -> bool:
        """Tell whether a tensor is stored in a quantized type, so that `read` has to unpack it."""
        return self._tensor(name).kind not in FLOATS

    def read(self, name: str) -> Tensor:
        t = self._tensor(name)
        try:
            w = dequantize(t.kind, self.header.array(t), t.shape)
        except UnsupportedError as e:
            raise UnsupportedError(f"{self.path}: '{t.name}' {e}") from e
        order = self._row_order(name, t.shape[0])
        return w if order is None else w[order]

    def matrix(self, module: str) -> QuantTensor:
        name = f"{module}.weight"
        t = self._tensor(name)
        w = decode(t.kind, self.header.array(t), t.shape) if self.encoded else None
        if w is None:
            return DenseTensor(self.read(name))
        order = self._row_order(name, t.shape[0])
        return w if order is None else w.rows(order)

    def _row_order(self, name: str, rows: int) -> Tensor | None:
        """From rope pairs (0, D/2), (1, D/2+1), … side by side back to the two halves of a head; None: as stored."""
        if (key := self.arch.interleaved_heads(name)) is None:
            return None
        heads = self.config[key]
        if rows % (2 * heads):
            raise FormatError(f"{self.path}: '{name}' has {rows} rows, which are not divisible by {heads} heads")
        return torch.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(1, 2).flatten()

    def copy_tokenizer(self, to: Path) -> None:
        write_tokenizer(self.metadata, to)
