"""Check, then time the kernels of `bcq-nested` and `mixed` solvers against the same steps in torch.

    python bench/nested_sweep_cuda.py OUT.json [cuda | cpu]

    nested  fit of `bcq-nested:bits=4,group=128`; of it: nearest codes, the pass with error feedback, one of descent
    mixed   fit of `mixed`; of it: the search of 2-bit grids, and setting all scales
On a GPU 4096x4096 and 14336x4096, the steps in torch on the first only; on a CPU 576x1536, where the steps of `mixed`
were in C++ before. Weights and inputs are random, inputs correlated. "torch" is everything as it is but for these
steps. Checked first: the sum of the rows' output errors is that of torch within 0.1%, at each precision; on 14336x4096
for 256 rows within 0.5%, where a few rows with ties count for more. Each step runs RUNS times with the kernels and
once in torch; all times are written, in milliseconds, with the peak of allocated bytes on a GPU and the CPU time of all
threads on a CPU. OUT.json is written after each shape.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu
from crelle.kernels import cpu, cuda
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.mixed import Assignment, Mixed
from crelle.quantizers.schemes.nested import Nested
from crelle.quantizers.solvers import mixed_solver, nested_sweep
from crelle.quantizers.solvers.gptq_solver import LDLFactor, factor, mixing
from crelle.quantizers.solvers.mixed_solver import feedback, search_grids, tune_scales
from crelle.quantizers.solvers.nested_sweep import nearest_nested, sweep_nested

SHAPES = {"cuda": [(4096, 4096), (14336, 4096)], "cpu": [(576, 1536)]}
RUNS = 3  # with the kernels; the first may compile
FEW = 256  # rows that are compared where torch does not fit the whole matrix; whole blocks of 16
NESTED, MIXED = Nested(bits=4, group=128), Mixed()
T = TypeVar("T")


@contextmanager
def steps_in_torch() -> Iterator[None]:
    """Let the steps that are compared run in torch, and nothing else."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(nested_sweep, "solver", mock.Mock(usable=lambda _: False)))
        patches.enter_context(mock.patch.object(nested_sweep, "cuda", mock.Mock(available=lambda: "is not asked")))
        for name in ("_in_cpp", "_in_cuda"):
            patches.enter_context(mock.patch.object(mixed_solver, name, return_value=False))
        yield


def timed(work: Callable[[], T], device: str, runs: int = RUNS) -> tuple[T, dict[str, Any]]:
    """Return what the last run gave, and the milliseconds of each.

    With them, on a GPU: the peak of bytes beyond those before; on a CPU: the CPU time of all threads.
    """
    on_gpu, times, cpu_times, before = device == "cuda", [], [], 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(runs):
        if on_gpu:
            torch.cuda.synchronize()
        start, start_cpu = perf_counter(), process_time()
        found = work()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(round(1000 * (perf_counter() - start), 2))
        cpu_times.append(round(1000 * (process_time() - start_cpu), 2))
    more = {"peak_bytes": torch.cuda.max_memory_allocated() - before} if on_gpu else {"cpu_ms": cpu_times}
    return found, {"ms": times, **more}


def hessian_of(K: int, device: str) -> Tensor:
    """Return the Hessian of correlated inputs, a few channels much larger than the rest."""
    chance = torch.Generator().manual_seed(K)
    size = torch.randn(K, generator=chance).exp().to(device)
    axes = (torch.randn(256, K, generator=chance) / 8).to(device)
    there = torch.Generator(device).manual_seed(K)
    x = torch.randn(2 * K, K, generator=there, device=device)
    x += torch.randn(2 * K, 256, generator=there, device=device) @ axes
    x *= size
    return x.T @ x / len(x)


def errors(weight: Tensor, fitted: Tensor, hessian: Tensor) -> Tensor:
    """Return the output error of each row, f64 [N]."""
    error = weight - fitted
    return ((error @ hessian) * error).double().sum(1)


def ratio(what: str, found: Tensor, wanted: Tensor, bound: float) -> float:
    """Return the ratio of two sums of rows' errors; ends the program where it is not 1 within the bound."""
    r = float(found.sum() / wanted.sum())
    if not abs(r - 1) <= bound:
        raise SystemExit(f"{what}: the error with the kernels is {r} times that in torch")
    return round(r, 6)


