"""Energy of a GPU's work, by the counter that its board keeps (NVML: millijoules since the driver was loaded).

    with measure() as spent:
        ...                        # at least a second: the counter moves every 20 to 100 ms
    spent.joules, spent.reason

It counts the whole board, memory and idle power included, as the power plug would. Where there is no counter, `joules`
is None and `reason` says in a sentence why; nothing is estimated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

SECONDS = 1.0  # of work that gives a figure worth writing down


@dataclass(slots=True)
class Energy:
    """What a block of work took; filled in when the block ends."""

    joules: float | None = None
    seconds: float = 0.0
    reason: str | None = None  # why there are no joules


@contextmanager
def measure(device: int | None = None) -> Iterator[Energy]:
    """Measure what a GPU (the current one) spends while the block runs, everything launched in it included."""
    spent = Energy()
    with _counter(device) as read:
        if isinstance(read, str):
            spent.reason, read = read, _nothing
        before, begun = read(), perf_counter()
        yield spent
        if torch.cuda.is_available():
            torch.cuda.synchronize(device)
        spent.seconds = perf_counter() - begun
        if spent.reason is None:
            spent.joules = (read() - before) / 1e3


def per_call(work: Callable[[], object], seconds: float = SECONDS) -> Energy:
    """Return the joules and seconds of one call of `work`, called again and again for so long; it must synchronize."""
    if torch.cuda.is_available():
        _repeat(work, seconds / 4)  # until the clocks and the power are those of work, not of waiting
    with measure() as spent:
        calls = _repeat(work, seconds) if spent.reason is None else 1
    return Energy(None if spent.joules is None else spent.joules / calls, spent.seconds / calls, spent.reason)


def _repeat(work: Callable[[], object], seconds: float) -> int:
    calls, end = 0, perf_counter() + seconds
    while not calls or perf_counter() < end:
        work()
        calls += 1
    return calls


@contextmanager
def _counter(device: int | None) -> Iterator[Callable[[], float] | str]:
    """Give a function that reads the counter in millijoules, or the reason why there is none."""
    if not torch.cuda.is_available():
        yield "energy is counted on NVIDIA GPUs, and torch sees none here"
        return
    try:
        import pynvml
    except ImportError:
        yield "energy needs NVIDIA's NVML bindings: pip install 'crelle[energy]'"
        return
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        yield f"NVML does not start: {e}"
        return
    try:
        yield _reader(nvml, torch.cuda.current_device() if device is None else device)
    finally:
        nvml.nvmlShutdown()


def _reader(nvml: Any, device: int) -> Callable[[], float] | str:
    try:
        # By its own number: torch counts only the devices that CUDA_VISIBLE_DEVICES leaves.
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(board)
    except nvml.NVMLError as e:
        return f"NVML has no energy counter of this GPU: {e}"

    def read() -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(board))

    return read


def _nothing() -> float:
    return 0.0
