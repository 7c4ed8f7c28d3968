"""The documentation site builds strictly, needs no other host, and its reference is the code's."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("zensical", reason="the site is built by Zensical: pip install '.[docs]'")
sys.path.insert(0, str(ROOT / "docs" / "site"))

import check
import diagrams
from pages import spaced


def test_site_builds_strictly_and_is_whole(tmp_path: Path) -> None:
    """One test, so that one worker builds it once."""
    command = [sys.executable, str(ROOT / "docs" / "site" / "build.py"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "out" / "site"
    assert check.faults(site) == []  # nothing is loaded from elsewhere, and links lead somewhere
    pages = {p: p.read_text(encoding="utf-8") for p in site.rglob("*.html")}
    assert "fonts.googleapis" not in "".join(pages.values())
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / "index.html" if str(path) == "index" else site / path / "index.html") in pages
    reference = {
        name: pages[site / "reference" / name / "index.html"] for name in ("command-line", "python", "formats")
    }
    assert all(words in reference["command-line"] for words in ("crelle quantize", "crelle bench gemv", "--override"))
    assert "Stream the continuation of a prompt" in reference["python"]
    assert "eeeeemmmmmzzzzzz" in reference["formats"]
    assert (site / "files" / "bench" / "results" / "h200-gemv.json").is_file()
    assert (site / "files" / "src" / "crelle" / "formats" / "bcq.py.txt").is_file()


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js from elsewhere"),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', "loads //cdn.example/x.css from elsewhere"),
        ('<a href="missing/">x</a>', "missing/ leads nowhere"),
        ('<a href="#missing">x</a>', "#missing leads nowhere"),
        ("<p>| a | <code>b</code> |</p>", "'| a | b |' was not rendered"),
    ],
)
def test_faults_are_found(tmp_path: Path, html: str, fault: str) -> None:
    (tmp_path / "index.html").write_text(html)
    assert check.faults(tmp_path) == [f"index.html: {fault}"]


def test_outside_links_and_good_anchors_are_no_faults(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="https://example.org">x</a><p id="y"></p><a href="#y">y</a>')
    assert check.faults(tmp_path) == []


def test_lists_and_tables_get_an_empty_line() -> None:
    assert spaced("Text:\n- one\n  more\n- two\n") == "Text:\n\n- one\n  more\n- two\n"
    assert spaced("Text:\n| a |\n|---|\n") == "Text:\n\n| a |\n|---|\n"
    assert spaced("```\ncode\n```\n| a |\n") == "```\ncode\n```\n\n| a |\n"
    assert spaced("```\nText:\n- one\n```\n") == "```\nText:\n- one\n```\n"


@pytest.mark.parametrize("name", diagrams.DRAWINGS)
def test_drawings_are_those_of_the_script(name: str) -> None:
    assert (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8") == diagrams.DRAWINGS[name]().svg()
