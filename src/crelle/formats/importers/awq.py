"""AWQ checkpoints, as AutoAWQ and transformers write them: 4 bits, w = scale (q - zero), nothing added to zero.

GEMM   qweight int32 [K, N/8]    qzeros int32 [G, N/8]           scales f16 [G, N]
       eight outputs in a word; nibble i holds output 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[i]
GEMV   qweight int32 [N, K/8]    qzeros int32 [N, >= G/8]        scales f16 [N, >= G]
       eight inputs (or groups) in a word, in plain order; rows of zeros and scales are padded
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import SCALE_DTYPES, groups_in
from crelle.formats.importers.base import EncodedDirectory, grid, whole_number
from crelle.formats.packing import unpack_words

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of its eight outputs a nibble of a GEMM word holds
_INT32 = (torch.int32,)


class AWQDirectory(EncodedDirectory):
    """A directory that AWQ wrote."""

    method: ClassVar[str] = "awq"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def __init__(self, path: Path, config: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
        super().__init__(path, config, declared)
        self.layout = str(self.setting("version", "format", "checkpoint_format", default="gemm")).lower()
        if self.layout not in ("gemm", "gemv"):
            raise UnsupportedError(f"{path} is AWQ in the layout '{self.layout}'; Crelle reads 'gemm' and 'gemv'")
        whole_number(self.setting("bits", "w_bit", default=4), f"the number of bits of {path}", (4,))
        self.group = self.setting("group_size", "q_group_size", default=128)
        if type(self.group) is not int or (self.group < 1 and self.group != -1):
            raise FormatError(f"{path}: 'group_size' should be a positive number or -1, but is {self.group!r}")

    def _matrix_shape(self, module: str) -> tuple[int, int]:
        shape = self._part_shape(module, "qweight")
        if len(shape) != 2 or not all(shape):
            raise FormatError(f"'qweight' should be a matrix, but is {list(shape)}")
        rows, words = shape
        return (rows, words * 8) if self.layout == "gemv" else (words * 8, rows)

    def _decode(self, module: str) -> QuantTensor:
        N, K = self._matrix_shape(module)
        group = K if self.group == -1 else min(self.group, K)
        G = groups_in(K, group)
        if self.layout == "gemv":
            codes = unpack_words(self.part(module, "qweight", (N, K // 8), _INT32), 4, K)
            scales = self.part(module, "scales", (N, None), SCALE_DTYPES)
            words = self.part(module, "qzeros", (N, None), _INT32)
            if scales.shape[1] < G or words.shape[1] * 8 < G:
                raise FormatError(f"'scales' and 'qzeros' must have at least {G} groups per row")
            return grid(codes, 4, scales[:, :G], unpack_words(words, 4, G).to(torch.int16), group)
        codes = _outputs(self.part(module, "qweight", (K, N // 8), _INT32))
        scales = self.part(module, "scales", (G, N), SCALE_DTYPES)
        zero = _outputs(self.part(module, "qzeros", (G, N // 8), _INT32)).to(torch.int16)
        return grid(codes, 4, scales.T, zero, group)


def _outputs(words: Tensor) -> Tensor:
    """Return the codes [N, rows] of GEMM words [rows, N/8]."""
    nibbles = unpack_words(words, 4, words.shape[1] * 8).reshape(words.shape[0], -1, 8)
    codes = torch.empty_like(nibbles)
    codes[..., list(NIBBLES)] = nibbles
    return codes.flatten(1).T
