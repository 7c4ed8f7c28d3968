"""Check, then time the solver of GPTQ on this GPU, stage by stage.

    python bench/gpu/solver_cuda.py OUT.json [SHAPES [SECONDS]]      e.g. 4096x4096,14336x4096 150
    python bench/gpu/solver_cuda.py OUT.json '' --trellis 576x1536,4096x4096

    factor     Cholesky of the Hessian, f64                        once for all matrices that read an input
    grid       the search of scales and zero points
    feedback   one pass with error feedback
    solve      least squares for all scales of a row
    descend    one pass of coordinate descent
    fit        all but factor, as `gptq:bits=3,group=128` does them, with the codes packed
    trellis    --trellis SHAPES: the search of `trellis:bits=2`, with tables and feedback, and nothing else
Weights and inputs are random, inputs correlated. Passes are compared with the loop in torch: on whole matrices of
CHECKED, where the loop is timed too, and on 32 rows of each shape. Each stage runs twice; both times are written, in
milliseconds, with the peak of allocated bytes. OUT.json is written after each shape; a shape that would begin after
SECONDS is left out, and said so.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu
from crelle.formats.trellis import CODES, Code, TrellisTensor
from crelle.kernels import cuda
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.mixed import Mixed
from crelle.quantizers.solvers.fast_error import fast_errors
from crelle.quantizers.solvers.gptq_solver import Fit, LDLFactor, Levels, descend, factor, feedback, row_errors, solve
from crelle.quantizers.solvers.trellis_solver import BlockFactor, encode

SHAPES = "4096x4096,1024x4096,14336x4096,4096x14336,8192x28672"
CHECKED = (1024, 1024)  # rows, columns
LAYER = {"4096x4096": 2, "1024x4096": 2, "14336x4096": 2, "4096x14336": 1}  # matrices of a Llama-3-8B layer
FACTORS = {"4096x4096": 3, "4096x14336": 1}  # inputs of it: of q, k and v; of o; of gate and up; of down
CONFIG = GPTQ(bits=3, group=128)
T = TypeVar("T")


def timed(work: Callable[[], T], runs: int = 2) -> tuple[T, dict[str, Any]]:
    """Return what the last run gave, the milliseconds of each, and the peak of bytes beyond what was there."""
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = perf_counter()
        found = work()
        torch.cuda.synchronize()
        times.append(round(1000 * (perf_counter() - start), 2))
    return found, {"ms": times, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def in_torch(work: Callable[[], T]) -> T:
    with mock.patch.object(cuda, "available", return_value="is not asked"):
        return work()


def inputs(K: int) -> Tensor:
    """Return the Hessian of correlated inputs, a few channels much larger than the rest."""
    chance = torch.Generator("cuda").manual_seed(K)
    size = torch.randn(K, generator=chance, device="cuda").exp()
    axes = torch.randn(256, K, generator=chance, device="cuda") / 16
    hessian, tokens = torch.zeros(K, K, device="cuda"), 0
    while tokens < K + 4096:
        x = torch.randn(4096, K, generator=chance, device="cuda")
        x += torch.randn(4096, 256, generator=chance, device="cuda") @ axes * 2
        x *= size
        hessian.addmm_(x.T, x)
        tokens += 4096
    return hessian / tokens


def agreement(target: Tensor, hessian: Tensor, found: Fit, wanted: Fit) -> dict[str, float]:
    """Compare two solutions: how many rows have the same codes, and the ratio of the errors."""
    same = (found.codes == wanted.codes).all(1).float().mean()
    errors = [row_errors(target, hessian, fit).double().sum() for fit in (found, wanted)]
    ratio = float(errors[0] / errors[1])
    if not 0.99 < ratio < 1.01:
        raise SystemExit(f"the kernel's error is {ratio} times that of the loop in torch, rows alike: {float(same)}")
    return {"rows_alike": float(same), "error_over_torch": ratio}


def rows_of(levels: Levels, rows: slice) -> Levels:
    shift = None if levels.shift is None else levels.shift[rows]
    return Levels(levels.book, levels.scales[rows], levels.group, shift, levels.count)


def checked_against_torch(N: int, K: int) -> dict[str, Any]:
    """Time the loop in torch and the kernel on whole small matrices."""
    hessian, target = inputs(K), torch.randn(N, K, device="cuda") * 0.02
    by = factor(hessian, 0.01, act_order=True)
    levels = CONFIG.levels(target, by.cost, 128)
    result: dict[str, Any] = {"shape": f"{N}x{K}"}
    start = feedback(target, by, levels)
    for name, work in {
        "feedback": lambda: feedback(target, by, levels),
        "descend": lambda: descend(target, by.damped, start),
    }.items():
        found, here = timed(work)
        wanted, there = in_torch(lambda work=work: timed(work, 1))  # type: ignore[misc]
        result[name] = {"kernel": here, "torch": there, **agreement(target, hessian, found, wanted)}
    grids = [GPTQ(bits=b, group=g) for b in (2, 3, 4) for g in (64, 128)]
    errors, here = timed(lambda: fast_errors(target[:256], by, grids))
    wanted_errors, there = in_torch(lambda: timed(lambda: fast_errors(target[:256], by, grids), 1))
    ratio = float(((errors @ hessian) * errors).sum() / ((wanted_errors @ hessian) * wanted_errors).sum())
    result["fast_errors, 256 rows, 6 settings"] = {"kernel": here, "torch": there, "error_over_torch": ratio}
    found_levels, here = timed(lambda: CONFIG.levels(target, by.cost, 128))
    wanted_levels, there = in_torch(lambda: timed(lambda: CONFIG.levels(target, by.cost, 128)))
    alike = (found_levels.scales == wanted_levels.scales).float().mean()
    result["grid"] = {"kernel": here, "torch": there, "scales_alike": float(alike)}
    stats = Stats(hessian, hessian.diagonal().sqrt(), 1000)
    _, result["mixed, fit"] = timed(lambda: Mixed().fit(target, stats))
    return result


def stages(N: int, K: int, hessian: Tensor, by: LDLFactor) -> dict[str, Any]:
    target = torch.randn(N, K, generator=torch.Generator("cuda").manual_seed(N), device="cuda") * 0.02
    result: dict[str, Any] = {}
    levels, result["grid"] = timed(lambda: CONFIG.levels(target, by.cost, 128))
    fit, result["feedback"] = timed(lambda: feedback(target, by, levels))
    few = slice(N // 3, N // 3 + 32)
    wanted = in_torch(lambda: feedback(target[few], by, rows_of(levels, few)))
    found = Fit(fit.codes[few], rows_of(levels, few))
    result["feedback"] |= agreement(target[few], hessian, found, wanted)
    solved, result["solve"] = timed(lambda: solve(target, by.damped, fit))
    better, result["descend"] = timed(lambda: descend(target, by.damped, solved))
    at = rows_of(solved.levels, few)
    wanted = in_torch(lambda: descend(target[few], by.damped, Fit(fit.codes[few], at)))
    result["descend"] |= agreement(target[few], hessian, Fit(better.codes[few], at), wanted)
    _, result["row_errors"] = timed(lambda: row_errors(target, hessian, better))
    result["error after feedback, solve, descend"] = [
        float(row_errors(target, hessian, f).double().sum()) for f in (fit, solved, better)
    ]
    stats = Stats(hessian, hessian.diagonal().sqrt(), 1000)
    stats.kept[CONFIG.damp, CONFIG.act_order] = by
    _, result["fit"] = timed(lambda: CONFIG.fit(target, stats))
    if (N, K) == (14336, 4096):
        result["kernels of a fit, ms"] = profile(lambda: CONFIG.fit(target, stats))
    return result


def profile(work: Callable[[], object]) -> dict[str, list[float]]:
    """Return milliseconds and calls of the kernels that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    with recorded(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda k: -k.self_device_time_total)[:25]
    return {k.key[:100]: [round(k.self_device_time_total / 1000, 3), k.count] for k in kernels}


