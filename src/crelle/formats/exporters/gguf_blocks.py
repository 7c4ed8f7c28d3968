"""A matrix in the blocks of one of GGUF's uniform types, exactly, or a sentence why there is none.

crelle.formats.importers.gguf_blocks says what a block of 32 weights holds. A group of ours must be whole blocks.
    uniform  w = s (q - z)     the smallest of Q4_0, Q5_0 and Q8_0 that has all levels q - z (-8 ... 7, -16 ... 15,
                               -128 ... 127); Q4_1 where the levels need more than Q4_0 and -s z is exact in f16
    affine   w = low + s q     Q4_1 to 4 bits, Q5_1 at 5
    dense                      F16, BF16 or F32 as stored
So 2 and 3 bits fit Q4_0, and 4 bits with zero points fit Q5_0: larger than they were, but the same values.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import Planes, UniformTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.exporters.directory import half_scale
from crelle.formats.wrappers.composite import PermutedTensor

Array = np.ndarray[Any, Any]
BLOCK = 32
_SIGNED = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}  # levels from minus this to one less
_DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class Plan(NamedTuple):
    """The type of a matrix, and what its blocks hold besides codes; from `plan`."""

    kind: str
    scale: Tensor | None = None  # f16 [N, C]
    low: Tensor | None = None  # f16 [N, C]
    shift: Tensor | None = None  # int16 [N, C], added to the codes


def plan(w: QuantTensor) -> Plan:
    """Choose the type that holds a matrix exactly."""
    if isinstance(w, DenseTensor):
        return Plan(_DENSE[w.weight.dtype])
    if isinstance(w, PermutedTensor):
        raise UnsupportedError("its input channels are permuted (act-order), which GGUF cannot represent")
    if not isinstance(w, UniformTensor | AffineTensor):
        raise UnsupportedError(f"GGUF stores uniform grids (scheme rtn, gptq, awq, …), but this is '{w.format}'")
    if w.group % BLOCK or w.K % BLOCK:
        raise UnsupportedError(
            f"its groups of {w.group} in rows of {w.K} are not whole blocks of {BLOCK}, which GGUF requires"
        )
    scale = half_scale(w.scale, "GGUF")
    if isinstance(w, AffineTensor):
        if w.bits > 5:
            raise UnsupportedError(f"GGUF has affine grids of up to 5 bits, but this has {w.bits}")
        return Plan("Q4_1" if w.bits <= 4 else "Q5_1", scale, half_scale(w.low, "GGUF"))
    zero = w.zeros().to(torch.int16)
    lowest, highest = -int(zero.max()), (1 << w.bits) - 1 - int(zero.min())
    kind = next((k for k, n in _SIGNED.items() if -n <= lowest and highest < n), None)
    low = -scale.float() * zero.float()
    if kind != "Q4_0" and w.bits <= 4 and torch.equal(low.half().float(), low):
        return Plan("Q4_1", scale, low.half())
    if kind is None:
        raise UnsupportedError(
            f"its zero points put {w.bits}-bit codes at levels {lowest} to {highest}, but Q8_0 has -128 to 127"
        )
    return Plan(kind, scale, shift=_SIGNED[kind] - zero)


def stored(w: QuantTensor) -> Array:
    """Return the bytes [N, …] of a matrix, in the type that `plan` chooses."""
    if isinstance(w, DenseTensor):
        return _bytes(w.weight)
    how = plan(w)
    assert isinstance(w, Planes)
    assert how.scale is not None
    N, K = w.shape
    codes = w.codes().to(torch.int16).reshape(N, K // BLOCK, BLOCK)
    if how.shift is not None:
        codes += _per_block(how.shift, w.group, K)
    parts = [_bytes(_per_block(how.scale, w.group, K))]
    if how.low is not None:
        parts.append(_bytes(_per_block(how.low, w.group, K)))
    q = codes.to(torch.uint8)
    if how.kind == "Q8_0":
        parts.append((q ^ 0x80).numpy())  # q holds the level + 128
    else:
        if how.kind.startswith("Q5"):
            parts.append(np.packbits((q >> 4).numpy(), axis=-1, bitorder="little"))
        parts.append(((q[..., :16] & 15) | (q[..., 16:] & 15) << 4).numpy())
    return np.concatenate(parts, axis=-1).reshape(N, -1)


def _per_block(per_group: Tensor, group: int, K: int) -> Tensor:
    """Repeat one value per group [N, C] over its blocks: [N, K/32, 1]."""
    return per_group.repeat_interleave(group // BLOCK, dim=-1)[:, : K // BLOCK, None]


def _bytes(values: Tensor) -> Array:
    return values.contiguous().view(torch.uint8).numpy()
