"""A model with uniform grids as a compressed-tensors directory (pack-quantized), bit for bit: what vLLM loads.

The layout is that of crelle.formats.importers.compressed_tensors, words as a dense bit stream: 2, 3, 4 and 8 bits,
scales as they are, groups that divide K or whole rows, permuted inputs as `actorder: group`. The commonest kind of
matrix is declared for all Linears, the others by name.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.exporters.directory import (
    EMBEDDINGS,
    Grid,
    require_whole_groups,
    uniform_of,
)
from crelle.formats.fp4 import E4M3, Fp4Tensor, Nvfp4Tensor
from crelle.formats.importers.compressed_tensors import unpacked
from crelle.formats.importers.gptq import BITS
from crelle.formats.packing import pack_words


class CompressedTensorsLayout:
    """The format `pack-quantized`."""

    method, title = "compressed-tensors", "compressed-tensors"

    def pack(self, w: QuantTensor, module: str) -> tuple[dict[str, Tensor], Grid]:
        N, K = w.shape
        if isinstance(w, Fp4Tensor):
            return self._four_bit_floats(w), Grid(4, w.size, True, False, w.format)
        inner, codes, g_idx = uniform_of(w, self.title, BITS)
        require_whole_groups(K, inner.group, self.title)
        packed = {
            "weight_packed": _words(codes, inner.bits),
            "weight_scale": inner.scale,
            "weight_shape": torch.tensor([N, K]),
        }
        if inner.zero is not None:
            packed["weight_zero_point"] = _words(inner.zeros().T, inner.bits).T
        if inner is not w:
            packed["weight_g_idx"] = g_idx
        return packed, Grid(inner.bits, inner.group if inner.group < K else -1, inner.zero is None, inner is not w)

    def _four_bit_floats(self, w: Fp4Tensor) -> dict[str, Tensor]:
        require_whole_groups(w.K, w.size, self.title)
        packed = {"weight_packed": w.packed, "weight_scale": w.scale}
        if isinstance(w, Nvfp4Tensor):
            if not w.divides:
                raise UnsupportedError(
                    f"its global scale is a multiplier (ModelOpt), and {self.title} stores a divisor"
                )
            packed |= {"weight_scale": w.scale.view(E4M3), "weight_global_scale": w.global_scale}
        return packed

    def declare(self, grids: Mapping[str, Grid], plain: list[str]) -> dict[str, Any]:
        kinds = [kind for kind, _ in Counter(grids.values()).most_common()]
        layouts = sorted({f"{k.kind}-pack-quantized".removeprefix("uniform-") for k in kinds})
        if len(layouts) > 1:
            raise UnsupportedError(
                f"{self.title} has one format for a model, but this would be {' and '.join(layouts)}"
            )
        groups = {
            f"group_{i}": {
                "targets": ["Linear"] if i == 0 else [m for m, g in grids.items() if g == kind],
                "weights": _weights(kind),
                "input_activations": None,
                "output_activations": None,
            }
            for i, kind in enumerate(kinds)
        }
        ignored = [m for m in plain if not m.endswith(EMBEDDINGS)]
        if "lm_head" not in grids and "lm_head" not in ignored:
            ignored.append("lm_head")  # tied to the embedding, and still a Linear
        return {
            "quant_method": "compressed-tensors",
            "format": layouts[0],
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
            "kv_cache_scheme": None,
        }


def _weights(kind: Grid) -> dict[str, Any]:
    return {
        "num_bits": kind.bits,
        "type": "int" if kind.kind == "uniform" else "float",
        "symmetric": kind.symmetric,
        "strategy": "channel" if kind.group == -1 else "tensor_group" if kind.kind == "nvfp4" else "group",
        "group_size": None if kind.group == -1 else kind.group,
        "actorder": "group" if kind.permuted else None,
        "dynamic": False,
    }


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack rows; a short row of 3-bit codes may look like one of the older packing, which is refused."""
    words = pack_words(codes, bits)
    if 32 % bits and not torch.equal(unpacked(words, bits, codes.shape[1], "words"), codes):
        raise UnsupportedError(
            f"rows of {codes.shape[1]} codes of {bits} bits cannot be distinguished from the older packing of "
            "compressed-tensors"
        )
    return words
