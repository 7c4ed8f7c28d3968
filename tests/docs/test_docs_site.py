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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, str(ROOT / "docs" / "site" / "build.py"), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "site"


def text(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_elsewhere_and_links_lead_somewhere(site: Path) -> None:
    assert check.faults(site) == []
    assert "fonts.googleapis" not in "".join(p.read_text(encoding="utf-8") for p in site.rglob("*.html"))


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = [p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")]
    wanted = [site / "index.html" if str(p) == "index" else site / p / "index.html" for p in pages]
    assert [p for p in wanted if not p.is_file()] == []


def test_reference_lists_commands_names_and_formats(site: Path) -> None:
    commands = text(site, "reference/command-line")
    assert all(f"crelle {name}</h" in commands or f">crelle {name}<" in commands for name in ("quantize", "bench gemv"))
    assert "--override" in commands
    assert "Stream the continuation of a prompt" in text(site, "reference/python")
    assert "eeeeemmmmmzzzzzz" in text(site, "reference/formats")


def test_linked_sources_and_results_are_on_the_site(site: Path) -> None:
    assert (site / "files" / "bench" / "results" / "h200-gemv.json").is_file()
    assert (site / "files" / "src" / "crelle" / "formats" / "bcq.py.txt").is_file()


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js from elsewhere"),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', "loads //cdn.example/x.css from elsewhere"),
        ('<a href="missing/">x</a>', "missing/ leads nowhere"),
        ('<a href="#missing">x</a>', "#missing leads nowhere"),
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
    assert spaced("```\nText:\n- one\n```\n") == "```\nText:\n- one\n```\n"


@pytest.mark.parametrize("name", diagrams.DRAWINGS)
def test_drawings_are_those_of_the_script(name: str) -> None:
    assert (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8") == diagrams.DRAWINGS[name]().svg()
