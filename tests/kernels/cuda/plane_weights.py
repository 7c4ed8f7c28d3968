"""Random weights of every kind for the tests of the CUDA kernels, and the way back from their layout."""

import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.kernels.cuda.weight_layout import BLOCK, ROWS, CudaWeight, ScaleKind

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


def numbers_in(w: CudaWeight) -> Tensor:
    """Read the numbers f64 [N, K] back out of the layout, by its description alone."""
    tiles, blocks = w.words.shape[:2]
    span_of = torch.arange(blocks) // w.blocks_per_scale
    bits = torch.zeros(w.P, tiles * ROWS, blocks * BLOCK, dtype=torch.float64)
    scales = torch.zeros(w.scales.shape[-2], tiles * ROWS, blocks * BLOCK, dtype=torch.float64)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i, (half, row) in enumerate(((0, g), (0, g + 8), (1, g), (1, g + 8))):
            for j in range(32):
                column = torch.arange(blocks) * BLOCK + 128 * half + 32 * t + j
                found = (w.words[:, :, : w.P, lane, i].long() >> j & 1).double()  # [tiles, blocks, P]
                for tile in range(tiles):
                    bits[:, tile * ROWS + row, column] = found[tile].T
    for at in range(BLOCK):
        group = at * w.groups // BLOCK
        for row in range(ROWS):
            found = w.scales[:, span_of, row % 8, group, :, row // 8].double()  # [tiles, blocks, words]
            for tile in range(tiles):
                scales[:, tile * ROWS + row, torch.arange(blocks) * BLOCK + at] = found[tile].T
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
    for at, k in enumerate(order.tolist()):
        if 0 <= k < w.K:
            out[:, k] = numbers[: w.N, at]
    return out
