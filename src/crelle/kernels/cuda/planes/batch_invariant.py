"""Batch-invariant GEMM: a fixed split-K, so that a row's bits do not depend on the number of rows.

planes   gemm.cu with the same split-K for every tile, as many splits as fill the device with one tile of tokens;
         up to INVARIANT_ROWS rows are one launch. Where gemm.py splits by the work at hand, this leaves processors
         idle, most of all for a few rows, which would take another kernel: what it costs a whole step of a 7B
         shape is under `exact` in bench/results/h200-serve.json
dense    torch in chunks of INVARIANT_DENSE_ROWS rows, some of them 0: its choice among its kernels follows the shape
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cuda.dispatch import INVARIANT_DENSE_ROWS, INVARIANT_ROWS
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.weight_layout import CudaWeight

_SIZES = (16, 32, 64, 128, 192, 256)  # tokens of a tile
_SM80 = gemm.GemmSm80TileConfig(
    16, 2, 4, 2, 2
)  # before Hopper; its split of K among warps is the same for any number of tokens


def matmul(x: Tensor, w: CudaWeight | Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) for x [M, K]."""
    if isinstance(w, CudaWeight):
        parts = [product(gemm.pack(rows, w), w, bias) for rows in x.split(INVARIANT_ROWS)]  # type: ignore[no-untyped-call]
    else:
        parts = [_dense(rows, w, bias) for rows in x.split(INVARIANT_DENSE_ROWS)]  # type: ignore[no-untyped-call]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_k(w: CudaWeight, processors: int) -> int:
    """Return the split-K of a tile of 128 rows with which all thread blocks run at once."""
    return max(1, min(8, w.blocks, processors // -(-w.N // 128)))


def tile_config(w: CudaWeight, tokens: int, dtype: torch.dtype, processors: int) -> gemm.GemmTileConfig:
    """Return the tile config of gemm.py for a tile that holds all tokens."""
    s = gemm._config_for(w, next(t for t in _SIZES if t >= tokens), dtype, processors)
    if s.warpgroups == 1:
        s = replace(s, warpgroups=2, occupancy=1)
    while gemm.shared_bytes(w, s) > gemm._SHARED // s.occupancy:
        if s.occupancy > 1:
            s = replace(s, occupancy=1)
        elif s.x_stages > 2:
            s = replace(s, x_stages=s.x_stages - 1)
        else:
            s = replace(s, w_stages=s.w_stages - 1)
    return s


def product(x: gemm.PackedX, w: CudaWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) for at most INVARIANT_ROWS rows."""
    M, device = x.tokens, x.xs.device
    assert M <= INVARIANT_ROWS
    if torch.cuda.get_device_capability() != (9, 0):
        return gemm.product(x, w, bias, config=_SM80)
    processors = multiprocessors()
    s, splits = tile_config(w, M, x.dtype, processors), split_k(w, processors)
    count = -(-w.N // (64 * s.warpgroups))
    grid = count * splits if splits > 1 else min(count, processors * s.occupancy)
    sums = grid * s.tokens * 64 * s.warpgroups if splits > 1 else 0
    partial = torch.empty(sums, dtype=torch.float32, device=device)
    y = torch.empty(M, w.N, dtype=x.dtype, device=device)
    load(*gemm.product_variant(w, s, x.dtype))(
        (grid, 1, 1),
        s.warpgroups * 128 + (128 if s.tokens > 128 else 32),
        *(w.words, w.scales, x.xs, bias, y, partial, x.semaphores),
        *(w.N, M, w.blocks, w.words.shape[2], w.blocks_per_scale, 0 if splits > 1 else count),
        shared=gemm.shared_bytes(w, s),
        pdl=True,
    )
    return y


def _dense(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    missing = INVARIANT_DENSE_ROWS - x.shape[0]
    return F.linear(F.pad(x, (0, 0, 0, missing)) if missing else x, w, bias)[: x.shape[0]]


def in_chunks(
    x: Tensor, addend: Tensor | None, run: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return both results of run(x, addend) for INVARIANT_ROWS rows at a time."""
    rows = [slice(at, at + INVARIANT_ROWS) for at in range(0, x.shape[0], INVARIANT_ROWS)]
    products, sums = zip(*(run(x[s], None if addend is None else addend[s]) for s in rows), strict=True)
    return torch.cat(products), torch.cat(sums)
