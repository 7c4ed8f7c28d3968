"""A model with uniform grids as a GPTQ directory, bit for bit: what vLLM, GPTQModel and transformers load.

The layout is that of crelle.formats.importers.gptq. It has room for 2, 3, 4 and 8 bits, f16 scales, any group, and
shapes of which K b and N b fill whole 32-bit words; v1 (which stores zero - 1) has none for a zero point of 0.
Matrices may differ in bits and group: the commonest go into the config, the others into its `dynamic` (GPTQModel).
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.exporters.directory import Grid, half_scale, uniform_of
from crelle.formats.importers.gptq import BITS
from crelle.formats.packing import pack_words
from crelle.version import __version__


class GPTQLayout:
    """Version 1 or 2 of GPTQ's layout."""

    method, title = "gptq", "GPTQ"

    def __init__(self, version: int = 2) -> None:
        if version not in (1, 2):
            raise SchemeError(f"unknown GPTQ version {version}; choose 1 or 2")
        self.version = version

    def pack(self, w: QuantTensor, module: str) -> tuple[dict[str, Tensor], Grid]:
        N, K = w.shape
        inner, codes, g_idx = uniform_of(w, self.title, BITS)
        bits = inner.bits
        if K * bits % 32 or N * bits % 32:
            raise UnsupportedError(f"{N} x {K} at {bits} bits does not fill whole 32-bit words, which GPTQ requires")
        scale, zero = half_scale(inner.scale, self.title), inner.zeros()
        if self.version == 1 and bool((zero == 0).any()):
            raise UnsupportedError("GPTQ v1 cannot store a zero point of 0; use version 2")
        packed = {
            "qweight": pack_words(codes, bits).T,
            "qzeros": pack_words((zero - int(self.version == 1)).T, bits),
            "scales": scale.T,
            "g_idx": g_idx,
        }
        return packed, Grid(bits, inner.group if inner.group < K else -1, inner.zero is None, inner is not w)

    def declare(self, grids: Mapping[str, Grid], plain: list[str]) -> dict[str, Any]:
        """Say the commonest bits and group, and what differs from them by module."""
        kinds = {m: (g.bits, g.group) for m, g in grids.items()}
        (bits, group), _ = Counter(kinds.values()).most_common(1)[0]
        dynamic: dict[str, Any] = {
            f"+:^{re.escape(m)}$": {"bits": b, "group_size": g}
            for m, (b, g) in kinds.items()
            if (b, g) != (bits, group)
        }
        dynamic |= {f"-:^{re.escape(m)}$": {} for m in plain if re.search(r"\.\d+\.", m)}
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq_v2" if self.version == 2 else "gptq",
            "bits": bits,
            "group_size": group,
            "sym": all(g.symmetric for g in grids.values()),
            "desc_act": any(g.permuted for g in grids.values()),
            "lm_head": "lm_head" in grids,
            **({"dynamic": dynamic} if dynamic else {}),
            "meta": {"quantizer": [f"crelle:{__version__}"]},
        }
