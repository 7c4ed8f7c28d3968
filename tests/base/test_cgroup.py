"""CPU quotas of control groups as the files of both versions have them.

Memory: tests/engine/memory/test_machine_memory.py.
"""

from pathlib import Path

import pytest

from crelle.cgroup import cpu_quota


def v2(folder: str, text: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/cpu.max": f"{text}\n"}


def v1(folder: str, quota: int, period: int = 100_000, top: str = "cpu") -> dict[str, str]:
    at = f"sys/fs/cgroup/{top}/{folder}/cpu.cfs"
    return {f"{at}_quota_us": f"{quota}\n", f"{at}_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("cgroup", "files", "cpus"),
    [
        ("0::/pod\n", v2("pod", "200000 100000"), 2),
        ("0::/pod\n", v2("pod", "250000 100000"), 3),  # rounded up
        ("0::/pod\n", v2("pod", "1000 100000"), 1),
        ("0::/pod\n", v2("pod", "max 100000"), None),
        ("0::/pod/box\n", v2("pod/box", "max 100000") | v2("pod", "400000 100000"), 4),  # of the group above
        ("0::/pod/box\n", v2("pod/box", "200000 50000") | v2("pod", "300000 100000"), 3),  # the least of all
        ("0::/of/the/host\n", v2("", "200000 100000"), 2),  # a container sees its own group at the top
        ("0::/../other\n", v2("", "200000 100000"), 2),
        ("3:cpu,cpuacct:/box\n4:memory:/box\n0::/\n", v1("box", 150_000), 2),
        ("3:cpu,cpuacct:/box\n", v1("box", -1) | v1("", 500_000), 5),
        ("3:cpu,cpuacct:/box\n", v1("box", -1), None),
        ("3:cpu,cpuacct:/box\n", v1("box", 150_000, top="cpu,cpuacct"), 2),  # without a link to it
        ("3:cpuacct,cpu:/box\n", v1("", 150_000, top="cpuacct,cpu"), 2),
        ("3:cpuacct:/box\n", v1("box", 100_000), None),  # no hierarchy that limits CPUs
        ("3:cpu:/box\n", v1("box", 100_000, period=0), None),
        ("0::/pod\n", v2("pod", "nonsense"), None),
        ("0::/pod\n", {}, None),
        ("nonsense\n::\n", {}, None),
    ],
)
def test_quota(tmp_path: Path, cgroup: str, files: dict[str, str], cpus: int | None) -> None:
    for name, text in ({"proc/self/cgroup": cgroup} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == cpus


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
