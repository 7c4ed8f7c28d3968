"""A model with uniform grids of 4 bits as an AWQ directory (GEMM), bit for bit: what vLLM and transformers load.

The layout is that of crelle.formats.importers.awq: f16 scales, zero points always stored, N a multiple of 8. It has one
group for the whole model, which divides every K; no permuted inputs, no quantized head.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.exporters.directory import (
    Grid,
    half_scale,
    require_whole_groups,
    uniform_of,
)
from crelle.formats.importers.awq import NIBBLES
from crelle.formats.packing import pack_words


class AWQLayout:
    """AutoAWQ's GEMM layout for one model; the first matrices decide the group that all must have."""

    method, title = "awq", "AWQ"

    def __init__(self) -> None:
        self.group: int | None = None  # the size that a matrix with several groups a row has
        self.rows: dict[str, int] = {}  # K of the matrices with one group a row

    def pack(self, w: QuantTensor, module: str) -> tuple[dict[str, Tensor], Grid]:
        N, K = w.shape
        inner, codes, _ = uniform_of(w, self.title, (4,))
        if inner is not w:
            raise UnsupportedError("its input channels are permuted (act-order), which AWQ cannot represent")
        if module == "lm_head":
            raise UnsupportedError("AWQ has no quantized head; leave lm_head unquantized")
        if N % 8:
            raise UnsupportedError(f"its {N} outputs do not fill whole 32-bit words, which AWQ requires")
        require_whole_groups(K, inner.group, self.title)
        self._agree(module, K, inner.group)
        packed = {
            "qweight": _outputs(codes.T),
            "qzeros": _outputs(inner.zeros().T),
            "scales": half_scale(inner.scale, self.title).T,
        }
        return packed, Grid(4, inner.group, inner.zero is None, False)

    def _agree(self, module: str, K: int, group: int) -> None:
        """Refuse a second group; a row of one group may be a whole row (-1) or a row as long as the group."""
        if group == K:
            self.rows[module] = K
        elif self.group is None:
            self.group = group
        elif group != self.group:
            raise UnsupportedError(
                f"its group size is {group}, but others have {self.group}; AWQ has one group size for the whole model"
            )
        odd = next((m for m, k in self.rows.items() if self.group not in (None, k)), None)
        if odd is not None:
            raise UnsupportedError(
                f"this model has groups of {self.group} and of a whole row ('{odd}': {self.rows[odd]}); "
                "AWQ has one group size for the whole model"
            )

    def declare(self, grids: Mapping[str, Grid], plain: list[str]) -> dict[str, Any]:
        kept = [m for m in plain if re.search(r"\.\d+\.", m)]
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": -1 if self.group is None else self.group,
            "zero_point": True,
            "modules_to_not_convert": kept or None,
        }


def _outputs(codes: Tensor) -> Tensor:
    """Return codes [rows, N] as GEMM words [rows, N/8]."""
    nibbles = codes.reshape(codes.shape[0], -1, 8)[..., torch.tensor(NIBBLES)]
    return pack_words(nibbles.flatten(1), 4)
