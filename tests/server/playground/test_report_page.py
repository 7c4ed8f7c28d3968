"""The report in a real browser, which the playground's tests have: nothing is cut off, nothing is asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import launched
from playwright.sync_api import Browser

from crelle.bench.report.contents import headlines, sections
from crelle.bench.report.page import page
from crelle.bench.report.readers import find, read

RESULTS = Path(__file__).parents[3] / "bench" / "results"
# Marks, labels and cells whose right edge lies outside of the window, those of tables that scroll excepted.
CUT_OFF = """() => [...document.querySelectorAll("svg text, svg path, h3, li, p, td")]
  .filter(e => !e.closest("figure .wide") && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.textContent)"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows, left_out = read(find([str(RESULTS)]))
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page("Report", headlines(rows), sections(rows), left_out), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_and_asks_for_nothing(browser: Browser, report: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
    tab, asked, said = context.new_page(), [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(report.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(CUT_OFF) == []
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"
    assert dark == (scheme == "dark")
    assert (asked, said) == ([report.as_uri()], [])
    context.close()
