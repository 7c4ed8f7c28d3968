"""Time the mixed 2/4-bit kernels with many tile configs on this GPU, beside cuBLAS fp16 in the same run.

    python bench/tuning/tune_mixed.py OUT.json [SHAPES [TOKENS]]         e.g. 4096x4096,12288x12288 1,4

Every config is checked against f64 (512 rows) and for bitwise equal reruns, then timed twice by graph replays over
more weights than L2 holds; by mixed_gemv.cu with x encoded already, one token also by mixed_decode.cu, from x to y.
Each config is run with and without outliers, and in mixed_gemv.cu with scales decoded where they are used (sync) or a
unit ahead (async).
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from crelle.bench.kernels.cuda_timer import Replay, clone, copies, gpu
from crelle.bench.kernels.gemv_cuda import baseline
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.mixed import mixed_config, mixed_decode, mixed_gemv
from crelle.kernels.cuda.mixed.mixed_config import MixedTileConfig
from crelle.kernels.cuda.mixed.mixed_decode import DecodeConfig
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight, lay_out
from crelle.quantizers.scheme import parse

HALF = torch.float16
SCHEMES = ("mixed:group=16,four=0.25,outliers=0.002", "mixed:group=16,four=0.25,outliers=0")
SHAPES, TOKENS = "4096x4096,11008x4096,12288x12288,49152x12288", "1"
ROOM = 227 * 1024
PIECES = [  # tiles, warps, stages, occupancy
    *((1, warps, 4, 2) for warps in (8, 10, 11, 12)),
    (1, 8, 4, 3),
    *((2, warps, stages, 2) for warps in (8, 10) for stages in (2, 3)),
    *((3, 8, 2, occupancy) for occupancy in (1, 2)),
    (2, 16, 2, 1),
    (3, 16, 2, 1),
    (4, 8, 2, 2),
    (4, 12, 2, 1),
]
CONFIGS = [MixedTileConfig(*pieces) for pieces in PIECES]
CONFIGS += [replace(c, asynchronous=True) for c in CONFIGS if c.tiles < 3]
DECODE = [  # tiles, warps, stages, occupancy, blocks
    *((2, warps, 2, occupancy, 1) for warps in (10, 12, 16) for occupancy in (1, 2)),
    *((3, warps, 2, 1, 1) for warps in (12, 16)),
    *((tiles, 8, 2, 2, 2) for tiles in (2, 3)),
    (2, 10, 2, 2, 2),
    (1, 10, 2, 2, 2),
]


def fits(w: MixedWeight, tokens: int, c: MixedTileConfig) -> bool:
    inside = c.occupancy * (mixed_config.shared_bytes(w, tokens, c) + 1024) <= ROOM + 1024
    return inside and (tokens <= 2 or c.tiles == 1)


def measure(N: int, K: int, tokens: int, scheme: str, cublas: float) -> list[dict[str, Any]]:
    w = random_matrix(parse(scheme), N, K, random_generator(0, "cuda"))
    laid = lay_out(w)
    x = torch.randn(tokens, K, device="cuda", dtype=HALF)
    oracle = x.double() @ w.rows(slice(0, 512)).dequantize(torch.float64).T
    del w
    xs = mixed_gemv.encode(x, laid)
    weights = [laid, *(clone(laid) for _ in range(copies(laid.nbytes) - 1))]
    found = []
    chosen = mixed_config.choose(laid, xs.size)
    for c in [chosen, *(c for c in CONFIGS if c != chosen and fits(laid, xs.size, c))]:
        y = torch.full((tokens, N), torch.nan, device="cuda", dtype=HALF)
        mixed_gemv.product(xs, laid, HALF, out=y, config=c)
        error = float((y[:, :512].double() - oracle).norm() / oracle.norm())
        same = torch.equal(y, mixed_gemv.product(xs, laid, HALF, config=c))
        replay = Replay([lambda w=w, c=c: mixed_gemv.product(xs, w, HALF, config=c) for w in weights])
        us = [replay.microseconds(15), replay.microseconds(15)]
        row = {"shape": [N, K], "tokens": tokens, "scheme": scheme, "config": asdict(c), "chosen": c == chosen}
        row |= {"bits": 8 * laid.nbytes / N / K, "error": error, "same": same, "microseconds": us, "cublas": cublas}
        found.append(row)
        mark = "*" if c == chosen else " "
        pieces = f"{c.tiles} {c.warps:2d} {c.stages} {c.occupancy} {'async' if c.asynchronous else 'sync '}"
        print(
            f"{mark} {pieces} {us[0]:8.2f} {us[1]:8.2f} us  x{cublas / us[0]:.2f}  error {error:.1e} {same}", flush=True
        )
    if tokens == 1:
        found += measure_decode(x, weights, oracle, scheme, cublas)
    return found


def measure_decode(
    x: torch.Tensor, weights: list[MixedWeight], oracle: torch.Tensor, scheme: str, cublas: float
) -> list[dict[str, Any]]:
    laid, found = weights[0], []
    chosen = mixed_decode.choose([laid])
    for c in [chosen, *(c for c in (DecodeConfig(*pieces) for pieces in DECODE) if c != chosen)]:
        if c.blocks * (mixed_decode.shared_bytes([laid], c) + 1024) > ROOM + 1024:
            continue
        y = torch.full((1, laid.N), torch.nan, device="cuda", dtype=HALF)
        mixed_decode.product(x, [laid], HALF, out=y, config=c)
        error = float((y[:, :512].double() - oracle).norm() / oracle.norm())
        same = torch.equal(y, mixed_decode.product(x, [laid], HALF, config=c))
        replay = Replay([lambda w=w, c=c: mixed_decode.product(x, [w], HALF, config=c) for w in weights])
        us = [replay.microseconds(15), replay.microseconds(15)]
        row = {"shape": [laid.N, laid.K], "tokens": 1, "scheme": scheme, "decode": asdict(c), "chosen": c == chosen}
        found.append(row | {"error": error, "same": same, "microseconds": us, "cublas": cublas})
        pieces = f"{c.tiles} {c.warps:2d} {c.stages} {c.occupancy} {c.blocks} decode"
        mark = "*" if c == chosen else " "
        print(
            f"{mark} {pieces} {us[0]:8.2f} {us[1]:8.2f} us  x{cublas / us[0]:.2f}  error {error:.1e} {same}", flush=True
        )
    return found


def main(out: Path, shapes: str = SHAPES, tokens: str = TOKENS) -> None:
    counts = [int(t) for t in tokens.split(",")]
    some = [(c, t) for c in CONFIGS for t in counts if t <= 2 or c.tiles == 1]
    variants = {mixed_gemv.product_variant(1, t, c, HALF, HALF) for c, t in some}
    variants |= {mixed_decode.variant("PLAIN", DecodeConfig(*pieces), HALF, HALF) for pieces in DECODE}
    jit.compile_all(sorted(variants))
    results = []
    for shape in shapes.split(","):
        N, K = map(int, shape.split("x"))
        for t in counts:
            cublas = baseline(N, K, t, HALF, False).microseconds
            for scheme in SCHEMES:
                print(f"{shape}, {t} tokens, {scheme}: cuBLAS {cublas:.2f} us")
                results += measure(N, K, t, scheme, cublas)
    out.write_text(json.dumps({"gpu": gpu(), "results": results}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("shapes", nargs="?", default=SHAPES, help="N x K of the matrices, e.g. 4096x4096,14336x4096")
    parser.add_argument("tokens", nargs="?", default=TOKENS, help="e.g. 1,4")
    main(**vars(parser.parse_args()))
