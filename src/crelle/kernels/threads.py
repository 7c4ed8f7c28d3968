"""How many CPU threads everybody uses: torch and our own pool are set together."""

import os

import torch

from crelle.errors import SchemeError
from crelle.kernels import cpu


def available_cores() -> int:
    """Cores that the affinity mask gives to this process."""
    return len(os.sched_getaffinity(0))


def set_threads(threads: int | None) -> None:
    """Use this many threads from now on; None means all cores given to us."""
    if threads is not None and threads < 1:
        raise SchemeError(f"threads must be at least 1, got {threads}")
    count = threads or available_cores()
    torch.set_num_threads(count)
    if cpu.available() is None:
        cpu.core().set_threads(count)
