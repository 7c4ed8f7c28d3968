"""crelle report: one page of what was measured."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.cli.common.console import Json, out, print_json, warn
from crelle.errors import FormatError

if TYPE_CHECKING:
    from crelle.bench.report.figures import Figure
    from crelle.bench.report.rows import LeftOut

NAME = "report"
_FEW = 3  # warnings that are printed one by one


def run(
    results: Annotated[
        list[str],
        typer.Argument(metavar="RESULTS", help="Result files, directories of them, or patterns such as 'h200-*.json'."),
    ],
    to: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option("--png", help="Also write each figure as a PNG into this directory.")
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost",
            help="Prices for the cost per million decoded tokens: "
            "price=30000[,watt=700][,kwh=0.09][,years=5][,currency=USD]; default power: the measured one.",
        ),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Title of the page.")] = "Crelle: what was measured",
    json: Json = False,
) -> None:
    """Write benchmark results as one self-contained HTML page: light and dark, for phones and desktops.

    The page shows perplexity over bits, latency over bytes, throughput over batch, and energy and cost per token, if
    the files have them. Below each chart is a table of all rows with command, machine, date and file. One table lists
    the best result of each kind. Invalid files and files of another kind are listed at the end with the reason. The
    same files produce the same bytes.

    **Example**: `crelle report bench/results -o report.html --png out/figures`

    **Example**: `crelle report 'bench/results/h200-decode-*.json' --cost price=30000`
    """
    from crelle.bench.planner.cost import CostModel
    from crelle.bench.report.contents import figures, headlines, not_drawn, sections
    from crelle.bench.report.page import page
    from crelle.bench.report.readers import find, read
    from crelle.formats.storage.io import write_whole, writing

    prices = CostModel.parse(cost) if cost else None
    rows, left_out = read(find(results))
    parts = sections(rows, prices)
    left_out += not_drawn(rows, parts)
    warn(_summary(left_out))
    drawn = figures(parts)
    if not drawn:
        raise FormatError(f"none of the {len(left_out)} files contains a result that the report can show")
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
    if png:
        _draw_all(png, drawn)
    write_whole(to, page(title, headlines(rows, prices), parts, left_out).encode(errors="replace"))
    if json:
        names = [figure.name for figure in drawn]
        print_json({"page": str(to), "figures": names, "left_out": [asdict(file) for file in left_out]})
        return
    out.print(
        f"{to}: {len(drawn)} figures, {len(left_out)} files or rows skipped",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _summary(left_out: "list[LeftOut]") -> list[str]:
    """Return the reasons if they are few, or how many there are and where to read them."""
    if len(left_out) <= _FEW:
        return [f"skipped: {file.reason}" for file in left_out]
    return [f"skipped {len(left_out)} files or rows; the page ('Left out') and --json list the reasons"]


def _draw_all(directory: Path, drawn: "list[Figure]") -> None:
    from crelle.bench.report.png import draw_png
    from crelle.bench.report.styles import styles
    from crelle.cli.common.console import draw_whole
    from crelle.formats.storage.io import writing

    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    looks = styles(drawn)
    for figure in drawn:
        draw_whole(directory / f"{figure.name}.png", lambda path, figure=figure: draw_png(path, figure, looks))  # type: ignore[misc]
