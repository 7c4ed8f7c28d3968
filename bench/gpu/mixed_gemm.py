"""Time the products of many rows with mixed 2/4-bit weights on this GPU, by every route, beside cuBLAS fp16.

    python bench/gpu/mixed_gemm.py OUT.json [SHAPES [ROWS [CONFIGS]]]         e.g. 4096x4096 16,64,512 1

    gemv        mixed_gemv.cu, up to 8 rows a launch, x encoded first          up to 64 rows
    gemm        mixed_gemm.cu, x packed first; `product` without the packing, which a model's norms do
    invariant   the same with a fixed split of K                               up to 256 rows
    torch       the weight dequantized (mixed_dequant.cu), then torch

CONFIGS: also time the tile configs below. Everything is checked against f64 (512 outputs) and for bitwise equal reruns,
then timed by graph replays over more weights than L2 holds.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.bench.environment import environment
from crelle.bench.kernels.cuda_timer import Replay, clone, copies, gpu, poison
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.kernels.cuda import dispatch, jit
from crelle.kernels.cuda.mixed import mixed_gemm, mixed_gemv
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight, lay_out
from crelle.kernels.cuda.planes.gemm import GemmTileConfig
from crelle.quantizers.scheme import parse

HALF, TOLERANCE = torch.float16, 1e-3
SCHEME = "mixed:group=16,four=0.25,outliers=0.002"
SHAPES = "4096x4096,12288x4096,4096x11008"
ROWS = "1,2,4,8,12,16,24,32,48,64,96,128,192,256,384,512,768,1024,2048,4096"
CONFIGS = [  # tokens, warpgroups, x_chunks, x_stages, w_stages, occupancy, split_k
    *((t, *rest) for t in (16, 32) for rest in ((1, 2, 4, 2, 3), (2, 2, 4, 3, 1), (3, 2, 4, 3, 1), (4, 2, 4, 2, 1))),
    *((t, *rest) for t in (16, 32) for rest in ((2, 2, 4, 3, 1, 4), (3, 2, 4, 3, 1, 2), (4, 2, 4, 2, 1, 2))),
    *((t, *rest) for t in (16, 32) for rest in ((2, 2, 4, 3, 1, 2), (4, 2, 4, 2, 1, 4), (4, 2, 4, 2, 1, 8))),
    *((64, 2, 2, 4, 2, 1), (64, 3, 2, 4, 2, 1), (64, 4, 2, 3, 2, 1), (64, 2, 2, 4, 2, 1, 2), (64, 2, 2, 4, 2, 1, 4)),
    *((64, 3, 2, 4, 2, 1, 2), (64, 4, 2, 4, 2, 1, 2), (64, 4, 2, 4, 2, 1, 4), (128, 2, 2, 4, 2, 1)),
    *((128, 2, 2, 4, 2, 1, 2), (128, 2, 2, 4, 2, 1, 4), (128, 3, 2, 3, 2, 1), (128, 3, 2, 3, 2, 1, 2)),
    *((192, 2, 1, 5, 2, 1), (256, 2, 1, 4, 2, 1), (256, 2, 1, 4, 2, 1, 2)),
]


def weights_of(first: Any, rows: int) -> list[Any]:
    """Copies of a weight, fewer where a product takes longer than reading it."""
    size = first.nbytes if isinstance(first, MixedWeight) else 2 * first.numel()
    count = copies(size, most=max(6, min(256, 65536 // rows)))
    return [first, *(clone(first) for _ in range(count - 1))]


def timed(multiply: Callable[[Any], Tensor], weights: list[Any], oracle: Tensor) -> list[float]:
    """Return two measurements of a product that was checked."""
    N = weights[0].shape[0] if isinstance(weights[0], Tensor) else weights[0].N
    poison(oracle.shape[0], N, dtype=HALF)
    y = multiply(weights[0])
    error = float((y[:, : oracle.shape[1]].double() - oracle).norm() / oracle.norm())
    assert error <= TOLERANCE, error
    assert torch.equal(y, multiply(weights[0]))
    replay = Replay([lambda w=w: multiply(w) for w in weights])  # type: ignore[misc]
    return [replay.microseconds(11), replay.microseconds(11)]


def by_torch(x: Tensor, w: MixedWeight) -> Tensor:
    route = dispatch.mixed_route
    dispatch.mixed_route = lambda rows: "torch"
    try:
        return mixed_gemv.matmul(x, w)
    finally:
        dispatch.mixed_route = route


def measure(laid: MixedWeight, dense: Tensor, slab: Tensor, rows: int, configs: bool) -> dict[str, Any]:
    x = torch.randn(rows, laid.K, device="cuda", dtype=HALF)
    oracle, weights = x.double() @ slab.T, weights_of(laid, rows)
    found: dict[str, Any] = {"shape": [laid.N, laid.K], "rows": rows, "route": dispatch.mixed_route(rows)}
    found["cublas"] = timed(
        lambda w: torch.nn.functional.linear(x, w), weights_of(dense, rows), x.double() @ dense[:512].double().T
    )
    found["gemm"] = timed(lambda w: mixed_gemm.product(mixed_gemm.pack(x, w), w), weights, oracle)
    xs = mixed_gemm.pack(x, laid)
    found["product"] = timed(lambda w: mixed_gemm.product(xs, w), weights, oracle)
    found["config"] = asdict(mixed_gemm.choose(laid, rows))
    if rows <= 64:
        found["gemv"] = timed(lambda w: mixed_gemv.product(mixed_gemv.encode(x, w), w, HALF), weights, oracle)
    if rows <= dispatch.INVARIANT_ROWS:
        found["invariant"] = timed(lambda w: mixed_gemm.invariant_product(mixed_gemm.pack(x, w), w), weights, oracle)
    if rows >= 16:
        found["torch"] = timed(lambda w: by_torch(x, w), weights, oracle)
    names = ("gemm", "product", "gemv", "invariant", "torch")
    each = "  ".join(
        f"{n} {min(found[n]):.1f} x{min(found['cublas']) / min(found[n]):.2f}" for n in names if n in found
    )
    print(f"{laid.N}x{laid.K} {rows:5d} rows: cuBLAS {min(found['cublas']):.1f} us  {each}", flush=True)
    if configs:
        found["configs"] = []
        for pieces in CONFIGS:
            c = GemmTileConfig(*pieces)
            if (
                c.tokens > 2 * rows
                or (c.tokens < 128 and 4 * c.tokens < rows)
                or mixed_gemm.shared_bytes(c) * c.occupancy > 226 * 1024
            ):
                continue
            us = timed(lambda w, c=c: mixed_gemm.product(mixed_gemm.pack(x, w), w, config=c), weights, oracle)
            found["configs"].append({"config": asdict(c), "microseconds": us})
        best = sorted(found["configs"], key=lambda f: min(f["microseconds"]))
        for f in best[:5]:
            print("      ", *f["config"].values(), f"{min(f['microseconds']):.1f} us", flush=True)
    return found


def main(out: Path, shapes: str = SHAPES, rows: str = ROWS, configs: str = "") -> None:
    counts = [int(r) for r in rows.split(",")]
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]
    if configs:
        jit.compile_all(sorted({mixed_gemm.variant(1, GemmTileConfig(*c), HALF) for c in CONFIGS}))
    results = []
    for N, K in sizes:
        w = random_matrix(parse(SCHEME), N, K, random_generator(0, "cuda"))
        laid, slab = lay_out(w), w.rows(slice(0, 512)).dequantize(torch.float64)
        del w
        chosen = [mixed_gemm.choose(laid, r) for r in counts]
        chosen += [mixed_gemm.invariant_config(r) for r in counts if r <= dispatch.INVARIANT_ROWS]
        jit.compile_all(sorted({mixed_gemm.variant(1, s, HALF) for s in chosen}))
        dense = torch.randn(N, K, device="cuda").mul_(K**-0.5).half()
        results += [measure(laid, dense, slab, r, bool(configs)) for r in counts]
        command = {"command": f"python bench/gpu/mixed_gemm.py OUT.json {shapes} {rows} {configs}".strip()}
        found = {**environment(), **command, "gpu": gpu(), "scheme": SCHEME, "results": results}
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("shapes", nargs="?", default=SHAPES, help="N x K of the matrices, e.g. 4096x4096,14336x4096")
    parser.add_argument("rows", nargs="?", default=ROWS, help="tokens, e.g. 16,64,512")
    parser.add_argument("configs", nargs="?", default="", help="1: also time tile configs around the chosen ones")
    main(**vars(parser.parse_args()))
