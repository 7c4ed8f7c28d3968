"""What git says of a change to kernel sources."""

import subprocess
from pathlib import Path

import pytest
from changed_sources import changed_sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository on its main branch; the folder of sources lies below its root."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    git(tmp_path, "init", "-q", "-b", "main")
    (csrc / "old.cu").write_text("int x;")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return csrc


def git(where: Path, *args: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *args], cwd=where, check=True, capture_output=True)


def test_on_the_main_branch_nothing_changed(folder: Path) -> None:
    assert changed_sources(folder) == set()


def test_on_a_branch_all_its_commits_count(folder: Path) -> None:
    git(folder, "checkout", "-q", "-b", "work")
    (folder / "old.cu").write_text("int y;")
    git(folder, "commit", "-q", "-a", "-m", "one")
    (folder / "more.cuh").write_text("int z;")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "two")
    assert changed_sources(folder) == {"old.cu", "more.cuh"}


def test_what_is_not_committed_counts(folder: Path) -> None:
    (folder / "old.cu").write_text("int y;")
    (folder / "new.cu").write_text("int z;")
    (folder.parent / "elsewhere.py").write_text("")
    assert changed_sources(folder) == {"old.cu", "new.cu"}


def test_without_a_repository_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert changed_sources(tmp_path) is None
