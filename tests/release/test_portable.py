"""What only Linux has is asked for in few places, and Crelle does without it. None of this was run on macOS."""

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from crelle.bench.environment import environment
from crelle.cli.commands.doctor import examine
from crelle.kernels.threads import available_cores
from crelle.server.run import _raise_file_limit

CSRC = ROOT / "src" / "crelle" / "kernels" / "cpu" / "csrc"
LINUX = re.compile(r"\b(?:sched_\w+|cpu_set_t|CPU_\w+|getauxval|syscall|SYS_\w+|HWCAP_\w+|prctl|gettid)\b")
COMPILER = shutil.which("c++")


def test_cores_are_counted_without_affinity_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr("crelle.kernels.threads.cpu_quota", lambda: None)
    assert available_cores() == os.cpu_count()
    assert environment()["machine"]["cores"] == os.cpu_count()
    (torch,) = [c for c in examine() if c["what"] == "torch"]
    assert f"{os.cpu_count()} available core" in torch["detail"]


def test_affinity_is_asked_for_in_one_place() -> None:
    users = [p for p in (ROOT / "src").rglob("*.py") if re.search(r"\bos\.sched_", p.read_text(encoding="utf-8"))]
    assert [p.name for p in users] == ["threads.py"]


def test_file_limit_that_is_refused_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits)
        if limits[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    _raise_file_limit()
    assert asked == [(resource.RLIM_INFINITY, resource.RLIM_INFINITY), (10_240, resource.RLIM_INFINITY)]


def test_calls_of_linux_stand_in_three_files() -> None:
    files = [p for p in CSRC.glob("*/*") if LINUX.search(re.sub(r"//.*", "", p.read_text(encoding="utf-8")))]
    # isa_amx.cpp is compiled for x86-64 only, where there are no wheels for other systems.
    assert {p.name for p in files} == {"isa.cpp", "isa_amx.cpp", "pool.cpp"}


@pytest.mark.skipif(COMPILER is None or shutil.which("nm") is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("name", ["isa.cpp", "pool.cpp"])
def test_without_linux_nothing_of_it_is_called(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.o"
    command = [str(COMPILER), "-std=c++20", "-U__linux__", "-Wall", "-Wextra", "-Wno-psabi", f"-I{CSRC}", "-c"]
    command.append(str(next(CSRC.glob(f"*/{name}"))))
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    symbols = subprocess.run(["nm", "--undefined-only", str(out)], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(?:sched_[gs]et\w+|getauxval)\b", symbols)  # libstdc++ itself yields and waits there
