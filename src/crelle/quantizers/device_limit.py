"""How much memory a device has, and a limit on what torch takes of a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from crelle.errors import CapacityError


@contextmanager
def device_limit(device: torch.device, limit: int | None) -> Iterator[None]:
    """Keep torch within `limit` bytes of a GPU while the block runs, blocks that it keeps for reuse included.

    Running out of memory, with a limit or without, becomes a sentence.
    """
    limited = device.type == "cuda" and limit is not None
    index = torch.cuda.current_device() if limited and device.index is None else device.index
    if limited and limit is not None:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise CapacityError(
            f"out of GPU memory ({str(e).splitlines()[0]}); allow more with `memory`, or use fewer "
            "or shorter sequences (`rows`, `length`)"
        ) from e
    finally:
        if limited:
            torch.cuda.set_per_process_memory_fraction(1.0, index)


def total_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
