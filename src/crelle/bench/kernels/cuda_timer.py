"""Timing on a GPU: many calls captured in one CUDA graph, replayed, between two events.

calls    Each has its own copy of the weights. Together they hold far more than the L2 cache, so each call reads memory;
         one graph holds them all, so that what the host takes to launch does not count.
figure   The median of several replays, divided by the calls.
checked  The output of the last call is overwritten with NaN before a replay and must come back bit for bit as the
         checked one: what was timed is what was checked.
ceiling  The fastest plain read of a large buffer that we know, measured in the same run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from crelle.bench.energy import Energy, per_call
from crelle.errors import UnsupportedError

WORKING_SET = 500_000_000  # bytes that calls go through before they come back to the first copy: 8 L2 caches of an H200
MOST_CALLS = 256  # in a graph; matrices of less than 2 MB stay partly in the cache
REPLAYS = 25
_WARM = 0.05  # seconds of replays before those that count
_CEILING_BYTES = 4 << 30

Any_ = TypeVar("Any_")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """How fast this device reads memory, and by what it was measured."""

    gb_per_s: float
    how: str


def require_cuda() -> None:
    """Say that there is no GPU to time on, if so."""
    if not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device is visible to torch; use `device='cpu'`")


def gpu() -> dict[str, Any]:
    """Return what a result file should say about the device."""
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "multiprocessors": p.multi_processor_count,
        "memory_bytes": p.total_memory,
        "l2_bytes": getattr(p, "L2_cache_size", None),
        "cuda": torch.version.cuda,
    }


def copies(nbytes: int, working_set: int = WORKING_SET, most: int = MOST_CALLS) -> int:
    """Return how many copies of a weight make up the working set: at least 2."""
    return max(2, min(most, -(-working_set // max(1, nbytes))))


def clone(thing: Any_) -> Any_:
    """Copy a prepared weight, whatever it is: a tensor, or a dataclass or sequence of them."""
    made: Any = thing
    if isinstance(thing, Tensor):
        made = thing.clone()
    elif isinstance(thing, list | tuple) and not hasattr(thing, "_fields"):
        made = type(thing)(clone(part) for part in thing)
    elif is_dataclass(thing) and not isinstance(thing, type):
        parts = {f.name: getattr(thing, f.name) for f in fields(thing) if f.init}
        made = replace(thing, **{n: clone(p) for n, p in parts.items() if isinstance(p, Tensor) or is_dataclass(p)})
    return made  # type: ignore[no-any-return]


def poison(*shape: int, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next output of this shape will most likely get from torch."""
    torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def event() -> torch.cuda.Event:
    """Return a mark in a stream that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Replay:
    """Some calls captured in a graph."""

    def __init__(self, calls: Sequence[Callable[[], Tensor]]) -> None:
        self.calls = len(calls)
        self._kept = calls  # the graph holds addresses, these hold the weights that are there
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()  # compiles, loads and allocates what a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                self.last = call()  # the one before is given back to the graph's own memory

    def __call__(self) -> None:
        """Replay and wait for the end."""
        self.graph.replay()
        torch.cuda.synchronize()

    def check(self, expected: Tensor, what: str) -> None:
        """Refuse to time a graph whose last output is not, bit for bit, what was checked before."""
        self.last.fill_(torch.nan)
        self()
        if not torch.equal(self.last, expected):
            raise UnsupportedError(f"{what}: a rerun in a graph is not bitwise equal to the first run; it is not timed")

    def microseconds(self, replays: int = REPLAYS) -> float:
        """Return the time of one call: the median of the replays, after some that do not count."""
        warm_until = perf_counter() + _WARM
        while perf_counter() < warm_until:  # an idle GPU takes its time to raise its clocks
            self()
        marks = [(event(), event()) for _ in range(replays)]
        for begin, end in marks:
            begin.record()
            self.graph.replay()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * median(float(begin.elapsed_time(end)) for begin, end in marks) / self.calls

    def energy(self) -> Energy:
        """Return the energy of one call, the calls taken one after the other without a pause."""
        batch = max(1, int(2e4 / max(1.0, self.microseconds(3) * self.calls)))  # replays of together 20 ms

        def work() -> None:
            for _ in range(batch):
                self.graph.replay()
            torch.cuda.synchronize()

        spent = per_call(work)
        share = batch * self.calls
        return Energy(None if spent.joules is None else spent.joules / share, spent.seconds / share, spent.reason)


def read_ceiling(nbytes: int = _CEILING_BYTES) -> Ceiling:
    """Measure several plain reads of a large buffer and return the fastest.

    A read by torch (a sum, a matrix-vector product by cuBLAS) is a lower bound of what the memory can do; a kernel
    whose share is above 100 % has beaten all of them.
    """
    free, _ = torch.cuda.mem_get_info()
    nbytes = min(nbytes, free // 4) // (1 << 20) * (1 << 20)
    half = torch.empty(nbytes // 2, dtype=torch.float16, device="cuda").uniform_(-1, 1).view(-1, 8192)
    rows = half.view(torch.float32)  # two such halves in a row are a small, finite f32
    buffer = rows.flatten()
    x = torch.randn(1, 8192, dtype=torch.float16, device="cuda")
    ways: dict[str, Callable[[], Tensor]] = {
        "torch.sum of f32": buffer.sum,
        "torch.sum of f32 rows": lambda: rows.sum(1),
        "cuBLAS f16 matrix-vector": lambda: torch.nn.functional.linear(x, half),
    }
    speed = {how: nbytes / Replay([way]).microseconds() / 1e3 for how, way in ways.items()}
    best = max(speed, key=lambda how: speed[how])
    return Ceiling(speed[best], f"{best} over {nbytes / 1e9:.1f} GB")