def nested(target: Tensor, stats: Stats, by: LDLFactor, device: str, whole: bool) -> dict[str, Any]:
    H = stats.hessian

    def rows_errors(w: Tensor, q: Any) -> dict[int, Tensor]:
        return {p: errors(w, q.at(p).dequantize(torch.float32), H) for p in NESTED.precisions}

    fit, took = timed(lambda: NESTED.fit(target, stats), device)
    found, few = rows_errors(target, fit), slice(0, None if whole else FEW)
    with steps_in_torch():
        wanted, there = timed(lambda: NESTED.fit(target[few], stats), device, 1)
    checked = rows_errors(target[few], wanted)
    over = {p: ratio(f"nested, {p} bits", found[p][few], checked[p], 0.001 if whole else 0.005) for p in found}
    same = (fit.codes()[few] == wanted.codes()).float().mean()
    result: dict[str, Any] = {"error_over_torch": over, "codes_alike": round(float(same), 6)}
    result["rows_checked"] = len(target[few])
    result["fit"] = {"kernels": took} | ({"torch": there} if whole else {})
    start = NESTED._start(target, by.cost, 1)
    grids, order, mix = NESTED._grids(start), by.order.tolist(), mixing(by.damped)
    before = torch.cat([target - f.levels.decode(f.codes) for f in start.fits()]).T
    steps: dict[str, Callable[[], Tensor]] = {
        "nearest": lambda: nearest_nested(target, grids),
        "feedback": lambda: sweep_nested(target.T[by.order], None, by.mix, grids, order),
        "descent": lambda: sweep_nested(target.T, before, mix, grids, range(len(order))),
    }
    for name, work in steps.items():
        codes, result[name] = timed(work, device)
        result[name] = {"kernels": result[name]}
        if whole:
            with steps_in_torch():
                in_torch, result[name]["torch"] = timed(work, device, 1)
            result[name]["codes_alike"] = round(float((codes == in_torch).float().mean()), 6)
    return result


def mixed(target: Tensor, stats: Stats, by: LDLFactor, device: str, whole: bool) -> dict[str, Any]:
    chosen = MIXED.assign(target, by)
    fit, took = timed(lambda: MIXED.fit_rows_of(target, by, chosen), device)
    few = slice(0, None if whole else FEW)
    some = Assignment(chosen.four, chosen.outliers[few])
    with steps_in_torch():
        wanted, there = timed(lambda: MIXED.fit_rows_of(target[few], by, some), device, 1)
    found, checked = (errors(target[few], f.weight()[few], stats.hessian) for f in (fit, wanted))
    result: dict[str, Any] = {"error_over_torch": ratio("mixed", found, checked, 0.001 if whole else 0.005)}
    result["rows_checked"] = len(target[few])
    result["fit"] = {"kernels": took} | ({"torch": there} if whole else {})
    column4 = chosen.four.repeat_interleave(MIXED.group)[: target.shape[1]]
    two, importance = target[:, ~column4], by.cost[~column4].expand(len(target), -1)
    start = feedback(target, by, MIXED.start(target, by.cost, chosen))
    steps: dict[str, Callable[[], object]] = {
        "search_grids": lambda: search_grids(two, importance, MIXED.group),
        "tune_scales": lambda: tune_scales(target, by.damped, start),
    }
    for name, work in steps.items():
        result[name] = {"kernels": timed(work, device)[1]}
        if whole:
            with steps_in_torch():
                result[name]["torch"] = timed(work, device, 1)[1]
    return result


def main() -> None:
    begin = perf_counter()
    out, device = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda"
    if device not in SHAPES:
        raise SystemExit(f"the device is cuda or cpu, not {device!r}")
    if reason := (cuda if device == "cuda" else cpu).available():
        raise SystemExit(f"the kernels for {device} cannot run: {reason}")
    torch.set_grad_enabled(False)
    about: dict[str, Any] = {"gpu": gpu()} if device == "cuda" else {"threads": torch.get_num_threads()}
    about["command"] = f"python bench/nested_sweep_cuda.py {out.name} {device}"
    result: dict[str, Any] = {**about, "schemes": [str(NESTED), str(MIXED)], "runs": RUNS, "shapes": {}}
    known: dict[int, tuple[Stats, LDLFactor]] = {}
    for i, (N, K) in enumerate(SHAPES[device]):
        if K not in known:
            hessian = hessian_of(K, device)
            size, by = hessian.diagonal().sqrt(), factor(hessian, NESTED.damp, act_order=NESTED.act_order)
            known = {K: (Stats(hessian, size, 2 * K), by)}
        stats, by = known[K]
        stats.kept[NESTED.damp, NESTED.act_order] = by
        target = torch.randn(N, K, generator=torch.Generator(device).manual_seed(N), device=device) * 0.02
        shape = result["shapes"][f"{N}x{K}"] = {"nested": nested(target, stats, by, device, i == 0)}
        shape["mixed"] = mixed(target, stats, by, device, i == 0)
        result["seconds"] = round(perf_counter() - begin, 1)
        write_result(out, result)
        print(f"{N}x{K}", shape, flush=True)


if __name__ == "__main__":
    main()
