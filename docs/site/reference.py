"""The reference pages, written from the code: the command line, the Python API, the formats' own docstrings.

docs/reference/*.md hold the introductions; what is written here goes where they say `<!-- generated -->`.
"""

from importlib import import_module
from pathlib import Path

import reference_command_line
import reference_python
from pages import spaced

MARK = "<!-- generated -->"
FORMATS = {
    "bcq": "bcq.svg",
    "affine": "format-nested.svg",
    "mixed": "format-mixed.svg",
    "grouped": "format-atom.svg",
    "activations": None,
    "kv.pages": "format-kv.svg",
    "wrappers.composite": None,
    "dense": None,
}


def write(pages: Path) -> None:
    """Fill in the staged pages of the reference."""
    _fill(pages / "command-line.md", reference_command_line.text())
    _fill(pages / "python.md", reference_python.text())
    _fill(pages / "formats.md", "\n".join(_format(name, picture) for name, picture in FORMATS.items()))


def _fill(page: Path, text: str) -> None:
    introduction = page.read_text(encoding="utf-8")
    assert MARK in introduction, f"{page.name} has no place for what is generated"
    page.write_text(introduction.split(MARK)[0] + spaced(text), encoding="utf-8")


def _format(name: str, picture: str | None) -> str:
    """Return the docstring of a module of crelle.formats as it stands there: its columns are aligned."""
    title, _, body = (import_module(f"crelle.formats.{name}").__doc__ or "").strip().partition("\n")
    drawn = f"![{title}](../images/{picture})\n\n" if picture else ""
    return f"## crelle.formats.{name}\n\n{title}\n\n{drawn}```text\n{body.strip(chr(10))}\n```\n"
