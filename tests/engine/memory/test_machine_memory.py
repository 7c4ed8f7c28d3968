"""Free memory as a machine reports it: /proc/meminfo, cgroups of both versions, no such files at all."""

import os
from pathlib import Path

import pytest
import torch

from crelle.engine.memory.machine import FreeMemory, free_memory, free_on_host, out_of_memory

GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {32 << 20} kB\nMemAvailable: {20 << 20} kB\nSwapFree: 0 kB\n"}


def root(to: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(text)
    return to


def v2(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}/memory"
    return {
        f"{at}.max": f"{limit}\n",
        f"{at}.current": f"{used}\n",
        f"{at}.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def v1(folder: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{folder}/memory"
    stat = f"cache 1\ntotal_inactive_file {inactive}\n"
    return {f"{at}.limit_in_bytes": str(limit), f"{at}.usage_in_bytes": str(used), f"{at}.stat": stat}


def test_without_a_limit_it_is_what_the_machine_has_available(tmp_path: Path) -> None:
    assert free_on_host(root(tmp_path, MACHINE)) == FreeMemory(20 * GIB, "on this machine")


@pytest.mark.parametrize(
    ("cgroup", "files", "gib"),
    [
        ("0::/app\n", v2("app", 6 * GIB, 2 * GIB), 4),
        ("0::/app\n", v2("app", 6 * GIB, 2 * GIB, inactive=GIB), 5),  # the file cache can be dropped
        ("0::/app\n", v2("app", 6 * GIB, 7 * GIB), 0),  # a limit that was lowered
        ("0::/user/app\n", v2("user/app", "max", GIB) | v2("user", 8 * GIB, 5 * GIB), 3),  # of the group above
        ("0::/of/the/host\n", v2("", 3 * GIB, GIB), 2),  # a container sees its own group at the top
        ("0::/app\n", v2("app", "max", GIB), 20),
        ("0::/app\n", v2("app", 64 * GIB, GIB), 20),  # more than the machine has
        ("4:memory:/box\n1:cpu:/\n0::/\n", v1("box", 5 * GIB, 2 * GIB, inactive=GIB), 4),
        ("4:cpuset,memory:/box\n", v1("box", (1 << 63) - 4096, GIB) | v1("", 7 * GIB, GIB), 6),
        ("4:memory:/gone\n", {}, 20),
        ("nonsense\n::\n", v2("", 2 * GIB, GIB), 1),
    ],
)
def test_limits_of_cgroups_count(tmp_path: Path, cgroup: str, files: dict[str, str], gib: int) -> None:
    found = free_on_host(root(tmp_path, {**MACHINE, "proc/self/cgroup": cgroup, **files}))
    assert found.size == gib * GIB
    assert found.where == ("on this machine" if gib == 20 else "within the memory limit of this cgroup")


def test_a_system_that_reports_nothing_has_half_of_its_memory(tmp_path: Path) -> None:
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_on_host(tmp_path).size == everything // 2
    assert free_on_host(root(tmp_path, {"proc/meminfo": "MemAvailable: lots\n"})).size == everything // 2


def test_this_machine_has_some_and_not_more_than_it_has() -> None:
    found = free_memory(torch.device("cpu"))
    assert 0 < found.size <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_what_torch_holds_and_does_not_use_is_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: {1: (100, 141)}[index])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 25)
    assert free_memory(torch.device("cuda")) == FreeMemory(105, "on cuda:1")


def test_errors_of_allocation_are_known() -> None:
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(too_much.value)
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not out_of_memory(RuntimeError("shape mismatch"))
