"""Random changes to what loaders read: a loader gives a model or one sentence, quickly and in little memory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fuzz import Report, fuzz
from targets import TARGETS


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is such a thing: most inputs are written to it."""
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
    report = run(name, scratch, 2000, seed=1)
    assert report.kept > 2 * report.seeds, "no input reached anything new"
    assert 0 < report.accepted < report.inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_200_000_changed_inputs_are_read_or_refused_with_a_sentence(name: str, scratch: Path) -> None:
    report = run(name, scratch, 200_000, seed=2)
    print(name, report)
    assert report.inputs == 200_000
