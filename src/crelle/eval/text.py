"""Text that every machine has: the prose of Python's own documentation."""

from pathlib import Path

from crelle.errors import FormatError


def python_documentation() -> str:
    """Return the language reference that CPython ships for `help()`, topic after topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise FormatError("this Python has no pydoc_data.topics; give a text file") from e
    return "\n\n".join(topics[name] for name in sorted(topics))


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
