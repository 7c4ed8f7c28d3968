"""Measures GEMV tile configs in a model's own decode step, for problems without a measurement.

    tune(executor, rows=[1])          # before the first answer; afterwards `bmma_gemv.choose` knows the problems

autotune.json has the shapes of a few models, and the nearest of them may be far: a step of OPT-30B took 1.4 times as
long as it can. Single launches say little, because products of a step overlap (PDL). So a step of some layers is timed
as a graph, and each product, those of the most bytes first, takes the tile config with which the step is fastest:

    1. every shape of thread blocks that won anywhere in autotune.json
    2. the three best of them with other numbers of thread blocks a multiprocessor and, of clusters, placements

A config counts only if the step's logits are those of the table's config, and replaces it if the step gets at least
GAIN faster. Layers: enough to read far more than the L2 cache holds. Compilation takes most of the time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crelle.errors import CrelleError
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.dispatch import GEMV_ROWS
from crelle.kernels.cuda.launch import recording
from crelle.kernels.cuda.planes.bmma_gemv import (
    GemvTileConfig,
    autotuned,
    choose,
    columns,
    decode_configs,
    fitted,
)
from crelle.kernels.cuda.planes.weight_layout import CudaWeight
from crelle.kernels.cuda.runtime import measured_configs
from crelle.kernels.cuda.runtime.measured_configs import Config, Problem
from crelle.kernels.cuda.step.fused_linear import FusedLinear
from crelle.kernels.cuda.step.graphs import capture

if TYPE_CHECKING:
    from crelle.kernels.cuda.executor import CudaExecutor

GAIN = 0.01  # of a step's time
SECONDS = 60.0  # for all problems of a model; what is left then keeps the table's configs
_BYTES = 400e6  # of weights that a step should read: several times any L2 cache
_REPLAYS = 15
_FINALISTS = 3
_BLOCKS = (1, 2, 3, 4, 999)  # thread blocks on a multiprocessor; 999: as many as there is work for, in turn
_POLICIES = (0, 2)
_WARPS = 32  # of thread blocks that run at once
_ERROR = 0.05  # of the logits' norm: other orders of sums, and 16-bit activations between layers, not other sums
_VARIANTS = 48  # shapes of thread blocks that are compiled at most, for all products together


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """A problem of a step, with all that is needed to time it."""

    problem: Problem
    weight: CudaWeight
    layers: list[int]
    nbytes: int  # of all its weights in the model


@torch.inference_mode()
def tune(
    executor: "CudaExecutor",
    rows: Iterable[int] = (1,),
    *,
    seconds: float = SECONDS,
    progress: Callable[[int, int], None] | None = None,
    exhaustive: Sequence[GemvTileConfig] | None = None,
) -> dict[Problem, Config]:
    """Measure what steps of these numbers of rows lack, keep it, and return it.

    exhaustive: tile configs to try for all problems, known ones too, instead of those that won elsewhere.
    """
    if executor.batch_invariant or not measured_configs.usable():
        return {}
    end, found = perf_counter() + seconds, dict[Problem, Config]()
    for n in sorted({columns(n) for n in rows if n <= GEMV_ROWS}):
        products = _products(executor, n, exhaustive is not None)
        shapes = _shapes(products, exhaustive)
        _compile(executor, products, shapes, n)
        for done, (product, configs) in enumerate(zip(products, shapes, strict=True)):
            if perf_counter() > end:
                break
            found |= _best(executor, product, configs, n)
            if progress is not None:
                progress(done + 1, len(products))
    if found:
        measured_configs.keep(found)
    return found


def _forget_plans(executor: "CudaExecutor") -> None:
    """Let the weights of an executor's step ask for their tile configs again."""
    for layer in executor.step.layers:
        for w in _weights(layer.linears):
            w.plans.clear()


def _weights(linears: Iterable[Any]) -> Iterator[CudaWeight]:
    """Yield the bit-plane weights of fused linears, those that are fused linears of several kinds included."""
    for linear in linears:
        for w in linear.weights:
            if isinstance(w, CudaWeight):
                yield w
            elif isinstance(w, FusedLinear):
                yield from _weights([w])


def _products(executor: "CudaExecutor", rows: int, known: bool) -> list[_Product]:
    """Return the problems of a step that were not measured, those of the most bytes first; known: all of them."""
    _forget_plans(executor)
    with recording(), measured_configs.trying({}) as asked:
        executor.first_step(rows)()
    _forget_plans(executor)
    by_weight = {id(w): problem for problem, weights in asked.items() for w in weights}
    found: dict[Problem, _Product] = {}
    for i, layer in enumerate(executor.step.layers):
        for w in _weights(layer.linears):
            if (problem := by_weight.get(id(w))) is not None:
                product = found.setdefault(problem, _Product(problem, w, [], 0))
                product.layers.append(i)
                found[problem] = replace(product, nbytes=product.nbytes + w.nbytes)
    wanted = [p for p in found.values() if known or not _is_known(p)]
    return sorted(wanted, key=lambda p: -p.nbytes)


