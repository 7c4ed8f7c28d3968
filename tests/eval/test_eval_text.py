"""The text that is evaluated on: Python's documentation, or a file."""

import sys
from pathlib import Path

import pytest

from crelle.errors import FormatError
from crelle.eval.text import python_documentation, read_text


def test_documentation_of_python_is_long_prose() -> None:
    text = python_documentation()
    assert len(text) > 100_000
    assert "The Python" in text
    assert text == python_documentation() == read_text(None)


def test_python_without_documentation_asks_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FormatError, match="give a text file"):
        python_documentation()


def test_file_is_read_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("naïve 漢字\n".encode())
    assert read_text(tmp_path / "text.txt") == "naïve 漢字\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "does not exist"), (b"\xff\xfe\x00", "cannot be read as UTF-8 text"), (b"", "is empty"), (b" \n", "empty")],
)
def test_file_without_text_is_refused(content: bytes | None, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FormatError, match=sentence) as e:
        read_text(file)
    assert str(file) in str(e.value)


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read as UTF-8 text"):
        read_text(tmp_path)
