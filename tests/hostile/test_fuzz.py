"""Random changes to what loaders read: a loader gives a model or one sentence, quickly and in little memory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fuzz import FindingError, Report, fuzz
from mutate import MAX_DEPTH, changed
from targets import TARGETS

from crelle.errors import FormatError

SLOW = {"tokenizer", "checkpoint", "model", "task", "journal"}  # a few inputs a millisecond at best


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory, where there is such a thing: most inputs are written to it."""
    monkeypatch.setenv("RUST_BACKTRACE", "0")  # a backtrace takes a hundred times as long as an input
    memory = Path("/dev/shm")
    to = Path(tempfile.mkdtemp(prefix="crelle-fuzz-", dir=memory if memory.is_dir() else None))
    yield to
    shutil.rmtree(to)


def run(name: str, scratch: Path, count: int, seed: int) -> Report:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (scratch / name).mkdir()
    target = TARGETS[name](scratch / name)
    try:
        return fuzz(target.run, target.seeds, count, seed, target.words)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_read_or_refused_with_a_sentence(name: str, scratch: Path) -> None:
    report = run(name, scratch, 40 if name in SLOW else 80, seed=1)
    assert report.kept > report.seeds, "no input reached anything new"
    assert 0 < report.accepted < report.inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_20_000_changed_inputs_are_read_or_refused_with_a_sentence(name: str, scratch: Path) -> None:
    """run_fuzz.py runs ten times as many, with many processes."""
    report = run(name, scratch, 20_000, seed=2)
    assert report.inputs == 20_000


SEED = {"shape": [8, 24], "group": 8, "name": "rtn:bits=4,layers.0-7=8", "steps": [{"type": "a"}]}


def inputs(count: int) -> list[Any]:
    random = Random(3)
    return [changed(random, [SEED], ["x", 1]) for _ in range(count)]


def test_inputs_are_decided_by_the_seed() -> None:
    assert inputs(200) == inputs(200)


def test_numbers_grow_alone_together_and_inside_strings() -> None:
    found = [v for v in inputs(3000) if isinstance(v, dict)]

    def group(v: dict[str, Any]) -> Any:
        return v.get("group")

    assert any(type(group(v)) is int and group(v) >= 10**9 for v in found)
    assert any(type(group(v)) is int and group(v) > 2**16 and v.get("shape") == [group(v), 24] for v in found)
    assert any(isinstance(v.get("name"), str) and "layers.0-1000" in v["name"] for v in found)
    assert any(isinstance(v.get("steps"), list) and len(v["steps"]) > 4000 for v in found)


def test_nesting_is_deep_but_never_too_deep_for_json() -> None:
    def depth(value: Any) -> int:
        levels = 0
        level = [value]
        while level:
            level = [v for h in level if isinstance(h, dict | list) for v in (h.values() if type(h) is dict else h)]
            levels += 1
        return levels

    depths = [depth(v) for v in inputs(3000)]
    assert 200 < max(depths) <= MAX_DEPTH + 10


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda: bytearray(1200 << 20), "1[12][0-9][0-9] MB"),
        (lambda: torch.empty(10 << 30, dtype=torch.uint8), "RuntimeError.*allocate"),
        (lambda: {}["x"], "KeyError"),
        (lambda: [None] * 10**12, "MemoryError"),
    ],
)
@pytest.mark.sample(2)
def test_a_finding_names_the_input_that_made_it(fault: Any, words: str) -> None:
    def target(value: int) -> None:
        if value == 7:
            fault()

    with pytest.raises(FindingError, match=f"input 7: .*{words}.* for 7"):
        fuzz(target, list(range(20)), 20)


def test_an_allocation_that_failed_under_a_sentence_is_a_finding() -> None:
    def target(_: int) -> None:
        try:
            bytearray(10 << 30)
        except MemoryError as e:
            raise FormatError("the file is broken") from e

    with pytest.raises(FindingError, match="MemoryError under a sentence"):
        fuzz(target, [1], 1)
