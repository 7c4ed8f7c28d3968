"""What the documentation names exists: links and their anchors, paths of files, commands and options of crelle."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from crelle.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w./-])(?:src|tests|bench|docs|examples|release)/[\w/.{},*-]*\w[\w}*]*")
DOCS_PATH = re.compile(r"\bdocs/[\w/-]+\.md")
SOURCE = re.compile(r"`([\w/{},]+\.(?:py|cu|cuh|h|cpp))`")
FOLDERS = ("src", "tests", "bench", "examples", "release")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(crelle [^`]+)`")


def pages() -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = (re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return set(heads)


@pages()
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pages()
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = [form for path in NAMED.findall(page.read_text(encoding="utf-8")) for form in braces(path.rstrip("./"))]
    # An option takes the name of a result without its ending.
    missing = [p for p in named if not any(ROOT.glob(f"{p}.*" if "results/" in p and "." not in p else p))]
    assert missing == []


@pages()
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    files = [f"/{p.relative_to(ROOT)}" for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    named = [form for name in SOURCE.findall(page.read_text(encoding="utf-8")) for form in braces(name)]
    assert [name for name in named if "NAME" not in name and not any(f.endswith(f"/{name}") for f in files)] == []


def braces(path: str) -> list[str]:
    """Return the paths of a{b,c}d."""
    if not (found := re.search(r"\{([^}]*)\}", path)):
        return [path]
    return [p for some in found[1].split(",") for p in braces(path[: found.start()] + some + path[found.end() :])]


def test_every_page_that_the_tree_names_exists() -> None:
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*")]
    sources = [p for p in files if p.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".html")]
    named = {(path, p) for p in sources for path in DOCS_PATH.findall(p.read_text(encoding="utf-8"))}
    assert named
    assert [f"{path} in {p.relative_to(ROOT)}" for path, p in sorted(named) if not (ROOT / path).is_file()] == []


def commands() -> dict[tuple[str, ...], set[str]]:
    """Return the options of every command."""
    found: dict[tuple[str, ...], set[str]] = {}

    def walk(command: Any, path: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*path, name))
        found[path] = {"--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}

    walk(typer.main.get_command(app), ())
    return found


KNOWN = commands()


def calls(page: Path) -> list[list[str]]:
    """Return the words of every call of crelle in a page's code."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    found = [m[1] for line in lines if (m := re.match(r"(?:\$ )?crelle (.*)", line.strip()))]
    found += [call.removeprefix("crelle ") for call in INLINE.findall(FENCE.sub("", text))]
    return [words for call in found if (words := split(call.split("  #")[0])) and re.match("[a-z]", words[0])]


def split(call: str) -> list[str]:
    try:
        return shlex.split(call)
    except ValueError:
        return call.split()


@pages()
def test_every_command_and_option_exists(page: Path) -> None:
    wrong = []
    for words in calls(page):
        path = next((tuple(words[:n]) for n in (2, 1) if tuple(words[:n]) in KNOWN), None)
        options = {w.partition("=")[0] for w in words if w.startswith("--")}
        if any("|" in word for word in words[:2]):  # several commands at once
            continue
        if path is None:
            wrong.append(" ".join(words))
        elif unknown := options - KNOWN[path]:
            wrong.append(f"crelle {' '.join(path)} has no {', '.join(sorted(unknown))}")
    assert wrong == []


def test_commands_are_found() -> None:
    assert sum(len(calls(page)) for page in PAGES) > 30
