"""Time products of one token with trellis weights on this GPU next to cuBLAS fp16.

    python bench/gpu/trellis_cuda.py OUT.json
    python bench/gpu/trellis_cuda.py OUT.json --shapes 4096x4096 --kinds pair:2 --configs 0

Each kind (code:bits) is first checked: 512 outputs against the format's own values in f64, and bitwise equal reruns.
Then graph replays over more weights than L2 holds: the product with the chosen tile config, alone and with x encoded
and rotated, and the product with other tile configs. Ratios are to cuBLAS in the same run.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import Replay, clone, copies, gpu, read_ceiling, require_cuda
from crelle.formats.base import format_of
from crelle.formats.wrappers.hadamard import block_size
from crelle.formats.wrappers.rotated import MAX_BLOCK
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.launch import attributes, load, multiprocessors
from crelle.kernels.cuda.trellis import trellis_gemv
from crelle.kernels.cuda.trellis.trellis_gemv import TrellisTileConfig, TrellisX
from crelle.kernels.cuda.trellis.trellis_layout import TrellisWeight, lay_out

HALF = torch.float16
SHAPES = "4096x4096,11008x4096,12288x12288,49152x12288"
KINDS = "pair:2,pair:3,mul1:3,pair:4,mul1:4"
WARPS = ((4, 4), (8, 2), (16, 1))  # of a thread block, thread blocks of a multiprocessor
LOADS = ((4, 1), (2, 2), (4, 2), (2, 4))  # stages, units of a load
ROOM = 227 * 1024
TOLERANCE = 5e-4


def weight(N: int, K: int, code: str, bits: float) -> Any:
    inner = {"format": "trellis", "shape": [N, K], "bits": bits, "code": code}
    spec = {"format": "rotated", "shape": [N, K], "block": min(MAX_BLOCK, block_size(K)), "inner": inner}
    return format_of(spec).random(spec, torch.Generator("cuda").manual_seed(0))


def configs(w: TrellisWeight, size: int) -> Iterator[TrellisTileConfig]:
    """Tile configs besides the one that is chosen: for each number of warps, splits that fill the GPU or are 2^n."""
    yield trellis_gemv.choose(w)
    hopper, (tiles, units) = torch.cuda.get_device_capability() == (9, 0), w.units.shape[:2]
    for warps, occupancy in WARPS:
        places = occupancy * multiprocessors()

        def idle(split: int, places: int = places) -> float:
            return -(-tiles * split // places) * places / (tiles * split)

        enough = [s for s in trellis_gemv.SPLITS if units >= 2 * warps * s] or [1]
        splits = {min(enough, key=idle), *(s for s in enough if s in (1, 2, 4, 8))}
        for split in sorted(splits) if hopper else [0]:
            for stages, run in LOADS:
                c = TrellisTileConfig(warps, stages, run, occupancy, split)
                if occupancy * (trellis_gemv.shared_bytes(w, size, c) + 1024) <= ROOM + 1024:
                    yield c


def microseconds(calls: list[Any], y: Tensor) -> float:
    replay = Replay(calls)
    replay.check(y, "trellis")
    return replay.microseconds(11)


def measure(w: Any, x: Tensor, baseline: float, most: int) -> dict[str, Any]:
    """Check, then time one kind of weights."""
    laid = lay_out(w)
    rows = min(512, laid.N)
    oracle = x.double() @ w.rows(slice(0, rows)).dequantize(torch.float64).T
    xs: TrellisX = trellis_gemv.encode(x, laid)
    y = trellis_gemv.product(xs, laid)
    error = float((y[:, :rows].double() - oracle).norm() / oracle.norm())
    assert error <= TOLERANCE, error
    chosen, *others = dict.fromkeys(configs(laid, xs.size))
    others = others[: len(others) if most < 0 else most]
    variants = {trellis_gemv.product_variant(laid, xs.size, c, HALF) for c in (chosen, *others)}
    jit.compile_all(sorted(variants))
    weights = [laid, *(clone(laid) for _ in range(copies(laid.nbytes) - 1))]

    def product(c: TrellisTileConfig) -> dict[str, Any]:
        assert torch.equal(trellis_gemv.product(xs, laid, config=c), y), c
        us = microseconds([lambda v=v: trellis_gemv.product(xs, v, config=c) for v in weights], y)  # type: ignore[misc]
        kernel = attributes(load(*trellis_gemv.product_variant(laid, xs.size, c, HALF)))
        return {"config": asdict(c), "product_microseconds": us, "registers": kernel["registers"]}

    first = product(chosen)
    whole = microseconds([lambda v=v: trellis_gemv.matmul(x, v) for v in weights], y)  # type: ignore[misc]
    scheme = f"trellis:bits={laid.bits:g},code={laid.code.name}"
    found: dict[str, Any] = {"scheme": scheme, "shape": [laid.N, laid.K], "batch": x.shape[0], "kernel": "cuda-trellis"}
    found |= {"device": gpu()["name"], "error": error, "bytes": laid.nbytes, "microseconds": whole, **first}
    found |= {"baseline": "cuBLAS fp16", "baseline_microseconds": baseline}
    found["configs"] = sorted((product(c) for c in others), key=lambda f: f["product_microseconds"])
    best = min([first, *found["configs"]], key=lambda f: f["product_microseconds"])
    chosen_us, us = first["product_microseconds"], best["product_microseconds"]
    ours = f"{chosen_us:.2f} us x{baseline / chosen_us:.2f} {[*asdict(chosen).values()]}, with encode {whole:.2f} us"
    fastest = f"{us:.2f} us x{baseline / us:.2f} {[*best['config'].values()]} {laid.nbytes / us / 1e6:.2f} TB/s"
    print(f"{scheme} {laid.N}x{laid.K}: cuBLAS {baseline:.2f} us, chosen {ours}, best {fastest}, error {error:.1e}")
    for f in found["configs"][:5]:
        print("    ", *f["config"].values(), f"{f['product_microseconds']:.2f} us", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json", help="result file")
    parser.add_argument("--shapes", default=SHAPES, help=f"outputs x inputs, separated by commas; default: {SHAPES}")
    parser.add_argument("--kinds", default=KINDS, help=f"code:bits, separated by commas; default: {KINDS}")
    parser.add_argument("--rows", type=int, default=1, help="tokens; default: 1")
    parser.add_argument("--configs", type=int, default=-1, help="other tile configs to time; default: all")
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    ceiling, results = read_ceiling(), []
    command = " ".join(["python bench/gpu/trellis_cuda.py", args.out.name, *sys.argv[2:]])
    for N, K in (tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")):
        x = torch.randn(args.rows, K, device="cuda", dtype=HALF)
        dense = [torch.randn(N, K, device="cuda", dtype=HALF) for _ in range(copies(2 * N * K, most=8))]
        cublas = Replay([lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in dense])  # type: ignore[misc]
        baseline = cublas.microseconds(11)
        del dense, cublas
        for kind in args.kinds.split(","):
            code, bits = kind.split(":")
            results.append(measure(weight(N, K, code, float(bits)), x, baseline, args.configs))
            body = {"command": command, "gpu": gpu(), "ceiling": asdict(ceiling), "rows": results}
            write_result(args.out, body)


if __name__ == "__main__":
    main()
