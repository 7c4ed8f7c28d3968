"""Start-up: true processes, timed from outside; the watch sees all parts and changes nothing."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from crelle import quantize
from crelle.bench import import_timer, startup
from crelle.errors import SchemeError, UnsupportedError


def test_parts_lie_within_the_whole(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=24")
    seen = []
    m = startup.measure(tmp_path / "q", repeat=1, progress=lambda *what: seen.append(what[:2]))
    assert (m.model, m.repeat, seen) == ("q", 1, [(1, 2), (2, 2)])
    assert m.starts == (m.first_token_seconds,)
    assert 0 < m.first_token_seconds == m.first_token_seconds_median < m.process_seconds
    assert all(seconds >= 0 for seconds in m.parts.values())
    assert all(m.parts[part] > 0 for part in ("interpreter", "command line", "torch", "prepare", "tokenizer"))
    assert max(m.parts, key=lambda part: m.parts[part]) == "torch"


def test_a_model_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(UnsupportedError, match="nowhere does not exist"):
        startup.measure(Path("nowhere"))


@pytest.mark.parametrize(("module", "functions"), import_timer.CALLS.items())
def test_what_is_timed_exists(module: str, functions: tuple[str, ...]) -> None:
    """A renamed function would not be timed, and nobody would notice."""
    for function in functions:
        found: object = import_module(module)
        for name in function.split("."):
            found = getattr(found, name)
        assert callable(found)


def test_no_run_is_a_sentence() -> None:
    with pytest.raises(SchemeError, match="--repeat"):
        startup.measure(Path("nowhere"), repeat=0)


def test_the_watch_reports_even_when_the_command_fails() -> None:
    command = [sys.executable, "-m", "crelle.bench.import_timer", "crelle.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said, spent = done.stdout.splitlines()
    assert said.startswith("crelle ")
    assert json.loads(spent).keys() == {"begun", "crelle.cli.main"}
