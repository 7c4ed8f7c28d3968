"""Time products of one token with MXFP4 and NVFP4 weights on this GPU next to cuBLAS fp16.

    python bench/gpu/fp4_cuda.py OUT.json
    python bench/gpu/fp4_cuda.py OUT.json --shapes 4096x4096 --kinds mxfp4 --configs 0
    python bench/gpu/fp4_cuda.py OUT.json --rows 16 --configs 0     # more rows: GEMV or GEMM, as dispatch.py says

Each kind is first checked: on fresh inputs of odd shapes, 1 to 40 rows, fp16 and bf16, then at the shape that is timed,
512 outputs against the format's own values in f64, and bitwise equal reruns. Then graph replays over more weights than
L2 holds: the product with the chosen tile config and with others, and with an RMS norm before it. Ratios are to cuBLAS
in the same run. A table stands last.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import Replay, clone, copies, gpu, poison, read_ceiling, require_cuda
from crelle.formats.base import format_of
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.fp4 import fp4_gemm, fp4_gemv
from crelle.kernels.cuda.fp4.fp4_gemv import Fp4TileConfig
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight, lay_out
from crelle.kernels.cuda.launch import attributes, load, most_shared_memory, recording

HALF = torch.float16
SHAPES = "4096x4096,12288x12288,49152x12288"
KINDS = "mxfp4,nvfp4"
ASKED = {(4096, 4096): 2.6, (12288, 12288): 3.2}  # times cuBLAS, one token
CONFIGS = [  # tiles, warps, stages, thread blocks of a multiprocessor
    *((1, 8, stages, held) for stages, held in ((2, 2), (2, 3), (3, 2), (3, 3), (4, 2))),
    *((1, 16, stages, held) for stages, held in ((1, 1), (2, 1), (2, 2))),
    *((1, 4, stages, held) for stages, held in ((4, 4), (4, 6))),
    *((2, 8, stages, held) for stages, held in ((1, 2), (2, 1), (2, 2), (2, 3))),
    *((2, 16, stages, held) for stages, held in ((1, 1), (2, 1))),
    *((2, 4, stages, held) for stages, held in ((2, 4), (3, 3))),
    (4, 8, 1, 2),
    (4, 8, 2, 1),
]
TOLERANCE = {HALF: 5e-4, torch.bfloat16: 4e-3}  # of the rounding of y, mostly


def weight(N: int, K: int, kind: str) -> Any:
    spec: dict[str, Any] = {"format": kind, "shape": [N, K], "bits": 4, "group": 32 if kind == "mxfp4" else 16}
    spec |= {"divides": True} if kind == "nvfp4" else {}
    return format_of(spec).random(spec, torch.Generator("cuda").manual_seed(0))


def error_of(y: Tensor, x: Tensor, w: Any) -> float:
    rows = min(512, w.shape[0])
    oracle = x.double() @ w.rows(slice(0, rows)).dequantize(torch.float64).T
    return float((y[:, :rows].double() - oracle).norm() / oracle.norm())


def odd_products(kind: str) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """Yield products, inputs and weights of odd shapes."""
    for N, K in ((33, 777), (300, 4096), (4096, 1000)):
        w = weight(N, K, kind)
        laid = lay_out(w)
        for dtype in TOLERANCE:
            for rows in (1, 3, 8, 16, 40):
                x = torch.randn(rows, K, device="cuda").to(dtype)
                poison(rows, N, dtype=dtype)
                yield fp4_gemm.matmul(x, laid), x, w


def check(kinds: list[str]) -> None:
    """Compare products of odd shapes with f64; compile all of their kernels at once."""
    with recording() as needed:
        for kind in kinds:
            list(odd_products(kind))
    jit.compile_all(sorted(needed))
    for kind in kinds:
        for y, x, w in odd_products(kind):
            error = error_of(y, x, w)
            assert error <= TOLERANCE[x.dtype], (kind, w.shape, x.shape, x.dtype, error)


def configs(w: Fp4Weight, most: int) -> Iterator[Fp4TileConfig]:
    """The chosen one, then others that fit."""
    yield fp4_gemv.choose(w)
    room = most_shared_memory()
    others = [Fp4TileConfig(*c) for c in CONFIGS]
    fitting = [c for c in others if c.occupancy * (fp4_gemv.shared_bytes(w, 1, c) + 1024) <= room + 1024]
    yield from fitting[: len(fitting) if most < 0 else most]


def microseconds(calls: list[Any], y: Tensor) -> float:
    replay = Replay(calls)
    replay.check(y, "fp4")
    return replay.microseconds(9)


def measure(w: Any, x: Tensor, baseline: float, most: int) -> dict[str, Any]:
    """Check, then time one kind of weights."""
    laid, tokens = lay_out(w), x.shape[0]
    y = fp4_gemm.matmul(x, laid)
    assert torch.equal(fp4_gemm.matmul(x, laid), y)
    found: dict[str, Any] = {"scheme": w.format, "shape": [laid.N, laid.K], "batch": tokens, "kernel": "cuda-fp4"}
    found |= {"device": gpu()["name"], "error": error_of(y, x, w), "bytes": laid.nbytes}
    assert found["error"] <= TOLERANCE[HALF], found
    weights = [laid, *(clone(laid) for _ in range(copies(laid.nbytes) - 1))]
    found["microseconds"] = microseconds([lambda v=v: fp4_gemm.matmul(x, v) for v in weights], y)
    found |= {"baseline": "cuBLAS fp16", "baseline_microseconds": baseline, "ratio": baseline / found["microseconds"]}
    if tokens > 1:
        return found
    tried = list(dict.fromkeys(configs(laid, most)))
    jit.compile_all(sorted(fp4_gemv.gemv_variant(laid, "PLAIN", 1, c, True, HALF, HALF, hopper()) for c in tried))
    found["config"], found["configs"] = asdict(tried[0]), []
    for c in tried:
        own = fp4_gemv.product(x, laid, config=c)
        assert error_of(own, x, w) <= TOLERANCE[HALF], c
        us = microseconds([lambda v=v, c=c: fp4_gemv.product(x, v, config=c) for v in weights], own)
        kernel = attributes(load(*fp4_gemv.gemv_variant(laid, "PLAIN", 1, c, True, HALF, HALF, hopper())))
        found["configs"].append({"config": asdict(c), "microseconds": us, "registers": kernel["registers"]})
    found["configs"].sort(key=lambda f: f["microseconds"])
    norm = torch.rand(laid.K, device="cuda").to(HALF)
    first = fp4_gemv.product(x, laid, "RMS_NORM", norm, eps=1e-5)
    normed = [lambda v=v: fp4_gemv.product(x, v, "RMS_NORM", norm, eps=1e-5) for v in weights]
    found["with_norm_microseconds"] = microseconds(normed, first)
    for f in found["configs"][:6]:
        print("    ", *f["config"].values(), f"{f['microseconds']:.2f} us, {f['registers']} registers", flush=True)
    return found


def hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def row(f: dict[str, Any], ceiling: float) -> str:
    """A line of the table."""
    N, K = f["shape"]
    best = f["configs"][0] if f.get("configs") else {"microseconds": f["microseconds"], "config": {}}
    asked = ASKED.get((N, K)) if f["batch"] == 1 else None
    share = f["bytes"] / f["microseconds"] / 1e3 / ceiling
    line = f"{f['scheme']} {N}x{K} M={f['batch']}: cuBLAS {f['baseline_microseconds']:.2f} us, "
    line += f"chosen {[*f.get('config', {}).values()]} {f['microseconds']:.2f} us x{f['ratio']:.2f} ({share:.0%} of "
    line += f"the ceiling), best {[*best['config'].values()]} {best['microseconds']:.2f} us "
    line += f"x{f['baseline_microseconds'] / best['microseconds']:.2f}, "
    line += f"with norm {f['with_norm_microseconds']:.2f} us, " if "with_norm_microseconds" in f else ""
    return line + f"error {f['error']:.1e}" + (f"; asked x{asked}" if asked else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json", help="result file")
    parser.add_argument("--shapes", default=SHAPES, help=f"outputs x inputs, separated by commas; default: {SHAPES}")
    parser.add_argument("--kinds", default=KINDS, help=f"formats, separated by commas; default: {KINDS}")
    parser.add_argument("--rows", type=int, default=1, help="tokens; default: 1")
    parser.add_argument("--configs", type=int, default=-1, help="other tile configs to time; default: all")
    parser.add_argument("--seconds", type=float, default=85, help="time limit; default: 85")
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    start = perf_counter()
    ceiling, results = read_ceiling(), []
    command = " ".join(["python bench/gpu/fp4_cuda.py", args.out.name, *sys.argv[2:]])
    kinds = args.kinds.split(",")
    check(kinds)
    print(f"checked in {perf_counter() - start:.0f} s", flush=True)
    for N, K in (tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")):
        if perf_counter() - start > args.seconds:
            print(f"{N}x{K}: left out, {args.seconds:g} s have passed")
            continue
        x = torch.randn(args.rows, K, device="cuda", dtype=HALF)
        dense = [torch.randn(N, K, device="cuda", dtype=HALF) for _ in range(copies(2 * N * K, most=8))]
        cublas = Replay([lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in dense])  # type: ignore[misc]
        baseline = cublas.microseconds(11)
        del dense, cublas
        for kind in kinds:
            most = args.configs if perf_counter() - start < args.seconds * 0.8 else 0
            results.append(measure(weight(N, K, kind), x, baseline, most))
            write_result(args.out, {"command": command, "gpu": gpu(), "ceiling": asdict(ceiling), "rows": results})
    for f in results:
        print(row(f, ceiling.gb_per_s))
    print(f"{perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
