"""How fast one matrix product is: checked against f64 first, then timed beside its roofline and torch.

Hot: one weight, again and again, so that it comes from the caches. Cold: more copies of it than the caches hold, in
turn, so that it comes from memory. The roofline is a plain read of the very same bytes by the same threads. All parties
take turns in short slices, and each keeps its best time: a noisy neighbour then meets all of them.
"""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from crelle.bench.external import gemv_peer
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.kernels import cpu
from crelle.kernels.base import Problem
from crelle.kernels.cpu.check import instruction_set, kernel_for, max_relative_error
from crelle.kernels.registry import select
from crelle.kernels.threads import set_threads
from crelle.quantizers.scheme import parse

COLD_BYTES = 800_000_000  # more than any cache of today's processors
_ROUNDS, _SLICE = 12, 0.03  # rounds of turns, seconds of one turn
_PEER_TURNS = 3  # rounds in which another program takes a turn too
TOLERANCE = {"exact": 2e-4, "int8": 2e-2}  # largest error, relative to the largest output


@dataclass(frozen=True, slots=True)
class Gemv:
    """One measurement."""

    scheme: str
    shape: tuple[int, int]
    batch: int
    device: str
    threads: int
    working_set: str  # hot or cold
    kernel: str
    isa: str
    precision: str
    bytes: int  # of the prepared weight
    max_rel_err: float  # against f64, relative to the largest output
    microseconds: float
    gb_per_s: float
    roofline_gb_per_s: float
    share_of_roofline: float
    baseline: str
    baseline_microseconds: float
    speedup: float
    peers: dict[str, float] = field(default_factory=dict)  # microseconds of other programs in the same run


def measure(
    N: int,
    K: int,
    scheme: str,
    *,
    batch: int = 1,
    threads: int,
    working_set: str = "hot",
    precision: str = "exact",
    isa: str | None = None,
    peer: str | None = None,
) -> Gemv:
    """Time x [batch, K] @ W.T for a random W [N, K] of the scheme by the CPU kernels; `peer`: see bench/external.py."""
    with instruction_set(isa):
        return _measure(N, K, scheme, batch, threads, working_set, precision, peer)


def _measure(
    N: int, K: int, scheme: str, batch: int, threads: int, working_set: str, precision: str, peer: str | None
) -> Gemv:
    if working_set not in ("hot", "cold"):
        raise SchemeError(f"the working set is hot or cold, not '{working_set}'")
    if precision not in TOLERANCE:
        raise SchemeError(f"the precision is exact or int8, not '{precision}'")
    random = random_generator(0, "cpu")
    w = random_matrix(parse(scheme), N, K, random)
    kernel = select(Problem.of(w, torch.float32), kernel_for(w, precision))
    set_threads(threads)
    x = torch.randn(batch, K, generator=random)
    error = check(x, w, precision)

    def copies(size: int) -> int:
        return 1 if working_set == "hot" else -(-COLD_BYTES // size)

    first: Any = kernel.prepare(w, torch.float32).data
    weights = [first] + [kernel.prepare(w, torch.float32).data for _ in range(copies(first.nbytes) - 1)]
    plain = [w.dequantize() for _ in range(copies(4 * N * K))]
    best = dict.fromkeys(("product", "read", "torch"), float("inf"))
    peers: dict[str, float] = {}
    for i in range(_ROUNDS):
        _take_turns(best, weights, plain, x, precision)
        if peer and i % (_ROUNDS // _PEER_TURNS) == 0:
            for who, us in gemv_peer(peer, N, K, batch, threads, working_set).items():
                peers[who] = min(us, peers.get(who, us))
    speed = first.nbytes / best["product"] / 1e9
    roofline = first.nbytes / best["read"] / 1e9
    return Gemv(
        scheme=scheme,
        shape=(N, K),
        batch=batch,
        device="cpu",
        threads=threads,
        working_set=working_set,
        kernel=kernel.name,
        isa=first.isa,
        precision=precision,
        bytes=first.nbytes,
        max_rel_err=error,
        microseconds=1e6 * best["product"],
        gb_per_s=speed,
        roofline_gb_per_s=roofline,
        share_of_roofline=speed / roofline,
        baseline="torch f32",
        baseline_microseconds=1e6 * best["torch"],
        speedup=best["torch"] / best["product"],
        peers=peers,
    )


def check(x: Tensor, w: QuantTensor, precision: str) -> float:
    """Return the error of the product; refuse to time a wrong kernel."""
    error = max_relative_error(x, w, precision)
    if not error <= TOLERANCE[precision]:  # a NaN fails too
        raise UnsupportedError(f"the kernel is wrong here: error {error:.3g}, so it is not timed")
    return error


def _take_turns(best: dict[str, float], weights: list[Any], plain: list[Tensor], x: Tensor, precision: str) -> None:
    """Let the product, the plain read and torch run for a slice each; keep their best seconds."""
    core = cpu.core()
    best["product"] = min(best["product"], *core.time_matmul(weights, x.numpy(), precision, _SLICE))
    best["read"] = min(best["read"], *core.time_read(weights, _SLICE))
    best["torch"] = min(best["torch"], _time_torch(plain, x))


def _time_torch(plain: list[Tensor], x: Tensor) -> float:
    best, begun = float("inf"), perf_counter()
    while True:
        for w in plain:
            before = perf_counter()
            torch.nn.functional.linear(x, w)
            best = min(best, perf_counter() - before)
        if perf_counter() - begun > _SLICE:
            return best
