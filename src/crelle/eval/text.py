"""Texts to measure on: files, or the prose of Python's own documentation, which every machine has."""

from pathlib import Path

from crelle.errors import FormatError
from crelle.quantize_job.data import python_documentation

__all__ = ["python_documentation", "read_text"]


def read_text(path: Path | None) -> str:
    """Return a file's text, or Python's documentation when no file is named."""
    if path is None:
        return python_documentation()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise FormatError(f"{path} does not exist; give a UTF-8 text file") from e
    except (OSError, UnicodeDecodeError) as e:
        raise FormatError(f"{path} cannot be read as UTF-8 text: {e}") from e
    if not text.strip():
        raise FormatError(f"{path} is empty")
    return text
