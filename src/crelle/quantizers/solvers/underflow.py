"""Warnings about weights that underflow the f16 scales of a format.

The smallest f16 is 2^-24 = 6e-8, and below 2^-14 it keeps ever fewer bits. A group whose largest scale is below
2^-19 has lost the last five of its eleven bits; far below 2^-24 it becomes zeros. That is no error, since such weights
may not matter, but the user is told.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.bcq import groups_in
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.quantizers.solvers.grouping import to_groups

COARSE = 2.0**-19  # a scale below this is off by up to 1.6%


def underflow(name: str, stored: QuantTensor, source: Callable[[], Tensor]) -> str | None:
    """Return a sentence if groups of a matrix are too small for f16; `source` reads its weights [N, K] as they were."""
    inner, order = (stored.inner, stored.order) if isinstance(stored, PermutedTensor) else (stored, None)
    scales = [t for t in inner.tensors().values() if t.is_floating_point()]
    if not any(t.dtype == torch.float16 for t in scales):
        return None
    N, K = inner.shape
    per_group = (N, groups_in(K, inner.group)) if inner.quantized and inner.group else None
    # Without one group size, or with columns in an order of their own, rows count as groups.
    by_row = any(t.shape[-2:] != per_group for t in scales) or getattr(inner, "perm", None) is not None
    if by_row:
        scales = [inner.dequantize()]
    small = torch.stack([_largest(t, N, by_row) for t in scales]).amax(0) < COARSE  # [N, C]
    if not bool(small.any()):
        return None
    weight = source().to(small.device, torch.float32)
    weight = weight if order is None else weight[:, order.long()]
    groups, _ = to_groups(weight, K if by_row or inner.group is None else inner.group)
    size = groups.abs().amax(-1)  # [N, C]
    lost = small & (size > 0)
    if by_row:  # what was f16 before is the same after
        lost &= (inner.dequantize() - weight).abs().amax(-1, keepdim=True) > size / 64
    if not (count := int(lost.sum())):
        return None
    module, what = name.removesuffix(".weight"), "rows" if by_row else "groups"
    return (
        f"'{name}': {count} of {lost.numel()} {what} have weights too small for f16 (at most "
        f"{float(size[lost].max()):.1e}), which become zero or inaccurate; --override '{module}=bf16' keeps them"
    )


def _largest(t: Tensor, N: int, by_row: bool) -> Tensor:
    """Return the largest value per group [N, C]; alphas and nested scales have a leading dimension."""
    t = t.abs().float()
    return t.amax(-1, keepdim=True) if by_row else t.reshape(-1, N, t.shape[-1]).amax(0)
