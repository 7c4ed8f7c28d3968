"""Products of M rows of x on a CPU: every instruction set that the machine has against torch's f32, in one process.

    python bench/cpu_rows.py bench/results/cpu-rows-neoverse-n1.json --scheme uniform:4 --scheme uniform:2

Each product is compared with f64 of the dequantized weight before it is timed. Times are processor time of one thread
(what else the machine does counts less), the smallest of at least three calls in each of two rounds in which all
candidates take turns; weights are hot where they fit the cache.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.bench.environment import write_result
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.kernels.cpu import core
from crelle.kernels.cpu.kernel import Cpu, Precision
from crelle.kernels.reference import matmul_fp64

SHAPES = ("576x576", "1536x576", "4096x4096", "11008x4096")
TOLERANCE: dict[Precision, float] = {"exact": 1e-4, "int8": 1.5e-2}
ROUNDS = 2


def microseconds(run: Callable[[], object], budget: float) -> float:
    """Return the least processor time of a call."""
    run()
    best, begun, calls = float("inf"), time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - begun < budget:
        at = time.process_time()
        run()
        best, calls = min(best, time.process_time() - at), calls + 1
    return 1e6 * best


def random_weight(scheme: str, N: int, K: int) -> QuantTensor:
    kind, bits = scheme.split(":")
    group = 128 if K % 128 == 0 else 64
    spec: dict[str, Any] = {"format": kind, "shape": [N, K], "bits": int(bits), "group": group}
    chance = torch.Generator().manual_seed(0)
    if kind == "bcq":
        return BCQTensor.random(spec | {"bias": True}, chance)
    return UniformTensor.random(spec | {"symmetric": False}, chance)


def candidates(w: QuantTensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the products by name, each checked."""
    made: dict[str, Callable[[Tensor], Tensor]] = {}
    x = torch.randn(9, w.shape[1], generator=torch.Generator().manual_seed(1))
    want = matmul_fp64(x, w)
    for isa in core().isas():
        if isa == "generic":
            continue
        core().set_isa(isa)
        for precision, tolerance in TOLERANCE.items():
            kernel = Cpu(precision)
            prepared = kernel.prepare(w, torch.float32)
            made[f"{isa} {precision}"] = lambda x, k=kernel, p=prepared: k.run(x, p)  # type: ignore[misc]
            error = float((made[f"{isa} {precision}"](x) - want).norm() / want.norm())
            if error > tolerance:
                raise SystemExit(f"{isa} {precision}: error {error:.2e} against f64")
    plain = w.dequantize().float()
    made["torch f32"] = lambda x: x @ plain.T
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", action="append", required=True, help="uniform:BITS or bcq:BITS")
    parser.add_argument("--shape", nargs="*", default=SHAPES)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--budget", type=float, default=0.25, help="seconds for each candidate and round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    core().set_threads(1)
    rows = []
    for shape in args.shape:
        N, K = map(int, shape.split("x"))
        for scheme in args.scheme:
            runs = candidates(random_weight(scheme, N, K))
            for M in args.rows:
                x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
                best = dict.fromkeys(runs, float("inf"))
                for _ in range(ROUNDS):
                    for name, run in runs.items():
                        best[name] = min(best[name], microseconds(lambda run=run, x=x: run(x), args.budget))  # type: ignore[misc]
                rows.append({"shape": shape, "scheme": scheme, "rows": M, "microseconds": best})
                print(shape, scheme, M, {n: round(t) for n, t in best.items()}, flush=True)
    command = " ".join(["python", "bench/cpu_rows.py", *sys.argv[1:]])
    write_result(args.out, {"command": command, "what": "processor time of one thread, microseconds", "rows": rows})


if __name__ == "__main__":
    main()
