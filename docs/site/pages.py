"""Stages the pages of docs/ for the site: links that leave docs/ lead to copies, and Markdown is spaced out.

Pages are written for GitHub, where a link may name any file of the repository. The site has no repository behind it,
so each file that a page links to is copied to files/ (sources as .txt, which browsers show), a directory as the list
of its files. Python-Markdown, unlike GitHub, wants an empty line before a list or a table: it gets one.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RENAMED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
SHOWN = {".json", ".png", ".svg", ".txt"}  # what a browser shows as it is

LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FENCE = re.compile(r"^\s*```")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")


def stage(to: Path) -> None:
    """Write every page and picture below `to`, with copies of the files that the pages link to."""
    shutil.copytree(DOCS / "images", to / "images")
    for page in sorted(DOCS.rglob("*.md")):
        _write(page, to / page.relative_to(DOCS), to)
    for name, renamed in RENAMED.items():
        if name != "README.md":
            _write(ROOT / name, to / renamed, to)
    shutil.copyfile(Path(__file__).parent / "style.css", to / "style.css")


def _write(page: Path, staged: Path, to: Path) -> None:
    def elsewhere(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[1]
        source = (page.parent / path).resolve()
        if not source.exists():
            sys.exit(f"{page.relative_to(ROOT)}: {found[1]} leads nowhere")
        target = to / _place(source, to)
        return Path(os.path.relpath(target, staged.parent)).as_posix() + mark + anchor

    staged.parent.mkdir(parents=True, exist_ok=True)
    lines = spaced(page.read_text(encoding="utf-8"))
    staged.write_text(_outside_code(lines, lambda line: LINK.sub(elsewhere, line)), encoding="utf-8")


def _place(target: Path, to: Path) -> Path:
    """Return where a file of the repository lies on the site; copy it there if it is not one of the pages."""
    inside = target.relative_to(ROOT)
    if inside.as_posix() in RENAMED:
        return Path(RENAMED[inside.as_posix()])
    if target.is_relative_to(DOCS) and target.suffix in (".md", ".png", ".svg"):
        return target.relative_to(DOCS)
    place = Path("files") / (inside if inside.suffix in SHOWN else f"{inside}.txt")
    if not (to / place).exists():
        (to / place).parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            names = sorted(p.name for p in target.iterdir() if p.name != "__pycache__")
            (to / place).write_text("\n".join([f"{inside}/", *names]) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(target, to / place)
    return place


def spaced(text: str) -> str:
    """Return the text with an empty line before each list and table that follows a paragraph."""
    out: list[str] = []
    kind, fenced = "", False
    for line in text.splitlines():
        if FENCE.match(line):
            fenced, kind = not fenced, "code"
        elif not fenced:
            before, kind = kind, _kind(line, kind)
            if before and kind in ("list", "table") and kind != before:
                out.append("")
        out.append(line)
    return "\n".join(out) + "\n"


def _kind(line: str, before: str) -> str:
    """Return what a line belongs to: nothing (empty lines, headings), a list with its continuations, a table, text."""
    if not line.strip() or line.startswith("#"):
        return ""
    if ITEM.match(line):
        return "list"
    if line.startswith("|"):
        return "table"
    return before if before == "list" else "text"


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    lines, fenced = text.splitlines(), False
    for i, line in enumerate(lines):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            lines[i] = change(line)
    return "\n".join(lines) + "\n"
