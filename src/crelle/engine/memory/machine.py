"""How much memory is free on a device now. crelle.engine.memory.defaults shares it out.

a GPU     what the driver reports as free, and what torch holds of it without using it
a CPU     MemAvailable of /proc/meminfo, or what a cgroup (a container, a systemd unit) still allows, whichever is
          less: of its own group and of all groups above it, versions 1 and 2. The file cache that a group could
          drop at once (inactive_file) is not counted as used.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from crelle.cgroup import groups, number_in

_FILES = {  # of a cgroup, by version: its limit, what is used, and what of that is file cache in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_UNKNOWN = 0.5  # the share of all memory that is taken as free where the system does not report it (macOS)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that are free, and of what."""

    size: int
    where: str


def free_memory(device: torch.device) -> FreeMemory:
    """Return what is free on a device now."""
    if device.type != "cuda":
        return free_on_host()
    index = torch.cuda.current_device() if device.index is None else device.index
    free, _ = torch.cuda.mem_get_info(index)
    unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return FreeMemory(free + unused, f"on cuda:{index}")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def free_on_host(root: Path = Path("/")) -> FreeMemory:
    """Return what is free for this process in main memory; root: where proc and sys are mounted."""
    machine = _available(root / "proc/meminfo")
    group = min(_cgroup_rooms(root), default=machine)
    if group < machine:
        return FreeMemory(group, "within the memory limit of this cgroup")
    return FreeMemory(machine, "on this machine")


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return int(_UNKNOWN * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield the bytes that each group above this process with a limit still allows."""
    for group in groups("memory", root):
        limit, usage, reclaimable = _FILES[group.version]
        most, used = number_in(group.path / limit), number_in(group.path / usage)
        if most is not None and used is not None:
            yield max(0, most - max(0, used - _stat(group.path / "memory.stat", reclaimable)))


def _stat(file: Path, name: str) -> int:
    try:
        found = dict(line.split() for line in file.read_text().splitlines())
        return int(found.get(name, 0))
    except (OSError, ValueError):
        return 0
