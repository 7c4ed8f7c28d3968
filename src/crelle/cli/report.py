"""crelle report: one page of what was measured."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.cli.console import Json, out, print_json, warn
from crelle.errors import FormatError

if TYPE_CHECKING:
    from crelle.bench.report.figures import Figure

NAME = "report"


def run(
    results: Annotated[
        list[str],
        typer.Argument(metavar="RESULTS", help="Result files, directories of them, or patterns such as 'h200-*.json'."),
    ],
    to: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option("--png", help="Also draw each figure as a PNG into this directory.")
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost",
            help="Cost of a million decoded tokens by price=30000[,watt=700][,kwh=0.09][,years=5]; without watt the "
            "measured power counts.",
        ),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Of the page.")] = "Crelle: what was measured",
    json: Json = False,
) -> None:
    """Draw what benchmarks wrote as one self-contained HTML page: light and dark, for phones and desktops.

    It shows perplexity over bits, latency over bytes, throughput over batch, energy and cost per token, each only where
    a file has it, with a table of all rows, and command, machine, date and file below. A file that is broken or of
    another kind is listed with the reason, on the page and on standard error. The same files give the same bytes.

    **Example**: `crelle report bench/results -o report.html --png out/figures`

    **Example**: `crelle report 'bench/results/h200-decode-*.json' --cost price=30000`
    """
    from crelle.bench.cost import CostModel
    from crelle.bench.report.contents import figures, headlines, not_drawn, sections
    from crelle.bench.report.page import page
    from crelle.bench.report.readers import find, read
    from crelle.formats.io import write_whole, writing

    prices = CostModel.parse(cost) if cost else None
    rows, left_out = read(find(results))
    parts = sections(rows, prices)
    left_out += not_drawn(rows, parts)
    warn(f"left out: {file.reason}" for file in left_out)
    drawn = figures(parts)
    if not drawn:
        raise FormatError(f"none of the {len(left_out)} files holds anything that the report shows")
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
        f"{to}: {len(drawn)} figures, {len(left_out)} files or rows left out",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _draw_all(directory: Path, drawn: "list[Figure]") -> None:
    from crelle.bench.report.png import draw_png
    from crelle.cli.console import draw_whole
    from crelle.formats.io import writing

    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        draw_whole(directory / f"{figure.name}.png", lambda path, figure=figure: draw_png(path, figure))  # type: ignore[misc]
