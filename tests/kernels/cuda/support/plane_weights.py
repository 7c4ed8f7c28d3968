"""Random weights of every kind for the tests of the CUDA kernels, and the way back from their layout."""

import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.kernels.cuda.planes.weight_layout import BLOCK, ROWS, CudaWeight, ScaleKind

KINDS = [
    (ScaleKind.BCQ, 1, 32),
    (ScaleKind.BCQ, 2, 128),
    (ScaleKind.BCQ, 3, 64),
    (ScaleKind.BCQ, 4, 256),
    (ScaleKind.BCQ, 5, 128),
    (ScaleKind.BCQ, 8, 48),
    (ScaleKind.BCQ_SYMMETRIC, 2, 64),
    (ScaleKind.BCQ_SYMMETRIC, 6, 10**6),
    (ScaleKind.UNIFORM, 2, 128),
    (ScaleKind.UNIFORM, 3, 32),
    (ScaleKind.UNIFORM, 4, 512),
    (ScaleKind.UNIFORM, 8, 128),
    (ScaleKind.UNIFORM_SYMMETRIC, 4, 64),
    (ScaleKind.AFFINE, 2, 40),
    (ScaleKind.AFFINE, 3, 10**6),
    (ScaleKind.AFFINE, 6, 96),
]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}  # relative, of the norm, against f64


def relative(y: Tensor, oracle: Tensor) -> float:
    """The norm of the error over that of the oracle; a NaN fails every comparison."""
    return float((y.double() - oracle).norm() / oracle.norm())


def random_weight(
    kind: ScaleKind, P: int, N: int, K: int, group: int, dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> QuantTensor:
    """A matrix [N, K] with random planes and plausible scales."""
    group = min(group, K)
    C = -(-K // group)
    planes = torch.randint(0, 256, (P, N, -(-K // 8)), dtype=torch.uint8, device=device)
    if K % 8:
        planes[:, :, -1] &= (1 << K % 8) - 1
    alpha = (torch.rand(P, N, C, device=device) * 0.1 + 0.01).to(dtype)
    low = (torch.randn(N, C, device=device) * 0.05).to(dtype)
    if kind is ScaleKind.BCQ or kind is ScaleKind.BCQ_SYMMETRIC:
        return BCQTensor(planes, K, group, alpha, low if kind is ScaleKind.BCQ else None)
    if kind is ScaleKind.AFFINE:
        return AffineTensor(planes, K, group, alpha[0], low)
    zero = torch.randint(0, 256, (N, -(-C * P // 8)), dtype=torch.uint8, device=device)
    return UniformTensor(planes, K, group, alpha[0], zero if kind is ScaleKind.UNIFORM else None)


def values_in(w: CudaWeight) -> Tensor:
    """Read the values f64 [N, K] back out of the layout, by its description alone."""
    tiles, blocks = w.words.shape[:2]
    size = (-1, tiles * ROWS, blocks * BLOCK)
    # Lane (g, t), word (half, high), bit j: row g + 8 high of the tile, column 128 half + 32 t + j of the block.
    words = w.words[:, :, : w.P].long().reshape(tiles, blocks, w.P, 8, 4, 2, 2, 1) >> torch.arange(32) & 1
    bits = words.permute(2, 0, 6, 3, 1, 5, 4, 7).reshape(size).double()
    # Row r of a tile is [r % 8, …, r // 8]; a block has `groups` of them, some blocks share one.
    group = torch.arange(BLOCK) * w.groups // BLOCK
    found = w.scales[:, torch.arange(blocks) // w.blocks_per_scale][
        :, :, :, group
    ].double()  # [tiles, blocks, 8, BLOCK, words, 2]
    scales = found.permute(4, 0, 5, 2, 1, 3).reshape(size)
    code = sum(bits[p] * 2.0 ** (w.P - 1 - p) for p in range(w.P))
    if w.kind is ScaleKind.BCQ or w.kind is ScaleKind.BCQ_SYMMETRIC:
        numbers = sum(scales[p] * (2 * bits[p] - 1) for p in range(w.P))
        numbers = numbers + scales[w.P] if w.kind is ScaleKind.BCQ else numbers
    elif w.kind is ScaleKind.AFFINE:
        numbers = scales[1] + scales[0] * code
    else:
        zero = scales[1] if w.kind is ScaleKind.UNIFORM else torch.full_like(scales[0], 2.0 ** (w.P - 1))
        numbers = scales[0] * (code - zero)
    assert isinstance(numbers, Tensor)
    order = torch.arange(blocks * BLOCK) if w.perm is None else w.perm.long()
    out = torch.full((w.N, w.K), torch.nan, dtype=torch.float64)
    inside = (order >= 0) & (order < w.K)
    out[:, order[inside]] = numbers[: w.N, inside]
    return out
