"""The page: well-formed, self-contained, the same bytes for the same files, and nothing of a file is taken as HTML."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from crelle.bench.planner.cost import CostModel
from crelle.bench.report.contents import figures, headlines, not_drawn, sections
from crelle.bench.report.figures import Axis, Figure, fit_line
from crelle.bench.report.page import page
from crelle.bench.report.readers import find, read
from crelle.bench.report.rows import LeftOut, Quality, Row, Source, Step
from crelle.bench.report.scale import scale, tick_text
from crelle.bench.report.styles import colour, shape, styles

RESULTS = Path(__file__).parents[3] / "bench" / "results"
VOID = {"meta", "br"}


class Checked(HTMLParser):
    """Follows tags and their ends, and collects what a browser would look up."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "data", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made(rows: list[Row], left_out: list[LeftOut] | None = None) -> str:
    return page("Report", headlines(rows), sections(rows), left_out or [])


def test_page_of_all_results_is_well_formed_and_self_contained() -> None:
    rows, left_out = read(find([str(RESULTS)]))
    text = made(rows, left_out)
    checked = Checked(text)
    assert checked.seen >= {"figure", "svg", "table", "details", "style"}
    assert not checked.seen & {"script", "link", "img", "iframe", "object"}
    assert all(link.startswith("#") for link in checked.links)
    assert {link[1:] for link in checked.links} <= set(checked.ids)
    assert len(checked.ids) == len(set(checked.ids))
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    for what in ("Perplexity over bits", "Latency over bytes", "Throughput over batch", "Energy per token", "Cost of"):
        assert what in text
    assert all(f.file in text for f in left_out)
    assert {r.source.file for r in rows} <= set(re.findall(r"[\w.-]+\.json", text))
    assert not_drawn(rows, sections(rows)) == []


def test_charts_come_before_the_table_of_the_best() -> None:
    text = made([quality(2, 1.5)])
    assert text.index("<svg") < text.index('<h2 id="best-of-each-kind">')
    assert '<a href="#best-of-each-kind">' in text


def test_a_scheme_has_one_colour_in_all_figures_and_none_has_it_twice() -> None:
    rows, _ = read(find([str(RESULTS)]))
    drawn = figures(sections(rows))
    found = styles(drawn)
    text = made(rows)
    for name in ("rtn", "bcq", "gptq"):
        looks = set(re.findall(rf'aria-hidden="true">(<path [^>]*>)</svg>{name}</li>', text))
        assert len(looks) == 1, looks
    for figure in drawn:
        names = {s.name for s in figure.series}
        assert len({found[n] for n in names}) == len(names)
        assert len({colour(found[n]) for n in names}) >= min(len(names), 10)
    assert len({(colour(i), shape(i)) for i in range(50)}) == 50


def test_costs_name_their_currency() -> None:
    (figure,) = (f for f in figures(sections([replace(step(cost=3.0), currency="EUR")])) if f.name.startswith("cost"))
    assert figure.x.label == "EUR per million tokens"
    (line,) = (h for h in headlines([step(cost=3.0), replace(step(cost=4.0), scheme="fp16")]) if "million" in h.what)
    assert (line.value, line.against) == ("3 USD (rtn)", "full precision: 4 USD (fp16)")


def test_rows_of_every_class_are_in_a_table() -> None:
    """Rows by file: as many lines in tables as rows, or more where a row stands in two figures."""
    rows, _ = read(find([str(RESULTS)]))
    lines = Counter(line[-1] for figure in figures(sections(rows)) for line in figure.table)
    short = {file: count for file, count in Counter(r.source.file for r in rows).items() if lines[file] < count}
    assert short == {}


def test_file_with_full_precision_alone_is_named() -> None:
    rows: list[Row] = [quality(16, 1.0, "fp16")]
    (left_out,) = not_drawn(rows, sections(rows))
    assert "full precision alone" in left_out.reason


def test_same_files_give_the_same_bytes_in_any_order() -> None:
    files = find([str(RESULTS / "h200-*.json")])
    again = find([str(file) for file in reversed(files)])
    assert made(*read(files)) == made(*read(again))


SOURCE = Source('<b>"f".json', "crelle </code><script>alert(1)</script>", "2026-01-02", "a <machine> & more")


def test_what_files_say_is_escaped() -> None:
    evil = '</svg><script>x</script>"&'
    rows: list[Row] = [
        Quality(SOURCE, evil, evil, evil, 2.0 + i, 1.5, None, who) for i, who in enumerate(("", evil, ""))
    ]
    rows.append(Step(SOURCE, evil, evil, evil, evil, 1, 5.0, joules=1.0))
    text = made(rows, [LeftOut(evil, evil)])
    assert "script" not in Checked(text).seen
    assert "<b>" not in text
    assert "<machine>" not in text


