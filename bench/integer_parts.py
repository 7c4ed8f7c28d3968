"""What the parts of the integer GEMM on Hopper cost: the source with some of them taken out, timed; needs a GPU.

    python bench/integer_parts.py OUT.json [two-level,atom-w4a8]

One tile on each multiprocessor; the time of a block of 128 inputs is the slope from K = 4096 to 12288, so that what is
fixed drops out. With parts taken out results are wrong, which is why only the whole kernel is checked. Columns:

    whole           as it is
    no copies       nothing is loaded; barriers as usual
    no loads        codes are not read from shared memory, but unpacked
    no arithmetic   codes are read and multiplied as they lie
    no unpacking    neither
    no scaling      the sums of groups are dropped
    products        what is left without copies, unpacking and scaling
    copies          what is left without unpacking, scaling and three quarters of the products
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from edited_sources import Edit, edited
from integer_gemm import HALF, clone, encoded, weight

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import Replay, gpu
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.integer import integer_gemm
from crelle.kernels.cuda.integer.integer_gemm import IntegerTileConfig
from crelle.kernels.cuda.integer.integer_layout import lay_out

INPUTS = 4096, 12288
COPIES: list[Edit] = [
    ("ptx/tma.cuh", '_, [%0], %1;" ::"r"(barrier), "r"(bytes)', '_, [%0], %1;" ::"r"(barrier), "r"(0)'),
    ("ptx/tma.cuh", "int bytes, uint32 barrier) {\n", "int bytes, uint32 barrier) {\n  return;\n"),
    ("ptx/tma.cuh", "int column, int row, uint32 barrier) {\n", "int column, int row, uint32 barrier) {\n  return;\n"),
]
LOADS: list[Edit] = [
    (
        "integer/integer_weights.cuh",
        "  const uint4 a = from[0], b = from[32];\n",
        '  uint4 a, b;\n  asm volatile("mov.b32 %0, %1;" : "=r"(a.x) : "r"(lane));\n'
        "  a.y = a.z = a.w = b.x = b.y = b.z = b.w = a.x;\n",
    )
]
ARITHMETIC: list[Edit] = [
    (
        "integer/integer_weights.cuh",
        "                                             const uint32 (&scales)[SUBS]) {\n",
        "                                             const uint32 (&scales)[SUBS]) {\n#pragma unroll\n"
        "  for (int i = 0; i < 16; i++) a[i / 4][i % 4] = words[i / 2];\n  return;\n",
    )
]
SCALING: list[Edit] = [
    (
        "integer/integer_sm90.cuh",
        "        float *const to = f + 4 * c;\n",
        "        float *const to = f + 4 * c;\n        if (c > 0) break;\n",
    )
]
PRODUCTS: list[Edit] = [
    (
        "integer/integer_sm90.cuh",
        "for (int k = first; k < first + steps; k++)",
        "for (int k = first; k < first + 1; k++)",
    )
]
PARTS = {
    "whole": [],
    "no copies": COPIES,
    "no loads": LOADS,
    "no arithmetic": ARITHMETIC,
    "no unpacking": LOADS + ARITHMETIC,
    "no scaling": SCALING,
    "products": COPIES + LOADS + ARITHMETIC + SCALING,
    "products and unpacking": COPIES + SCALING,
    "products and loads": COPIES + SCALING + ARITHMETIC,
    "products and arithmetic": COPIES + SCALING + LOADS,
    "copies": LOADS + ARITHMETIC + SCALING + PRODUCTS,
}
CONFIGS = [(64, 2), (64, 3), (128, 1), (128, 2), (128, 3), (128, 4), (256, 2)]  # tokens, warpgroups


def configs(name: str, laid: Any) -> list[IntegerTileConfig]:
    fit = [(n, g) for n, g in CONFIGS if name == "two-level" or n * g <= 256]
    return [integer_gemm.fitted(laid, IntegerTileConfig(n, g, 12)) for n, g in fit]


def microseconds(name: str, c: IntegerTileConfig, K: int) -> float:
    w = weight(name, 132 * 64 * c.warpgroups, K)
    laid = lay_out(w)
    x = encoded(w.activation.quantize(torch.randn(c.tokens, K, device="cuda")), w)
    weights = [laid, *(clone(laid) for _ in range(5))]
    calls = [lambda w=w: integer_gemm.product(x, w, config=c) for w in weights]  # type: ignore[misc]
    return Replay(calls).microseconds(11)


def main(out: Path, names: str = "two-level,atom-w4a8") -> None:
    rows = list[dict[str, Any]]()
    laid = {name: lay_out(weight(name, 64, 4096)) for name in names.split(",")}
    for part, edits in PARTS.items():
        with edited(edits):
            wanted = {integer_gemm.variant(w, c, HALF) for name, w in laid.items() for c in configs(name, w)}
            jit.compile_all(sorted(wanted))
            for name, w in laid.items():
                if edits is SCALING and w.segments:
                    continue
                for c in configs(name, w):
                    few, many = (microseconds(name, c, K) for K in INPUTS)
                    block = 1e3 * (many - few) * 128 / (INPUTS[1] - INPUTS[0])
                    rows.append({"scheme": name, "part": part, **asdict(c), "us": [few, many], "ns_per_block": block})
                    print(f"{name:10s} {c.tokens:4d} x {64 * c.warpgroups:3d} {part:24s} {block:7.1f} ns", flush=True)
        command = f"python bench/integer_parts.py {out.name} {names}"
        write_result(out, {"command": command, "gpu": gpu(), "rows": rows})


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
