"""Limits of the control groups (a container, a systemd unit) that this process is in, of versions 1 and 2.

    version 2    /proc/self/cgroup has "0::/a/b":           files in /sys/fs/cgroup/a/b
    version 1    "4:cpu,cpuacct:/a/b", one per hierarchy:   files in /sys/fs/cgroup/cpu/a/b

A limit of a group above holds too. A container often sees its own group at the top, whatever path it reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Group:
    """The directory of one control group."""

    version: int
    path: Path


def groups(controller: str, root: Path = ROOT) -> Iterator[Group]:
    """Yield the group of this process that may limit "cpu" or "memory", and all above; root: where proc and sys are."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        # a hierarchy of several controllers lies under all their names, and a link for each, where somebody made one
        tops = [
            root / "sys/fs/cgroup" / name for name in dict.fromkeys((controller, controllers) if controllers else "")
        ]
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for top in tops or [root / "sys/fs/cgroup"]:
            for depth in range(len(parts), -1, -1):
                yield Group(1 if controllers else 2, top.joinpath(*parts[:depth]))


def number_in(file: Path) -> int | None:
    """Return the number that a file of a group holds; None if there is no such file, or no limit ("max")."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def cpu_quota(root: Path = ROOT) -> int | None:
    """Return how many CPUs' time this process may use, rounded up; None: there is no limit."""
    found = [_quota(group) for group in groups("cpu", root)]
    return min((q for q in found if q is not None), default=None)


def _quota(group: Group) -> int | None:
    if group.version == 1:
        quota, period = (number_in(group.path / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    else:
        try:
            quota, period = map(int, (group.path / "cpu.max").read_text().split())
        except (OSError, ValueError):
            return None
    if quota is None or period is None or quota <= 0 or period <= 0:  # version 1 has -1 for no limit
        return None
    return -(-quota // period)
