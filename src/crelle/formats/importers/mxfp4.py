"""gpt-oss as OpenAI publishes it: experts in MXFP4, fused, everything else in 16 bits.

    as stored                                        as read here, for each of the E experts
    X.experts.gate_up_proj_blocks  [E, 2 I, H/32, 16]    X.experts.0.gate_proj.weight [I, H]: rows 0, 2, …
    X.experts.gate_up_proj_scales  [E, 2 I, H/32]        X.experts.0.up_proj.weight   [I, H]: rows 1, 3, …
    X.experts.down_proj_blocks, _scales                  X.experts.0.down_proj.weight [H, I]
    X.experts.gate_up_proj_bias    [E, 2 I], …           X.experts.0.gate_proj.bias   [I], …

Codes and scales are those of crelle.formats.fp4, byte by byte.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor
from crelle.formats.fp4 import Mxfp4Tensor
from crelle.formats.storage.hf import HFDirectory
from crelle.formats.storage.io import MAX_TENSORS

_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class _Rows(NamedTuple):
    """One matrix of an expert: every `step`-th row of a fused tensor."""

    stored: str  # without _blocks
    expert: int
    first: int
    step: int


class Mxfp4Directory(HFDirectory):
    """A directory whose experts are in MXFP4."""

    method: ClassVar[str] = "mxfp4"

    def __init__(self, path: Path, config: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
        super().__init__(path, {k: v for k, v in config.items() if k != "quantization_config"})
        self._matrices: dict[str, _Rows] = {}  # by module
        stored = [n.removesuffix(_BLOCKS) for n in self._where if n.endswith(_BLOCKS)]
        if not stored:
            raise FormatError(f"{path} declares mxfp4 quantization, but no tensor name ends in '{_BLOCKS}'")
        for name in stored:
            outer, _, kind = name.rpartition(".")
            shape = super().shape(f"{name}{_BLOCKS}")
            parts = _PARTS.get(kind, ())
            scales = super().shape(f"{name}{_SCALES}")
            if not parts or len(shape) != 4 or shape[3] != 16 or scales != shape[:3] or shape[1] % len(parts):
                raise FormatError(
                    f"{path}: '{name}{_BLOCKS}' {list(shape)} and '{_SCALES}' {list(scales)} are not the experts of "
                    "gpt-oss: [experts, rows, inputs / 32, 16] and the same without 16"
                )
            for e in range(shape[0]):
                for i, part in enumerate(parts):
                    self._matrices[f"{outer}.{e}.{part}"] = _Rows(name, e, i, len(parts))
            if len(self._matrices) > MAX_TENSORS:
                raise FormatError(f"{path} has more than {MAX_TENSORS:,} expert matrices, which is the limit")
        biases = {n: f"{r.stored}{_BIAS}" for n, r in self._matrices.items() if f"{r.stored}{_BIAS}" in self._where}
        self._biases = {f"{module}.bias": self._matrices[module] for module in biases}
        gone = {f"{name}{end}" for name in stored for end in (_BLOCKS, _SCALES, _BIAS)}
        self._plain = [n for n in self._where if n not in gone]

    def names(self) -> list[str]:
        return [*self._plain, *(f"{m}.weight" for m in self._matrices), *self._biases]

    def shape(self, name: str) -> tuple[int, ...]:
        rows = self._biases.get(name) or self._matrices.get(name.removesuffix(".weight"))
        if rows is None:
            return super().shape(name)
        _, N, blocks, _ = super().shape(f"{rows.stored}{_BLOCKS}")
        return (N // rows.step,) if name in self._biases else (N // rows.step, 32 * blocks)

    def read(self, name: str) -> Tensor:
        if (rows := self._biases.get(name)) is not None:
            return super().read_slice(f"{rows.stored}{_BIAS}", (rows.expert,))[rows.first :: rows.step].contiguous()
        module = name.removesuffix(".weight")
        return self.matrix(module).dequantize() if module in self._matrices else super().read(name)

    def matrix(self, module: str) -> QuantTensor:
        if (rows := self._matrices.get(module)) is None:
            return super().matrix(module)
        parts = [
            super(Mxfp4Directory, self).read_slice(f"{rows.stored}{end}", (rows.expert,)) for end in (_BLOCKS, _SCALES)
        ]
        codes, scale = (t[rows.first :: rows.step] for t in parts)
        if not codes.dtype == scale.dtype == torch.uint8:
            raise FormatError(
                f"{self.path}: '{rows.stored}' should be in bytes, but is {codes.dtype} and {scale.dtype}"
            )
        N, C = scale.shape
        spec = {"format": "mxfp4", "shape": [N, 32 * C], "bits": 4, "group": 32}
        return Mxfp4Tensor.from_parts(spec, {"codes": codes.reshape(N, -1).contiguous(), "scale": scale.contiguous()})
