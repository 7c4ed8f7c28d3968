"""Time the products of integer weights and integer activations on this GPU beside cuBLAS fp16, int8 and fp8.

    python bench/gpu/integer_gemm.py OUT.json [SHAPES [ROWS [SCHEMES [CONFIGS]]]]   e.g. 4096x4096 16,64,512 atom-w4a8 1

    atom-…       groups of 128, each with a scale of x and of w; 128 int8 outliers (w4a8: and without)
    two-level-…  integer group scales, one scale of x for a token (and one for its 128 outliers)
    w8a8         one scale for a token and for a row
    int_mm       torch._int_mm: int8 by int8, int32 out, nothing scaled          more than 16 rows
    fp8          torch._scaled_mm, one scale for each matrix
x is encoded already. CONFIGS: also time tile configs around the chosen one. Everything of ours is checked first: 512
outputs against integer_reference, and bitwise equal reruns. Then graph replays over more weights than L2 holds.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import Replay, clone, copies, gpu
from crelle.formats.activations import ActivationSpec, QuantizedX
from crelle.formats.base import format_of
from crelle.kernels.base import Encoded
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.integer import integer_gemm
from crelle.kernels.cuda.integer.integer_gemm import IntegerSm80TileConfig, IntegerTileConfig
from crelle.kernels.cuda.integer.integer_layout import IntegerTiles, lay_out
from crelle.kernels.cuda.integer.integer_x import IntegerX
from crelle.kernels.integer_reference import IntegerReference

Config = IntegerTileConfig | IntegerSm80TileConfig
HALF, FP8 = torch.float16, torch.float8_e4m3fn
SHAPES = "4096x4096,11008x4096,8192x8192"
ROWS = "1,2,4,8,16,32,64,96,128,192,256,384,512,768,1024,2048,4096"
TOKEN = 1 << 17  # a group that holds all inputs
SCHEMES = {  # format, bits, of x, group, of x, outliers, of x
    "atom-w4a4": ("grouped", 4, 4, 128, 128, 128, 128),
    "atom-w4a8": ("grouped", 4, 8, 128, 128, 128, 128),
    "atom-w4a8-no-outliers": ("grouped", 4, 8, 128, 128, 0, 0),
    "two-level": ("two-level", 4, 8, 128, TOKEN, 0, 0),
    "two-level-outliers": ("two-level", 4, 8, 128, TOKEN, 128, 128),
    "w8a8": ("grouped", 8, 8, TOKEN, TOKEN, 0, 0),
}


def weight(name: str, N: int, K: int) -> Any:
    form, bits, bits_x, group, group_x, outliers, outliers_x = SCHEMES[name]
    act = ActivationSpec(bits_x, group_x, outliers_x)
    spec = {"format": form, "shape": [N, K], "bits": bits, "group": group, "outliers": outliers}
    spec |= {"permuted": False, "activation": act.to_json()}
    return format_of(spec).random(spec, torch.Generator("cuda").manual_seed(0))


def encoded(q: QuantizedX, w: Any) -> IntegerX:
    n = w.sizes.normal
    parts = [pad(p, (0, -p.shape[1] % 128)) for p in (q.codes[:, :n], q.codes[:, n:])]
    codes, more = torch.cat(parts, 1), -q.codes.shape[0] % 8
    scales = pad(q.scales, (0, 0, 0, more)).T.contiguous()
    return IntegerX(pad(codes, (0, 0, 0, more)).contiguous(), scales, q.codes.shape[0], HALF)


def weights_of(first: Any, size: int, rows: int) -> list[Any]:
    """Copies of a weight, fewer where a product takes longer than reading it."""
    count = copies(size, most=max(6, min(256, 65536 // rows)))
    return [first, *(clone(first) for _ in range(count - 1))]


def timed(multiply: Callable[[Any], Tensor], weights: list[Any]) -> list[float]:
    """Return two measurements."""
    replay = Replay([lambda w=w: multiply(w) for w in weights])  # type: ignore[misc]
    return [replay.microseconds(11), replay.microseconds(11)]


def checked(multiply: Callable[[Any], Tensor], weights: list[Any], oracle: Tensor) -> list[float]:
    y = multiply(weights[0])
    error = float((y[:, : oracle.shape[1]].float() - oracle).norm() / oracle.norm())
    assert error <= 5e-4, error
    assert torch.equal(y, multiply(weights[0]))
    return timed(multiply, weights)


def configs_near(w: IntegerTiles, rows: int) -> Iterator[Config]:
    """Tile configs that may be as good as the chosen one."""
    most = 256 if w.segments == 1 else 160
    for size in (8, 16, 32, 64, 96, 128, 160, 192, 256):
        if size > most or not (rows / 4 <= size < 2 * rows or size == 128 <= rows):
            continue
        for split in (1, 2, 4):
            yield from integer_gemm.tile_configs(w, size, split)
        if size <= 64 and rows <= 64:
            for tiles, along_n, along_k in ((2, 1, 8), (2, 2, 4), (2, 2, 8)):
                for stages in (2, 3):
                    few = IntegerSm80TileConfig(size, tiles, along_n, along_k, 2, stages, half_bytes=False)
                    if integer_gemm.sm80_shared_bytes(w, few) <= 226 * 1024:
                        yield few


def by_others(rows: int, N: int, K: int) -> dict[str, list[float]]:
    """Return the times of cuBLAS fp16, torch._int_mm and fp8."""
    x, dense = torch.randn(rows, K, device="cuda").half(), torch.randn(N, K, device="cuda").mul_(K**-0.5).half()
    found = {"cublas": timed(lambda w: torch.nn.functional.linear(x, w), weights_of(dense, 2 * N * K, rows))}
    codes, w8 = (torch.randint(-127, 128, (n, K), device="cuda", dtype=torch.int8) for n in (rows, N))
    if rows > 16:
        found["int_mm"] = timed(lambda w: torch._int_mm(codes, w.T), weights_of(w8, N * K, rows))
    one = torch.ones((), device="cuda")
    x8, each = x.to(FP8), weights_of(dense.to(FP8), N * K, rows)
    try:
        found["fp8"] = timed(lambda w: torch._scaled_mm(x8, w.T, one, one, out_dtype=HALF), each)
    except RuntimeError as e:  # some builds want rows in multiples of 16
        print("fp8:", str(e).splitlines()[0])
    return found


def measure(
    name: str, w: Any, laid: IntegerTiles, rows: int, others: dict[str, list[float]], near: bool
) -> dict[str, Any]:
    q = w.activation.quantize(torch.randn(rows, laid.K, device="cuda"))
    slab, reference = w.rows(slice(0, 512)), IntegerReference()
    oracle = reference.run(Encoded((q, torch.float32)), reference.prepare(slab, torch.float32))
    x, weights = encoded(q, w), weights_of(laid, laid.nbytes, rows)
    us = checked(lambda w: integer_gemm.product(x, w), weights, oracle)
    config = integer_gemm.choose(laid, rows)
    found: dict[str, Any] = {"scheme": name, "shape": [laid.N, laid.K], "rows": rows, "microseconds": us}
    found |= {"config": asdict(config), **others}
    ratios = "  ".join(f"{kind} x{min(times) / min(us):.2f}" for kind, times in others.items())
    shown = " ".join(map(str, asdict(config).values()))
    print(f"{name:22s} {laid.N}x{laid.K} {rows:5d}: {min(us):7.1f} us  {ratios}  [{shown}]", flush=True)
    if near:
        found["configs"] = []
        for c in sorted(set(configs_near(laid, rows)), key=str):
            us = checked(lambda w, c=c: integer_gemm.product(x, w, config=c), weights, oracle)
            found["configs"].append({"config": asdict(c), "microseconds": us})
        for f in sorted(found["configs"], key=lambda f: min(f["microseconds"]))[:5]:
            print("      ", *f["config"].values(), f"{min(f['microseconds']):.1f} us", flush=True)
    return found


def main(out: Path, shapes: str = SHAPES, rows: str = ROWS, schemes: str = "", configs: str = "") -> None:
    counts, names = [int(r) for r in rows.split(",")], schemes.split(",") if schemes else list(SCHEMES)
    command, results = (
        " ".join(["python bench/gpu/integer_gemm.py", out.name, shapes, rows, schemes, configs]).rstrip(),
        [],
    )
    for N, K in (tuple(map(int, shape.split("x"))) for shape in shapes.split(",")):
        others = {r: by_others(r, N, K) for r in counts}
        for name in names:
            w = weight(name, N, K)
            laid = lay_out(w)
            wanted = {integer_gemm.choose(laid, r) for r in counts}
            wanted |= {c for r in counts for c in configs_near(laid, r)} if configs else set()
            jit.compile_all(sorted({integer_gemm.variant(laid, s, HALF) for s in wanted}))
            results += [measure(name, w, laid, r, others[r], bool(configs)) for r in counts]
            write_result(out, {"command": command, "gpu": gpu(), "results": results})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("shapes", nargs="?", default=SHAPES, help="N x K of the matrices, e.g. 4096x4096,14336x4096")
    parser.add_argument("rows", nargs="?", default=ROWS, help="tokens, e.g. 16,64,512")
    parser.add_argument("schemes", nargs="?", default="", help="e.g. atom-w4a8,w8a8; all of them where it is missing")
    parser.add_argument("configs", nargs="?", default="", help="1: also time tile configs around the chosen ones")
    main(**vars(parser.parse_args()))
