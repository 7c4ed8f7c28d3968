"""Check, then time the solvers of groups on this GPU: kernels of group_solver.cu against the same quantizers in torch.

    python bench/group_solver_cuda.py OUT.json [SHAPES]      e.g. 4096x4096,14336x4096

    bcq scales   alternating least squares of binary coding, from three starts, 20 rounds
    bcq fit      the same with nearest codes and packing, as `crelle quantize` does it
    uniform      gptq's search of clipped ranges and zero points, weighted
    affine       gptq's free grids: clipped ranges, then least squares, weighted
    fast         the affine grids of a search's estimate; in torch by another method, so errors differ more
Weights are random with a few large ones, importances random. A case is timed only if the kernel's squared error is at
most 0.1% above that in torch (fast: 5%) and a second run has the same bits. Times are milliseconds between CUDA events;
all runs are written, the median is printed, with the peak of bytes beyond what was allocated before.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu
from crelle.formats.bcq import BCQTensor
from crelle.kernels import cuda
from crelle.kernels.cuda.launch import attributes, load
from crelle.kernels.cuda.solver import group_solver
from crelle.quantizers.schemes import bcq
from crelle.quantizers.schemes.bcq import BCQ
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.solvers import fast_error
from crelle.quantizers.solvers.alternating_ls import levels_of
from crelle.quantizers.solvers.grouping import importances, to_groups

SHAPES = "4096x4096,14336x4096"
GROUP = 128
KERNEL_RUNS, TORCH_RUNS = 7, 2
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One solver; `error` is the squared error of what it found."""

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    error: Callable[[tuple[Tensor, ...]], Tensor]
    within: float = 0.001


def in_torch(work: Callable[[], T]) -> T:
    with mock.patch.object(cuda, "available", return_value="is not asked"):
        return work()