def _is_known(product: _Product) -> bool:
    p = product.problem
    return p in measured_configs.known() or autotuned(product.weight, p.M, p.epilogue, torch.cuda.get_device_name())


def _shapes(products: Sequence[_Product], exhaustive: Sequence[GemvTileConfig] | None) -> list[list[GemvTileConfig]]:
    """Return the tile configs that each product is tried with first: all, or of each shape of thread blocks one."""
    if exhaustive is not None:
        return [_fitting(product, exhaustive) for product in products]
    each = max(4, _VARIANTS // max(1, len(products)))
    return [_fitting(product, decode_configs())[:each] for product in products]


def _fitting(product: _Product, configs: Iterable[GemvTileConfig]) -> list[GemvTileConfig]:
    """Return the configs as this product takes them, without duplicates; registers as the table's config has them."""
    usual = _usual(product)
    found = list[GemvTileConfig]()
    for config in configs:
        for occupancy in sorted({config.occupancy, usual.occupancy}):
            policy = config.policy if product.problem.epilogue != "STORE" else 0
            with_registers = replace(config, occupancy=occupancy, policy=policy)
            fit = fitted(with_registers, product.weight, product.problem.epilogue)  # type: ignore[arg-type]
            if fit not in found and fit != usual and _resident(fit):
                found.append(fit)
    return found


def _resident(config: GemvTileConfig) -> bool:
    at_once = 1 if config.blocks == 999 else config.blocks
    return at_once * config.warps <= _WARPS


def _usual(product: _Product) -> GemvTileConfig:
    """Return what is chosen for a product without measurements."""
    p = product.problem
    with measured_configs.trying({}):
        return choose(product.weight, p.M, in_graph=True, epilogue=p.epilogue)  # type: ignore[arg-type]


def _compile(
    executor: "CudaExecutor", products: Sequence[_Product], shapes: Sequence[Sequence[GemvTileConfig]], rows: int
) -> None:
    """Compile what steps with these tile configs launch, on all cores."""
    with recording() as needed:
        for product, configs in zip(products, shapes, strict=True):
            some = executor.with_layers(_enough(executor, product))
            for config in configs:
                _forget_plans(some)
                with measured_configs.trying({product.problem: astuple(config)}):
                    some.first_step(rows)()
    _forget_plans(executor)
    jit.compile_all(sorted(needed))


def _best(
    executor: "CudaExecutor", product: _Product, configs: Sequence[GemvTileConfig], rows: int
) -> dict[Problem, Config]:
    """Return the tile config with which a step of some layers is fastest: the table's unless another gains."""
    some = executor.with_layers(_enough(executor, product))
    usual = _usual(product)
    oracle, before = _timed(some, {product.problem: astuple(usual)}, rows, None)
    if oracle is None:
        return {}
    times = {usual: before}

    def measure(tried: Iterable[GemvTileConfig]) -> None:
        for config in tried:
            if config not in times:
                times[config] = _timed(some, {product.problem: astuple(config)}, rows, oracle)[1]

    measure(configs)
    finalists = sorted(times, key=lambda c: times[c])[:_FINALISTS]
    policies = (0,) if product.problem.epilogue == "STORE" else _POLICIES
    measure(
        c
        for config in finalists
        for blocks in _BLOCKS
        for policy in policies
        if _resident(c := replace(config, blocks=blocks, policy=policy))
    )
    best = min(times, key=lambda c: times[c])
    again = _timed(some, {product.problem: astuple(usual)}, rows, oracle)[1]
    chosen = best if times[best] < (1 - GAIN) * min(before, again) else usual
    return {product.problem: astuple(chosen)}


def _enough(executor: "CudaExecutor", product: _Product) -> list[int]:
    """Return layers that have the product, enough of them to read far more than the L2 cache holds."""
    sizes = [sum(w.nbytes for w in _weights(layer.linears)) for layer in executor.step.layers]
    found, total = list[int](), 0
    for i in dict.fromkeys(product.layers):
        found.append(i)
        total += sizes[i]
        if len(found) > 1 and total > _BYTES:
            break
    return found


def _timed(
    executor: "CudaExecutor", configs: dict[Problem, Config], rows: int, oracle: Tensor | None
) -> tuple[Tensor | None, float]:
    """Return the logits of a step with these tile configs and its milliseconds; infinite where it fails or errs."""
    _forget_plans(executor)
    try:
        with measured_configs.trying(configs):
            graph, logits = capture(executor.first_step(rows))
    except (CrelleError, torch.cuda.OutOfMemoryError):  # more registers or shared memory than there are, no memory left
        return None, float("inf")
    finally:
        _forget_plans(executor)
    graph.replay()
    seen = logits.clone()
    if oracle is not None and not bool((seen - oracle).norm() < _ERROR * oracle.norm()):
        return None, float("inf")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return seen, median(a.elapsed_time(b) for a, b in pairwise(events))
