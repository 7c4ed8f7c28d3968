"""Rerun stream-K products of few tokens while other processes load the GPU, and count results that differ.

The scratch memory of partial sums and the output are full of NaN before each launch: a part that is added before it was
written would otherwise be the same part of the launch before, and right.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from integer_cases import CASES, inputs, integer_x, oracle, quantized, random_integer_weight
from plane_weights import relative

from crelle.kernels.cuda import jit
from crelle.kernels.cuda.integer import integer_gemm
from crelle.kernels.cuda.integer.integer_gemm import IntegerSm80TileConfig, IntegerTileConfig
from crelle.kernels.cuda.integer.integer_layout import lay_out
from crelle.kernels.cuda.launch import recording

HALF = torch.float16
CONFIGS = [
    IntegerTileConfig(8, 3, 12),
    IntegerTileConfig(8, 2, 12),
    IntegerTileConfig(8, 1, 12),
    IntegerTileConfig(8, 1, 12, occupancy=2),
    IntegerTileConfig(8, 3, 3),
    IntegerTileConfig(8, 3, 12, split_k=2),
    IntegerTileConfig(8, 3, 3, split_k=4),
    IntegerTileConfig(16, 3, 12),
    IntegerSm80TileConfig(8, 2, 2, 8, 2, 2, half_bytes=False),
]
WEIGHTS = [(0, 4096, 4096), (1, 11008, 4096), (8, 4096, 4096), (12, 4096, 11008), (13, 1100, 2304), (4, 500, 1024)]
AT_ONCE = 100  # launches between two looks at the count

_LOAD = """
import random, time, torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
big = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
while True:
    for _ in range(random.randrange(1, 40)):
        kind = random.randrange(3)
        if kind == 0: y = x @ x
        elif kind == 1: big[: 1 << 27].copy_(big[1 << 27 :])
        else: y = x[: random.randrange(1, 512)].softmax(-1)
    torch.cuda.synchronize()
    time.sleep(random.random() * 0.002)
"""


class Rerun:
    """One weight, one config: launches it and counts on the device what is not the first result."""

    def __init__(self, case: int, N: int, K: int, config: Any, tokens: int = 8) -> None:
        self.name = f"{CASES[case]}, {N} x {K}, {config}"
        w = random_integer_weight(CASES[case], N, K, "cuda")
        self.w, q = lay_out(w), quantized(inputs(tokens, K, HALF, "cuda"), w)
        if isinstance(config, IntegerTileConfig):
            config = integer_gemm.fitted(self.w, config)
        self.config, self.x = config, integer_x(q, w, HALF)
        self.partial = integer_gemm._plan(self.w, tokens, HALF, config).partial
        self.first = self.launch(torch.empty(tokens, N, dtype=HALF, device="cuda"))
        self.error = relative(self.first, oracle(q, w).double())
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self.launches, self.seen, self.found = 0, 0, list[dict[str, Any]]()

    def launch(self, y: torch.Tensor) -> torch.Tensor:
        y.fill_(torch.nan)
        if self.partial:  # the allocator gives the same memory to the product
            torch.full((self.partial,), torch.nan, device="cuda")
        return integer_gemm.product(self.x, self.w, out=y, config=self.config)

    def more(self) -> None:
        outs = []
        for _ in range(AT_ONCE):
            y = self.launch(torch.empty_like(self.first))
            self.bad += (y.view(torch.int16) != self.first.view(torch.int16)).any()
            outs.append(y)
        self.launches += AT_ONCE
        bad = int(self.bad)
        if bad > self.seen:
            self.seen = bad
            for i, y in enumerate(outs):
                wrong = (y.view(torch.int16) != self.first.view(torch.int16)).nonzero()
                if len(wrong) and len(self.found) < 20:
                    at = wrong[0].tolist()
                    self.found.append(
                        {
                            "launch": self.launches - AT_ONCE + i,
                            "values": len(wrong),
                            "rows": sorted({r for r, _ in wrong.tolist()}),
                            "columns": [int(wrong[:, 1].min()), int(wrong[:, 1].max())],
                            "first": [*at, float(self.first[tuple(at)]), float(y[tuple(at)])],
                            "not_finite": int((~y.isfinite()).sum()),
                        }
                    )
        assert not self.w.semaphores.any(), self.name


def stress(seconds: float, loads: int, mps: bool) -> tuple[dict[str, Any], bool]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as d:
        daemon = _mps(Path(d)) if mps else None
        others = [
            subprocess.Popen([sys.executable, "-c", _LOAD], stdout=subprocess.PIPE, text=True) for _ in range(loads)
        ]
        try:
            for other in others:
                assert other.stdout is not None
                if other.stdout.readline().strip() != "ready":
                    raise SystemExit("a process that loads the GPU did not start")
            print("processes that load the GPU have started", flush=True)
            begun = time.monotonic()
            with recording() as kernels:
                for weight in WEIGHTS:
                    for config in CONFIGS:
                        Rerun(*weight, config)
            jit.compile_all(sorted(kernels))
            reruns = [Rerun(*weight, config) for weight in WEIGHTS for config in CONFIGS]
            torch.cuda.synchronize()
            print(f"{len(reruns)} products are compiled and checked: {time.monotonic() - begun:.0f} s", flush=True)
            end = time.monotonic() + seconds
            for rerun in cycle(reruns):
                rerun.more()
                if time.monotonic() > end:
                    break
            alive = sum(other.poll() is None for other in others)
        finally:
            for other in others:
                other.kill()
                other.wait()
            if daemon:
                _control("quit -t 5")
    rows = [
        {"config": r.name, "launches": r.launches, "mismatches": r.seen, "error": r.error, "found": r.found}
        for r in reruns
    ]
    total, bad = sum(r.launches for r in reruns), sum(r.seen for r in reruns)
    print(f"{total:,} launches of {len(reruns)} configs beside {alive} processes: {bad} differ", flush=True)
    fine = bad == 0 and alive == loads and all(r.error < 1e-3 for r in reruns)
    summary = {"launches": total, "mismatches": bad, "loads": alive, "mps": bool(daemon), "seconds": seconds}
    return {"stress": summary, "configs": rows}, fine


def _mps(folder: Path) -> bool:
    """Start the daemon that lets processes share the GPU at one time; before this process has a context."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise SystemExit("--mps needs nvidia-cuda-mps-control, which is not on PATH")
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / "pipe")
    os.environ["CUDA_MPS_LOG_DIRECTORY"] = str(folder / "log")
    (folder / "pipe").mkdir()
    (folder / "log").mkdir()
    # Not this process's output: the daemon would keep it open, and who reads it would wait.
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"MPS: {_control('get_server_list').strip() or 'no server yet'}", flush=True)
    return True


def _control(command: str) -> str:
    """Return what the daemon of MPS answers."""
    said = subprocess.run(
        ["nvidia-cuda-mps-control"], input=command + "\n", text=True, capture_output=True, timeout=30, check=False
    )
    return said.stdout + said.stderr
