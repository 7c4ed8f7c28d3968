"""The number of CPU threads: torch and our own pool are set together."""

import os

import torch

from crelle.cgroup import cpu_quota
from crelle.errors import SchemeError
from crelle.kernels import cpu


def available_cores() -> int:
    """Cores that this process may use: by its affinity mask, and by the CPU quota of its container.

    Without masks (macOS) they are all of the machine. More threads than a quota allows would all be stopped for the
    rest of a period, also those that others wait for.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, cpu_quota() or cores)


def max_threads() -> int:
    """The most threads that may be asked for: 4 for each core of the machine, and 256 on small ones."""
    return max(256, 4 * (os.cpu_count() or 1))


def check_threads(threads: int) -> int:
    """Return a number of threads, or say why it cannot be: starting 100,000 of them would end the process."""
    if threads < 1:
        raise SchemeError(f"threads must be at least 1, got {threads}")
    if threads > max_threads():
        raise SchemeError(f"threads must be at most {max_threads()} on this machine, got {threads}")
    return threads


def set_threads(threads: int | None) -> None:
    """Use this many threads from now on; None means all cores given to us."""
    count = available_cores() if threads is None else check_threads(threads)
    torch.set_num_threads(count)
    if cpu.available() is None:
        cpu.core().set_threads(count)