def quality(bits: float, ratio: float, scheme: str = "rtn") -> Quality:
    return Quality(replace(SOURCE, file="a.json"), "m", "t", scheme, bits, ratio)


@pytest.mark.parametrize("rows", [[quality(2, 1.5)], [quality(2, 1.0)], [quality(2, 1e9)], [quality(2, 1.5)] * 2])
def test_single_and_equal_points_are_drawn(rows: list[Row]) -> None:
    Checked(made(rows))


def test_points_beyond_the_axis_are_arrows_and_said_so() -> None:
    (figure,) = figures(sections([quality(2, 1e4), quality(4, 1.1)]))
    assert "Arrows: above 6" in figure.caption
    assert "10,000" in made([quality(2, 1e4)])


def test_only_kinds_that_are_there_are_shown() -> None:
    text = made([quality(2, 1.5)])
    assert "Perplexity over bits" in text
    assert "Latency" not in text
    assert "Left out" not in text


def test_fitted_line_is_least_squares() -> None:
    fit = fit_line([(1, 3), (2, 5), (3, 7)])
    assert fit is not None
    assert (round(fit.intercept, 9), round(fit.slope, 9), round(fit.r2, 9), fit.count) == (1, 2, 1, 3)
    noisy = fit_line([(0, 0), (1, 1), (2, 0)])
    assert noisy is not None
    assert noisy.r2 == 0
    assert fit_line([(1, 2), (1, 3)]) is None
    assert fit_line([(1, 2), (2, 2)]) is None


def test_latency_of_12288_on_the_h200_lies_on_a_line() -> None:
    """Bits of 2 to 4 at one group; the pairs with other groups are measured by `make bench-gpu`."""
    rows, _ = read(find([str(RESULTS / "h200-gemv.json")]))
    fits = {f.title: f.fit for f in figures(sections(rows))}
    fit = fits["Latency over bytes: 12288 x 12288, NVIDIA H200"]
    assert fit is not None
    assert fit.r2 >= 0.97


def step(**values: float | None) -> Step:
    return Step(SOURCE, "G", "m", "rtn", "", 1, 100.0, 1e9, **values)  # type: ignore[arg-type]


def test_cost_is_the_files_or_by_the_prices_given() -> None:
    def bars(rows: list[Row], prices: CostModel | None) -> list[float]:
        return [bar.value for f in figures(sections(rows, prices)) if f.name.startswith("cost") for bar in f.bars]

    prices = CostModel.parse("price=0,kwh=1,watt=1000")
    assert bars([step(cost=3.0)], None) == [3.0]
    assert bars([step(cost=3.0)], prices) == pytest.approx([1e4 / 3600])
    measured = CostModel.parse("price=0,kwh=1")
    assert bars([step(joules=20.0)], measured) == pytest.approx([2e4 / 3600])
    assert bars([step(cost=3.0)], measured) == []  # neither given nor measured


def test_same_names_are_numbered() -> None:
    rows: list[Row] = [replace(quality(2, 1.5), model=name) for name in ("µ", "λ")]
    names = [f.name for f in figures(sections(rows))]
    assert len(set(names)) == 2


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [1.0, 1.05], [0.001, 5.0], [3.0, 1e7], [226.0, 16459.0]])
def test_scales_hold_their_values_and_have_few_ticks(log: bool, values: list[float]) -> None:
    made = scale(Axis("", log=log), values)
    assert all(0 <= made.at(v) <= 1 for v in values)
    assert 1 <= len(made.ticks) <= 7
    assert all(-1e-9 <= made.at(t) <= 1 + 1e-9 for t in made.ticks)
    assert len({tick_text(t) for t in made.ticks}) == len(made.ticks)


def test_figures_are_drawn_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from crelle.bench.report.png import draw_png

    rows, _ = read(find([str(RESULTS / name) for name in ("h200-gemv.json", "cpu-decode-4bit.json", "cpu-vllm.json")]))
    drawn: list[Figure] = figures(sections(rows))
    assert {bool(f.bars) for f in drawn} == {True, False}
    for figure in drawn[:1] + drawn[-1:]:
        draw_png(tmp_path / "f.png", figure, styles(drawn))
        assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_odd_names_become_pictures_and_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from crelle.bench.report.png import draw_png

    odd = r"$\frac$ " + "x" * 5000
    rows: list[Row] = [replace(quality(2, 1e4), model=odd, scheme=odd), step(joules=1.0), step(joules=2.0)]
    for figure in figures(sections([replace(r, model=odd) for r in rows])):
        assert len(figure.name) < 200
        draw_png(tmp_path / f"{figure.name}.png", replace(figure, title=r"$\frac$"), styles([figure]))


def test_page_names_no_place_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"rows": [1]}))
    assert str(tmp_path) not in made([quality(2, 1.5)], read([file])[1])
