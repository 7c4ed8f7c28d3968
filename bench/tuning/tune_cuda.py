"""Autotune the GEMV's tile config for common problems on this GPU and write kernels/cuda/runtime/autotune.json.

    python bench/tuning/tune_cuda.py OUT.json [SECONDS]

Every config is checked against f64 first; each problem's configs are timed by graph replays over more
weights than L2 holds.
"""

import argparse
import json
import sys
from dataclasses import astuple, replace
from pathlib import Path
from time import perf_counter

import torch

from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.bmma_gemv import GemvTileConfig
from crelle.kernels.cuda.planes.weight_layout import lay_out
from crelle.kernels.cuda.step.graphs import capture
from crelle.quantizers.scheme import parse

PROBLEMS = [
    *(
        (s, p, n, k, 1)
        for n, k in ((4096, 4096), (11008, 4096), (12288, 12288), (49152, 12288))
        for s in "bu"
        for p in (2, 3, 4)
    ),
    *(("b", 3, n, k, 1) for n, k in ((36864, 12288), (12288, 49152), (8192, 8192), (8192, 22016))),
    *(("b", p, n, k, 2) for n, k in ((4096, 4096), (11008, 4096), (12288, 12288)) for p in (2, 4)),
    *(
        (s, p, n, k, 4)
        for n, k in ((4096, 4096), (11008, 4096), (12288, 12288), (49152, 12288))
        for s in "bu"
        for p in (2, 4)
    ),
]
CONFIGS = [
    GemvTileConfig(1, 16, 1, 2, 1, 32, 2),
    GemvTileConfig(1, 16, 1, 4, 1, 32, 2),
    GemvTileConfig(1, 8, 1, 4, 1, 32, 4),
    GemvTileConfig(1, 8, 1, 2, 1, 32, 4),
    GemvTileConfig(1, 8, 2, 2, 1, 32, 4),
    GemvTileConfig(1, 8, 1, 4, 1, 32, 999),
    GemvTileConfig(2, 8, 1, 4, 1, 32, 4),
    GemvTileConfig(2, 8, 1, 2, 1, 32, 4),
    GemvTileConfig(2, 8, 2, 2, 1, 24, 3),
    GemvTileConfig(2, 8, 1, 4, 1, 32, 999),
    GemvTileConfig(1, 4, 1, 4, 1, 32, 999),
    GemvTileConfig(1, 4, 2, 2, 1, 32, 8),
    GemvTileConfig(2, 4, 1, 4, 1, 32, 8),
    GemvTileConfig(1, 16, 1, 2, 1, 32, 999),
    GemvTileConfig(1, 8, 3, 2, 1, 24, 999),
]
MANY = [
    GemvTileConfig(1, 8, 1, 4, 1, 16, 2),
    GemvTileConfig(1, 8, 1, 2, 1, 24, 3),
    GemvTileConfig(2, 4, 1, 4, 1, 16, 4),
    GemvTileConfig(2, 8, 1, 3, 1, 16, 2),
    GemvTileConfig(1, 16, 1, 2, 1, 16, 1),
    GemvTileConfig(1, 16, 1, 2, 1, 32, 2),
    GemvTileConfig(2, 16, 1, 2, 1, 16, 1),
    GemvTileConfig(2, 8, 1, 2, 1, 24, 3),
    GemvTileConfig(2, 8, 1, 4, 1, 24, 3),
]
SCHEMES = {"b": "bcq:bits={},group=128", "u": "rtn:bits={},group=128"}
WORKING_SET = 300e6


def replays(calls: list, rounds: int = 9) -> float:  # type: ignore[type-arg]
    """Median microseconds of one call, all of them in one graph."""
    graph, _ = capture(lambda: [call() for call in calls][-1], warmup=calls[0])
    graph.replay()
    times = []
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(1e3 * a.elapsed_time(b) / len(calls))
    return sorted(times)[rounds // 2]


def main(out: Path, seconds: float) -> None:
    begun, best = perf_counter(), []
    small = {
        s: {
            p: lay_out(random_matrix(parse(SCHEMES[s].format(p)), 16, 512, random_generator(0, torch.device("cuda"))))
            for p in (2, 3, 4)
        }
        for s in SCHEMES
    }
    wanted = {
        bmma_gemv.gemv_variant(small[s][p], M, config, torch.float16)
        for s, p, _, _, M in PROBLEMS
        for config in (CONFIGS if M == 1 else MANY)
    }
    jit.compile_all(sorted(wanted))
    for s, P, N, K, M in PROBLEMS:
        if perf_counter() - begun > seconds:
            break
        plain = random_matrix(parse(SCHEMES[s].format(P)), N, K, random_generator(1, torch.device("cuda")))
        w = lay_out(plain)
        copies = [w] + [
            replace(w, words=w.words.clone(), scales=w.scales.clone())
            for _ in range(min(100, int(WORKING_SET / w.nbytes)))
        ]
        x = torch.randn(M, K, device="cuda", dtype=torch.float16)
        rows = torch.randint(0, N, (128,), device="cuda")
        oracle = x.double() @ plain.rows(rows).dequantize(torch.float64).T
        digits, found = bmma_gemv.encode(x, w), []
        for config in CONFIGS if M == 1 else MANY:
            if config.warps * bmma_gemv._pipeline_bytes(w, config) > 200 * 1024:
                continue
            y = torch.full((M, N), torch.nan, device="cuda", dtype=torch.float16)
            bmma_gemv.product(digits, w, torch.float16, out=y, config=config)
            error = ((y[:, rows].double() - oracle).norm() / oracle.norm()).item()
            if not error < 1e-3:
                print(f"{s}{P} {N}x{K} M={M} {config}: error {error:.2g}, not timed", file=sys.stderr)
                continue
            calls = [lambda c=c: bmma_gemv.product(digits, c, torch.float16, out=y, config=config) for c in copies]  # noqa: B023
            found.append((replays(calls), config))
        found.sort(key=lambda f: f[0])
        us, config = found[0]
        problem = {"codes": s == "u", "P": P, "N": N, "K": K, "M": M, "in_graph": False}
        best.append({**problem, "config": list(astuple(config)), "us": round(us, 2)})
        line = " ".join(f"{astuple(c)}:{t:.2f}" for t, c in found[:4])
        print(f"{s}{P} {N}x{K} M={M} {w.nbytes / us / 1e3:.0f} GB/s  {line}", flush=True)
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "best": best}, indent=1) + "\n")
        del copies, w


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("seconds", nargs="?", type=float, default=1e9, help="begin no problem after that")
    main(**vars(parser.parse_args()))
