"""How long a decode step takes, estimated: a sum of few terms, whose constants were fitted to measurements on an H200.

    step = layers x (launches + attention's launch + the engine's own)
         + bytes of all matrices that are read / bandwidth
         + weights x time of a weight by number of rows          by kind of weights and kernel; linear between knots
         + bytes of keys and values / bandwidth of attention     by bits of the cache

The first two terms are what one sequence costs, the third what more of them add, be it memory that is read less evenly
or arithmetic. A kernel that takes over at some number of rows has knots of its own (crelle.kernels.cuda.dispatch).
crelle.bench.planner.step_fit finds the constants and says which measurements it used; docs/guide/plan.md how far it is
off.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from crelle.kernels.cuda.dispatch import GEMV_ROWS, SKINNY_ROWS
from crelle.kernels.cuda.step.graph_inputs import BUCKETS
from crelle.quantizers.base import Quantizer

Kind = Literal["dense", "coded", "integer4", "integer8", "two-level"]
BANDWIDTH = 4430.0  # GB/s that a plain read reaches on the H200 that was measured
# Rows between which the time of a weight is linear, by kind and kernel; beyond the last as between the last two.
# One row of coded weights is the origin: reading them is all that it costs.
KNOTS: Mapping[tuple[Kind, str], tuple[int, ...]] = {
    ("dense", "gemv"): (1, 4),
    ("dense", "torch"): (8, 64, 192),
    ("coded", "gemv"): (1, 4),
    ("coded", "skinny_gemm"): (8, 32),
    ("coded", "gemm"): (64, 192),
    ("integer4", "integer_gemm"): (8, 32, 128),
    ("integer8", "integer_gemm"): (8, 32, 128),
    ("two-level", "integer_gemm"): (8, 112),
}
_ORIGIN = "coded gemv 1"
_MEASURED_AS = {3: 2}  # bits of a cache that no step was timed with: as slow as the next that was

# Fitted, as bench/tuning/fit_planner.py prints them: milliseconds per layer (attention that is not split: and 1000
# tokens), per GB, per 10^9 weights.
CONSTANTS: Mapping[str, float] = {
    "attention": 0.0071255,
    "attention 16": 0.22599,
    "attention 8": 0.2399,
    "attention 4": 0.25336,
    "layer": 0.0058091,
    "byte": 0.25082,
    "coded gemv 4": 0.055149,
    "byte, dense, no engine": -0.026069,
    "dense gemv 1": 0.020035,
    "dense gemv 4": 0.14791,
    "engine": 0.014197,
    "dense torch 8": 0.037921,
    "dense torch 64": 0.045192,
    "dense torch 192": 0.22391,
    "coded skinny_gemm 8": 0.11202,
    "coded skinny_gemm 32": 0.30928,
    "coded gemm 64": 0.20461,
    "coded gemm 192": 0.5131,
    "unsplit attention 16": 0.041395,
    "unsplit attention coded": 0.057385,
    "integer4 integer_gemm 8": 0.062078,
    "integer4 integer_gemm 32": 0.16457,
    "integer4 integer_gemm 128": 0.30403,
    "attention 2": 0.36676,
    "integer8 integer_gemm 8": -0.0058947,
    "integer8 integer_gemm 32": 0.061757,
    "integer8 integer_gemm 128": 0.13855,
    "two-level integer_gemm 8": 0.11539,
    "two-level integer_gemm 112": 0.24849,
}


@dataclass(frozen=True, slots=True)
class Product:
    """Matrices that the same rows are multiplied by."""

    bytes: float
    weights: float
    rows: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step does on one GPU."""

    kind: Kind
    layers: int
    products: tuple[Product, ...]
    context: int  # tokens of a sequence
    cache: Mapping[int, float]  # bytes of keys and values that are read, by the bits of their codes
    batch_invariant: bool = False
    engine: bool = True  # False: the graphs of `crelle bench decode`, one sequence and nothing around it


def kind_of(scheme: Quantizer) -> Kind:
    """Return how weights of a scheme are multiplied."""
    spec = scheme.storage((4096, 4096))
    if spec["format"] == "dense":
        return "dense"
    if spec["format"] == "two-level":
        return "two-level"
    if spec.get("activation") is None:
        return "coded"
    return "integer8" if spec["bits"] > 4 else "integer4"


def bucket(rows: int) -> int:
    """Return the rows that a graph for so many sequences has."""
    return next((b for b in BUCKETS if b >= rows), rows)


def kernel_of(kind: Kind, rows: float, batch_invariant: bool = False) -> str:
    """Return the kernel of a number of rows on Hopper."""
    if kind == "dense":
        return "gemv" if rows <= GEMV_ROWS and not batch_invariant else "torch"
    if kind != "coded":
        return "integer_gemm"
    if batch_invariant or rows > SKINNY_ROWS:
        return "gemm"
    return "gemv" if rows <= GEMV_ROWS else "skinny_gemm"


def features(work: StepWork) -> dict[str, float]:
    """Return the amount of everything that has a constant: GB, layers, 10^9 weights."""
    found = {"layer": float(work.layers)}

    def add(name: str, amount: float) -> None:
        found[name] = found.get(name, 0.0) + amount

    for p in work.products:
        add("byte", p.bytes / 1e9)
        if work.kind == "dense" and not work.engine:
            add("byte, dense, no engine", p.bytes / 1e9)
            continue
        for name, share in _knots(work, p.rows):
            add(name, share * p.weights / 1e9)
    found.pop(_ORIGIN, None)
    if work.engine:
        add("engine", work.layers)
    for name, amount in attention(work).items():
        add(name, amount)
    return found


def attention(work: StepWork) -> dict[str, float]:
    """Return the amounts of attention."""
    found = {"attention": float(work.layers)}
    for bits, size in work.cache.items():
        name = f"attention {_MEASURED_AS.get(bits, bits)}"
        found[name] = found.get(name, 0.0) + size / 1e9
    return found


def unsplit(work: StepWork) -> dict[str, float]:
    """Return the amounts of attention where no sequence is split among blocks (batch-invariant): the longest's time."""
    coded = min(work.cache, default=16) < 16
    return {f"unsplit attention {'coded' if coded else '16'}": work.layers * work.context / 1000}


def milliseconds(work: StepWork, constants: Mapping[str, float] = CONSTANTS) -> float:
    """Estimate the time of a step."""

    def total(amounts: Mapping[str, float]) -> float:
        return sum(constants[name] * amount for name, amount in amounts.items())

    time = total(features(work))
    if work.batch_invariant:
        time += max(0.0, total(unsplit(work)) - total(attention(work)))
    return time


def _knots(work: StepWork, rows: float) -> list[tuple[str, float]]:
    """Return which knots a number of rows lies between, and how near to each."""
    kernel = kernel_of(work.kind, rows, work.batch_invariant)
    knots = KNOTS[work.kind, kernel]
    if rows < knots[0] and kernel != "gemm":  # fewer rows cost no less: tiles are padded
        rows = knots[0]
    i = max((j for j in range(len(knots) - 1) if knots[j] < rows), default=0)
    near = (rows - knots[i]) / (knots[i + 1] - knots[i])
    return [(f"{work.kind} {kernel} {knots[i]}", 1 - near), (f"{work.kind} {kernel} {knots[i + 1]}", near)]
