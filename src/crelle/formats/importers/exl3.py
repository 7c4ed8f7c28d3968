"""EXL3 checkpoints of exllamav3: for each matrix `trellis`, and signs and scales of both sides (crelle.formats.exl3).

trellis  int16 [K/16, N/16, 16 bits]
suh, svh f16 [K], [N]; older files have su, sv: int16 [K/16], [N/16], a bit for each sign, 1: negative
mcg, mul1    int32 []: which code; none of them: 3inst
"""

from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor
from crelle.formats.exl3 import TILE, Exl3Tensor
from crelle.formats.importers.base import EncodedDirectory


class Exl3Directory(EncodedDirectory):
    """A directory that exllamav3 wrote."""

    method: ClassVar[str] = "exl3"
    parts: ClassVar[tuple[str, ...]] = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")

    def _matrix_shape(self, module: str) -> tuple[int, int]:
        shape = self._part_shape(module, "trellis")
        if len(shape) != 3:
            raise FormatError(f"'trellis' should have three dimensions, but has {len(shape)}")
        return TILE * shape[1], TILE * shape[0]

    def _decode(self, module: str) -> QuantTensor:
        N, K = self._matrix_shape(module)
        trellis = self.part(module, "trellis", (None, None, None), (torch.int16,))
        codes = [name for name in ("mcg", "mul1") if self.has(module, name)]
        if len(codes) > 1:
            raise FormatError("it has both 'mcg' and 'mul1', which are two codes")
        spec = {
            "format": Exl3Tensor.format,
            "shape": [N, K],
            "bits": trellis.shape[2] // TILE,
            "code": codes[0] if codes else "3inst",
        }
        sides = {"suh": self._side(module, "suh", "su", K), "svh": self._side(module, "svh", "sv", N)}
        return Exl3Tensor.from_parts(spec, {"trellis": trellis, **sides})

    def _side(self, module: str, name: str, packed: str, n: int) -> Tensor:
        """Return the factors of one side, f16 [n]."""
        if self.has(module, name):
            return self.part(module, name, (n,), (torch.float16,))
        words = self.part(module, packed, (n // 16,), (torch.int16,)).int()
        negative = (words.unsqueeze(1) >> torch.arange(16)) & 1
        return (1 - 2 * negative.flatten()).half()
