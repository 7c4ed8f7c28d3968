"""Capture of CUDA graphs: the one place that warms up and records.

    graph, y = capture(step)            # y: what `step` returned while it was recorded; a replay overwrites it
    graph.replay()

Tensors that the graph reads or writes must stay where they are.
"""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_REPLAYS = 8  # of a graph that is timed


@cache
def _warmup_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures on a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def capture(
    run: Callable[[], T],
    *,
    warmup: Callable[[], object] | None = None,
    reset: Callable[[], object] | None = None,
    pool: Any = None,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record `run` as a graph on the current device; return the graph and what `run` returned.

    `warmup` (`run` itself unless given) runs once before, on a side stream: it compiles, loads and allocates what a
    capture may not. `reset` runs between the two, for state that the warm-up has changed. `pool`: memory shared with
    other graphs, their `graph.pool()`.
    """
    stream = _warmup_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (warmup or run)()
    torch.cuda.current_stream().wait_stream(stream)
    if reset is not None:
        reset()
    torch.cuda.synchronize()
    gc.collect()  # another graph that is freed during a capture would end it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result


def replay_seconds(replay: Callable[[], object]) -> float:
    """Return the time of a replay on the device; the first two warm up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for i in range(_REPLAYS + 2):
        if i == 2:
            begin.record()
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _REPLAYS
