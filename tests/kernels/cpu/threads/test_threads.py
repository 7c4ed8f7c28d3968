"""How many threads may be asked for, by every command that takes the option."""

import os
from pathlib import Path

import pytest
from in_process import run

from crelle.errors import SchemeError
from crelle.kernels import cpu
from crelle.kernels.threads import available_cores, check_threads, max_threads, set_threads

COMMANDS = (
    "generate {m} --prompt x",
    "chat {m}",
    "eval {m}",
    "serve {m}",
    "quantize {m} {out} --scheme rtn:bits=4,group=32",
    "search {m} --target-bits 3 --out {out}",
    "tune {m} {out}",
    "bench gemv --shape 8x8 --scheme rtn:bits=4,group=8 --device cpu",
    "bench decode {m} --device cpu",
    "bench serve {m}",
    "bench accuracy {m}",
    "bench attention",
    "demo",
)


@pytest.mark.parametrize(("quota", "cores"), [(None, 64), (2, 2), (100, 64)])
def test_a_quota_of_cpu_time_counts(quota: int | None, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr("crelle.kernels.threads.cpu_quota", lambda: quota)
    assert available_cores() == cores


@pytest.mark.skipif(cpu.available() is not None, reason="the extension is not built")
@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize(("quota", "threads"), [(None, 64), (3, 3), (100, 64)])
def test_the_pool_of_a_process_that_sets_no_number_keeps_to_it(
    quota: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of transformers, say: nobody calls set_threads there."""
    core = cpu.core()
    core.set_threads(64)  # what the mask of a large machine would give
    monkeypatch.setattr(cpu, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu, "_load_from", lambda _: core)
    monkeypatch.setattr(cpu, "import_module", lambda _: core)
    assert cpu._load.__wrapped__().threads() == threads


def test_as_many_as_there_are_cores_and_some_more() -> None:
    assert max_threads() >= max(256, 4 * available_cores())
    assert check_threads(max_threads()) == max_threads()


@pytest.mark.parametrize("threads", [0, -1, 100_000, 2**40])
def test_senseless_numbers_are_refused_before_a_thread_is_started(threads: int) -> None:
    with pytest.raises(SchemeError, match=rf"threads must be at .*, got {threads}"):
        set_threads(threads)


@pytest.mark.parametrize("command", COMMANDS)
def test_100_000_threads_are_a_sentence(command: str, tiny_model: Path, tmp_path: Path) -> None:
    words = command.format(m=tiny_model, out=tmp_path / "out").split()
    done = run(*words, "--threads", 100_000)
    assert done.code == 2, done.err
    assert f"threads must be at most {max_threads()} on this machine, got 100000" in " ".join(done.err.split())
