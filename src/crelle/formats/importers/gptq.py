"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and transformers write them: w = scale (q - zero).

For a matrix of K inputs and N outputs with b bits and G groups:
    qweight  int32 [K b/32, N]    codes as a little-endian bit stream along K (3 bits: 32 codes in 3 words)
    qzeros   int32 [G, N b/32]    zero points, the same along N
    scales   f16   [G, N]
    g_idx    int32 [K]            the group of each input; scattered where inputs were sorted by importance (act-order)
Zero points: `checkpoint_format: gptq` (v1, also where nothing is said) stores zero - 1, `gptq_v2` stores zero.
Two traps. Some files say `gptq` and hold v2 zeros: a symmetric grid has zero = 2^(b-1), so one that stores 2^(b-1) is
v2 and one that stores 2^(b-1) - 1 is v1, whatever it says. And GPTQModel subtracts 1 from whole words, so that a zero
of 0 borrows from its neighbour; its files get whole words added. In all others, stored 2^b - 1 means zero = 2^b.
Bits and groups are taken from the tensors, which may differ from module to module.
"""

import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import SCALE_DTYPES
from crelle.formats.importers.base import EncodedDirectory, in_group_order, sorted_grid, whole_number
from crelle.formats.packing import unpack_words
from crelle.printable import printable

BITS = (2, 3, 4, 8)
_INT32 = (torch.int32,)


class GPTQDirectory(EncodedDirectory):
    """A directory that GPTQ wrote."""

    method: ClassVar[str] = "gptq"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, path: Path, config: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
        super().__init__(path, config, declared)
        layout = (
            "marlin"
            if self.setting("is_marlin_format")
            else self.setting("checkpoint_format", "format", default="gptq")
        )
        if layout not in ("gptq", "gptq_v2"):
            raise UnsupportedError(f"{path} is GPTQ in the layout '{layout}'; Crelle reads 'gptq' and 'gptq_v2'")
        meta = self.setting("meta", default={})
        quantizer = str(meta.get("quantizer", "")) if isinstance(meta, dict) else ""
        self.whole_words = "gptqmodel" in quantizer.lower()
        self.less_one = self._zeros_are_less_one(layout == "gptq")

    def _zeros_are_less_one(self, said: bool) -> bool:
        """Decide between v1 and v2 zeros: by what is said, unless a symmetric grid's own zero points say otherwise."""
        if self.setting("sym", default=True) is not True:
            return said
        module = next(iter(self.encoded))
        with self._speaking_of(module):
            bits, (N, _) = self._bits(module), self._matrix_shape(module)
            stored = unpack_words(self.part(module, "qzeros", (None, -(-N * bits // 32)), _INT32), bits, N)
        middle = 1 << (bits - 1)
        found = next((one for one in (False, True) if bool((stored == middle - one).all())), said)
        if found != said:
            says, is_ = ("v1" if one else "v2" for one in (said, found))
            self.notes.append(
                f"{self.path} declares zero points of GPTQ {says}, but it is symmetric and stores "
                f"{middle - found}, so they are read as those of {is_}"
            )
            logging.getLogger(__name__).warning(printable(self.notes[-1]))
        return found

    def _bits(self, module: str) -> int:
        """Return the number of bits that goes with the number of words; where several do, the one that is declared."""
        words = self._part_shape(module, "qweight")
        if len(words) != 2 or not all(words):
            raise FormatError(f"'qweight' should be a matrix, but is {list(words)}")
        declared = self.setting("bits")
        if not self.has(module, "g_idx"):
            return whole_number(declared, "its number of bits", BITS)
        K = prod(self._part_shape(module, "g_idx"))
        fitting = [b for b in BITS if -(-K * b // 32) == words[0]]
        if declared in fitting:
            return int(declared)
        if len(fitting) != 1:
            raise FormatError(f"'qweight' has {words[0]} words for {K} inputs, which is not 2, 3, 4 or 8 bits each")
        return fitting[0]

    def _matrix_shape(self, module: str) -> tuple[int, int]:
        bits = self._bits(module)
        words, N = self._part_shape(module, "qweight")
        return N, prod(self._part_shape(module, "g_idx")) if self.has(module, "g_idx") else words * 32 // bits

    def _decode(self, module: str) -> QuantTensor:
        bits = self._bits(module)
        N, K = self._matrix_shape(module)
        scales = self.part(module, "scales", (None, N), SCALE_DTYPES)
        G = scales.shape[0]
        qzeros = self.part(module, "qzeros", (G, -(-N * bits // 32)), _INT32)
        if self.has(module, "g_idx"):
            g_idx = self.part(module, "g_idx", (K,), (torch.int32, torch.int64))
        else:
            size = self.setting("group_size", default=-1)
            g_idx = torch.arange(K) // (min(size, K) if type(size) is int and size > 0 else K)
        group, order = in_group_order(g_idx, G)
        codes = unpack_words(self.part(module, "qweight", (None, N), _INT32).T, bits, K)
        zero = self._zero_points(qzeros, bits, N).T
        return sorted_grid(codes, bits, scales.T, zero, group, order)

    def _zero_points(self, qzeros: Tensor, bits: int, N: int) -> Tensor:
        """Return the true zero points int16 [G, N]."""
        if self.less_one and self.whole_words and bits != 3:
            ones = sum(1 << at for at in range(0, 32, bits))
            return unpack_words(qzeros + ones, bits, N).to(torch.int16)  # wraps, as the subtraction did
        stored = unpack_words(qzeros, bits, N).to(torch.int16)
        if not self.less_one:
            return stored
        return (stored + 1) & 7 if self.whole_words else stored + 1