def trellis(N: int, K: int, bits: float, code: Code) -> dict[str, Any]:
    """Compare the codes of a few inputs with those of the search in torch, then time a whole matrix."""
    by, target = factor(inputs(K), 0.2, act_order=False), torch.randn(N, K, device="cuda") * 0.02
    cost = torch.diag_embed(by.cost.view(-1, 4))
    some = BlockFactor(torch.zeros(16, 16, device="cuda"), cost[:4], torch.eye(16, device="cuda"))
    few = target[:64, :16].contiguous()
    errors = []
    for encode_few in (encode, lambda *a: in_torch(lambda: encode(*a))):
        codes, scale = encode_few(few, some, code, bits)
        tensor = TrellisTensor(codes, scale, 16, bits, code)
        left = few.double() - tensor.dequantize(torch.float64)
        errors.append(float((left.square() * by.cost[:16].double()).sum()))
    ratio = errors[0] / errors[1]
    if not 0.97 < ratio < 1.03:
        raise SystemExit(
            f"trellis {code.name} {bits:g}: the kernel's error is {ratio} times that of the search in torch"
        )
    blocks, here = timed(lambda: BlockFactor.of(by))
    (codes, scale), took = timed(lambda: encode(target, blocks, code, bits))
    left = target - TrellisTensor(codes, scale, K, bits, code).dequantize()
    share = float(((left @ by.damped) * left).sum() / ((target @ by.damped) * target).sum())
    states = 2 * -(-N // 32) * -(-K // 4) * (128 // code.weights) * 65536
    rate = states / took["ms"][-1] * 1000 / 1e12
    result = {"shape": f"{N}x{K}", "code": code.name, "bits": bits, "error_over_torch": ratio, "block_factor": here}
    return result | {"encode": took, "error_left": share, "states_T_per_s": round(rate, 3)}


def layer(shapes: dict[str, Any]) -> float | None:
    """Return seconds for the matrices of a Llama-3-8B layer, the second run of each."""
    if not all(s in shapes for s in LAYER):
        return None
    total = sum(n * shapes[s]["fit"]["ms"][-1] for s, n in LAYER.items())
    total += sum(n * shapes[s]["factor"]["ms"][-1] for s, n in FACTORS.items())
    return round(total / 1000, 3)


def main(out: Path, shapes: str, seconds: float, trellis_shapes: str) -> None:
    begin = perf_counter()
    if reason := cuda.available():
        raise SystemExit(f"the CUDA kernels cannot run: {reason}")
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {"gpu": gpu(), "scheme": "gptq:bits=3,group=128"}
    result |= {"against_torch": {}, "trellis": [], "shapes": {}, "left_out": []}
    for shape in filter(None, trellis_shapes.split(",")):
        for bits, code in ((2.0, CODES["pair"]), (3.0, CODES["mul1"])):
            result["trellis"].append(found := trellis(*map(int, shape.split("x")), bits, code))
            write_result(out, result)
            print(found, flush=True)
    if shapes:
        result["against_torch"] = checked_against_torch(*CHECKED)
    write_result(out, result)
    known: dict[int, tuple[Tensor, LDLFactor, dict[str, Any]]] = {}
    for shape in filter(None, shapes.split(",")):
        if perf_counter() - begin > seconds:
            result["left_out"].append(shape)
            continue
        N, K = map(int, shape.split("x"))
        if K not in known:
            known.clear()
            hessian = inputs(K)
            by, took = timed(lambda h=hessian: factor(h, 0.01, act_order=True))  # type: ignore[misc]
            known[K] = hessian, by, took
        hessian, by, took = known[K]
        result["shapes"][shape] = {"factor": took, **stages(N, K, hessian, by)}
        result["layer_seconds"] = layer(result["shapes"])
        result["seconds"] = round(perf_counter() - begin, 1)
        write_result(out, result)
        print(shape, result["shapes"][shape], flush=True)
    write_result(out, result)
    if "layer_seconds" in result:
        print("layer", result["layer_seconds"], "s; left out:", result["left_out"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("shapes", nargs="?", default=SHAPES, help="N x K of the matrices, e.g. 4096x4096,14336x4096")
    parser.add_argument("--trellis", dest="trellis_shapes", default="", help="N x K of matrices in trellis codes")
    parser.add_argument("seconds", nargs="?", type=float, default=110.0, help="begin no shape after that")
    main(**vars(parser.parse_args()))
