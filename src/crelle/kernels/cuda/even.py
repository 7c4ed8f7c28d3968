"""Products whose sums have one order, whatever the number of rows: each row gets the same bits in any company.

planes   tiles.cu with every tile cut along K into the same shares, as many as fill the device with one tile of
         tokens; up to 256 rows are one launch. Where tiles.py cuts by the work at hand, as fast as can be, this
         leaves processors idle, most of all for a few rows, which would not come here at all: what it costs a whole
         step of a 7B shape is under `exact` in bench/results/h200-serve.json
dense    torch in chunks of INVARIANT_DENSE_ROWS rows, some of them 0: its choice among its kernels follows the shape
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cuda import tiles
from crelle.kernels.cuda.dispatch import INVARIANT_DENSE_ROWS, INVARIANT_ROWS
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.layout import CudaWeight

_SIZES = (16, 32, 64, 128, 192, 256)  # tokens of a tile
_OLD = tiles.OldShape(16, 2, 4, 2, 2)  # before Hopper; its teams share K alike for any number of tokens


def matmul(x: Tensor, w: CudaWeight | Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) for x [M, K]."""
    if isinstance(w, CudaWeight):
        parts = [product(tiles.arrange(rows, w), w, bias) for rows in x.split(INVARIANT_ROWS)]  # type: ignore[no-untyped-call]
    else:
        parts = [_dense(rows, w, bias) for rows in x.split(INVARIANT_DENSE_ROWS)]  # type: ignore[no-untyped-call]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shares(w: CudaWeight, processors: int) -> int:
    """Return into how many shares a tile of 128 rows is cut along K, so that all run at once."""
    return max(1, min(8, w.blocks, processors // -(-w.N // 128)))


def shape(w: CudaWeight, tokens: int, dtype: torch.dtype, processors: int) -> tiles.Shape:
    """Return the cut of tiles.py for a tile that holds all tokens."""
    s = tiles._shape(w, next(t for t in _SIZES if t >= tokens), dtype, processors)
    if s.warpgroups == 1:
        s = replace(s, warpgroups=2, resident=1)
    while tiles.shared_bytes(w, s) > tiles._SHARED // s.resident:
        if s.resident > 1:
            s = replace(s, resident=1)
        elif s.x_stages > 2:
            s = replace(s, x_stages=s.x_stages - 1)
        else:
            s = replace(s, w_stages=s.w_stages - 1)
    return s


def product(x: tiles.Arranged, w: CudaWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) for at most INVARIANT_ROWS rows."""
    M, device = x.tokens, x.xs.device
    assert M <= INVARIANT_ROWS
    if torch.cuda.get_device_capability() != (9, 0):
        return tiles.product(x, w, bias, shape=_OLD)
    processors = multiprocessors()
    s, cut = shape(w, M, x.dtype, processors), shares(w, processors)
    count = -(-w.N // (64 * s.warpgroups))
    grid = count * cut if cut > 1 else min(count, processors * s.resident)
    sums = grid * s.tokens * 64 * s.warpgroups if cut > 1 else 0
    partial = torch.empty(sums, dtype=torch.float32, device=device)
    y = torch.empty(M, w.N, dtype=x.dtype, device=device)
    load(*tiles.product_variant(w, s, x.dtype))(
        (grid, 1, 1),
        s.warpgroups * 128 + (128 if s.tokens > 128 else 32),
        *(w.words, w.scales, x.xs, bias, y, partial, x.flags),
        *(w.N, M, w.blocks, w.words.shape[2], w.span, 0 if cut > 1 else count),
        shared=tiles.shared_bytes(w, s),
        overlap=True,
    )
    return y


def _dense(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    missing = INVARIANT_DENSE_ROWS - x.shape[0]
    return F.linear(F.pad(x, (0, 0, 0, missing)) if missing else x, w, bias)[: x.shape[0]]
