"""Launches trellis_gemm.cu: products of many rows with trellis weights, decoded in the kernel.

    y = product(x, w, bias, residual)     # x [tokens, K], f16, rotated (trellis_gemv.rotate)

A tile is 256 outputs for `tokens` rows; on Hopper `split` thread blocks of a cluster share its inputs, and clusters
take tiles in turns. Sums are f32 in an order that depends on the tile config, so on the number of rows.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.trellis.trellis_layout import TrellisWeight

MOST_ROWS = 64  # beyond, torch's product with the dequantized weight is as fast, or faster
TOKENS = (32, 64)  # of a tile
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class TrellisGemmConfig:
    """Tile config of trellis_gemm.cu; but for `clusters` its template parameters."""

    tokens: int  # of a tile
    stages: int  # of 64 inputs
    split: int  # thread blocks of a cluster; 0: before Hopper
    clusters: int


def supports(x: Tensor, w: TrellisWeight) -> str | None:
    """Return None, or why x goes another way."""
    if x.dtype != torch.float16:
        return "decodes to float16 only"
    if w.K % 8 or x.data_ptr() % 16:
        return "needs rows of a multiple of 8 inputs, aligned to 16 bytes"
    return None if x.shape[0] <= MOST_ROWS else f"takes up to {MOST_ROWS} rows, not {x.shape[0]}"


def variant(w: TrellisWeight, c: TrellisGemmConfig) -> tuple[str, str]:
    pieces = f"{w.code.weights}, {w.shift}, {c.tokens}, {c.stages}"
    name = f"sm90<{pieces}, {c.split}, __half>" if c.split else f"sm80<{pieces}>"
    return "trellis/trellis_gemm.cu", f"crelle::trellis_gemm_{name}"


def product(
    x: Tensor,
    w: TrellisWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    config: TrellisGemmConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) for x [tokens, K] that has been rotated."""
    x = x.contiguous()
    y = torch.empty(x.shape[0], w.N, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    c = config or choose(w, x.shape[0])
    tiles, quads = w.units.shape[0], w.units.shape[1] // 4
    load(*variant(w, c))(
        (c.clusters * max(1, c.split), 1, 1),
        256,
        *(w.units, w.scale, x, bias, residual, y, w.N, x.shape[0], w.K, quads, tiles, w.N),
        0 if residual is None else residual.stride(0),
        shared=shared_bytes(w, c),
        pdl=True,
    )
    return y


def shared_bytes(w: TrellisWeight, c: TrellisGemmConfig) -> int:
    """Dynamic shared memory: stages, later the sums; as in trellis_gemm.cu."""
    return max(c.stages * (4 * int(512 * w.bits) + c.tokens * 160), c.tokens * 260 * 4)


def choose(w: TrellisWeight, rows: int, processors: int | None = None, hopper: bool | None = None) -> TrellisGemmConfig:
    """Return a tile config for this number of rows."""
    if hopper is None:
        hopper = torch.cuda.get_device_capability() == (9, 0)
    tokens = next((t for t in TOKENS if t >= rows), TOKENS[-1])
    tiles, quads = w.units.shape[0], w.units.shape[1] // 4
    return _choose(tiles * -(-rows // tokens), quads, tokens, processors or multiprocessors(), hopper)


@cache
def _choose(tiles: int, quads: int, tokens: int, processors: int, hopper: bool) -> TrellisGemmConfig:
    """Take the split with the fewest quads of units one after the other; a tile costs about 5 of them besides."""
    if not hopper:
        return TrellisGemmConfig(tokens, 3, 0, min(tiles, 2 * processors))

    def clusters(split: int) -> int:
        return max(1, processors // 16 * 16 * 2 // split)

    def work(split: int) -> int:
        return -(-tiles // clusters(split)) * (-(-quads // split) + 5)

    split = min((s for s in SPLITS if s == 1 or quads >= 2 * s), key=work)
    return TrellisGemmConfig(tokens, 4, split, min(tiles, clusters(split)))