def timed(work: Callable[[], object], runs: int) -> dict[str, Any]:
    """Return milliseconds of each run (not the first: the check was), their median, and the peak of added bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(round(start.elapsed_time(end), 3))
    return {"ms": times, "median_ms": median(times), "peak_bytes": torch.cuda.max_memory_allocated() - before}


def binary_error(g: Tensor, found: tuple[Tensor, ...]) -> Tensor:
    alpha, z = found
    levels, _ = levels_of(alpha, z, bcq.signs(alpha.shape[1], g.device))
    return (levels.gather(1, bcq._ranks(g, levels)) - g).square_().sum(dtype=torch.float64)


def grid_error(g: Tensor, h: Tensor, top: int, scale: Tensor, low: Tensor) -> Tensor:
    codes = ((g - low[:, None]) / scale[:, None]).round_().clamp_(0, top)
    left = codes.mul_(scale[:, None]).add_(low[:, None]).sub_(g).square_()
    return (left.reshape(-1, *h.shape) * h).sum(dtype=torch.float64)


def cases(w: Tensor, cost: Tensor) -> list[Case]:
    g, h = to_groups(w, GROUP)[0].flatten(0, 1), importances(cost, GROUP)
    found, K = [], w.shape[1]
    for bits in (3, 4):
        found.append(
            Case(
                f"bcq:bits={bits},group={GROUP} scales",
                lambda bits=bits: bcq.binary_scales(g, None, bits, BCQ().rounds, True),  # type: ignore[misc]
                lambda t: binary_error(g, t),
            )
        )
    fit = Case(
        f"bcq:bits=3,group={GROUP} fit",
        lambda: tuple(BCQ(bits=3, group=GROUP).fit(w).tensors().values()),
        lambda t: (BCQTensor(t[0], K, GROUP, *t[1:]).dequantize(torch.float32) - w).square_().sum(dtype=torch.float64),
    )
    found.append(fit)
    row = Case(
        "bcq:bits=3,group=row scales",
        lambda: bcq.binary_scales(w, None, 3, BCQ().rounds, True),
        lambda t: binary_error(w, t),
    )
    found.append(row)
    for bits in (3, 4):
        uniform, affine = GPTQ(bits=bits), GPTQ(bits=bits, free=True)
        top = 2**bits - 1
        found.append(
            Case(
                f"gptq:bits={bits},group={GROUP} uniform",
                lambda c=uniform: c.grids(g, h),  # type: ignore[misc]
                lambda t, top=top: grid_error(g, h, top, t[0], -t[0] * t[1]),  # type: ignore[misc]
            )
        )
        found.append(
            Case(
                f"gptq:bits={bits},group={GROUP},free=true affine",
                lambda c=affine: c.grids(g, h),  # type: ignore[misc]
                lambda t, top=top: grid_error(g, h, top, *t),  # type: ignore[misc]
            )
        )
    found.append(
        Case(
            "fast, 3 bits",
            lambda: tuple(t[:, :K:GROUP].flatten() for t in fast_error._grid(w, cost, 3, GROUP)),
            lambda t: grid_error(g, h, 7, *t),
            within=0.05,
        )
    )
    return found


def measured(case: Case) -> dict[str, Any]:
    """Check a case, then time it."""
    found, again = case.run(), case.run()
    if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        raise SystemExit(f"{case.name}: a second run of the kernel has other bits")
    wanted = in_torch(case.run)
    ratio = float(case.error(found) / case.error(wanted))
    alike = min(float((a == b).float().mean()) for a, b in zip(found, wanted, strict=True))
    if not ratio <= 1 + case.within:
        raise SystemExit(f"{case.name}: the kernel's error is {ratio} times that in torch; values alike: {alike}")
    del found, again, wanted
    here, there = timed(case.run, KERNEL_RUNS), in_torch(lambda: timed(case.run, TORCH_RUNS))
    speedup = round(there["median_ms"] / here["median_ms"], 1)
    return {"error_over_torch": ratio, "values_alike": alike, "kernel": here, "torch": there, "speedup": speedup}


def resources() -> dict[str, dict[str, int]]:
    """Return registers, spilled bytes and shared memory of kernels that were timed."""
    names = ("binary_scales", "uniform_grids", "affine_grids")
    return {f"{n}, 3 bits": attributes(load(*group_solver.variant(n, 3, in_workspace=False))) for n in names}


def main() -> None:
    begin = perf_counter()
    if len(sys.argv) < 2:
        raise SystemExit("usage: python bench/group_solver_cuda.py OUT.json [SHAPES]")
    out = Path(sys.argv[1])
    shapes = (sys.argv[2] if len(sys.argv) > 2 else SHAPES).split(",")
    if reason := cuda.available():
        raise SystemExit(f"the CUDA kernels cannot run: {reason}")
    torch.set_grad_enabled(False)
    command = " ".join(["python", "bench/group_solver_cuda.py", out.name, *sys.argv[2:]])
    result: dict[str, Any] = {"command": command, "gpu": gpu(), "kernels": resources(), "shapes": {}}
    for shape in shapes:
        N, K = map(int, shape.split("x"))
        chance = torch.Generator("cuda").manual_seed(N)
        w = torch.randn(N, K, generator=chance, device="cuda") * 0.02
        w *= torch.where(torch.rand(N, K, generator=chance, device="cuda") < 0.002, 8.0, 1.0)
        cost = torch.randn(K, generator=chance, device="cuda").exp()
        result["shapes"][shape] = rows = {}
        for case in cases(w, cost):
            rows[case.name] = m = measured(case)
            print(
                f"{shape:>12} {case.name:<42} kernel {m['kernel']['median_ms']:9.3f} ms  torch "
                f"{m['torch']['median_ms']:9.2f} ms  x{m['speedup']:<6} error/torch {m['error_over_torch']:.6f}  alike "
                f"{m['values_alike']:.4f}  peak {m['kernel']['peak_bytes'] / 1e6:.0f} / "
                f"{m['torch']['peak_bytes'] / 1e6:.0f} MB",
                flush=True,
            )
            result["seconds"] = round(perf_counter() - begin, 1)
            write_result(out, result)
    print(f"written to {out}, {result['seconds']} s; kernels: {result['kernels']}")


if __name__ == "__main__":
    main()
