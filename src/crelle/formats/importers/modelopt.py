"""NVFP4 checkpoints of NVIDIA's ModelOpt: weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], weight_scale_2 f32 [].

The last one is a multiplier. Scales of activations (`input_scale`) are for kernels that quantize them; not read here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.fp4 import E4M3, Nvfp4Tensor
from crelle.formats.importers.base import EncodedDirectory
from crelle.formats.storage.io import shown


class ModelOptDirectory(EncodedDirectory):
    """A directory that ModelOpt wrote."""

    method: ClassVar[str] = "modelopt"
    parts: ClassVar[tuple[str, ...]] = ("weight_scale_2", "weight_scale", "weight", "input_scale", "k_scale", "v_scale")

    def __init__(self, path: Path, config: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
        inner = declared.get("quantization", declared)  # hf_quant_config.json has it one level deeper
        kind = inner.get("quant_algo") if isinstance(inner, Mapping) else None
        if kind != "NVFP4":
            raise UnsupportedError(f"{path} is quantized by ModelOpt's {shown(kind)}; Crelle reads NVFP4")
        super().__init__(path, config, declared)
        self.notes.append("ModelOpt's NVFP4 also quantizes activations to 4 bits; here they stay floats")

    def _matrix_shape(self, module: str) -> tuple[int, int]:
        N, half = self._part_shape(module, "weight")
        return N, 2 * half

    def _decode(self, module: str) -> QuantTensor:
        N, K = self._matrix_shape(module)
        spec = {"format": "nvfp4", "shape": [N, K], "bits": 4, "group": Nvfp4Tensor.size, "divides": False}
        sizes = N, -(-K // Nvfp4Tensor.size)
        tensors = {
            "codes": self.part(module, "weight", (N, K // 2), (torch.uint8,)),
            "scale": self.part(module, "weight_scale", sizes, (E4M3,)).view(torch.uint8),
            "global_scale": self.part(module, "weight_scale_2", (), (torch.float32,)).reshape(1),
        }
        return Nvfp4Tensor.from_parts(spec, tensors)
