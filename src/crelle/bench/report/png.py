"""The figures of the page as PNGs, for documents."""

import math
from pathlib import Path
from typing import Any

from crelle.bench.report.figures import Figure, number
from crelle.bench.report.rows import OURS, PEER
from crelle.bench.report.scale import scale, tick_text
from crelle.bench.report.styles import Styles, colour, shape
from crelle.bench.report.svg import medians
from crelle.plots import COLOURS, pyplot

_MARKERS = "os^Dv"
_LONGEST = 90


def draw_png(path: Path, figure: Figure, styles: Styles) -> None:
    """Draw a figure; `styles` are those of the whole page."""
    plt = pyplot()
    height = 1.2 + 0.3 * len(figure.bars) if figure.bars else 4.5
    drawing, axes = plt.subplots(figsize=(8, height), layout="constrained")
    if figure.bars:
        _bars(axes, figure)
    else:
        _points(axes, figure, styles)
    axes.set_title(_plain(figure.title), fontsize=10, wrap=True)
    drawing.savefig(path, dpi=110)
    plt.close(drawing)


def _points(axes: Any, figure: Figure, styles: Styles) -> None:
    most = figure.y.most or math.inf
    for series in figure.series:
        peer, tone = series.whose == PEER, f"C{colour(styles[series.name])}"
        style = {"color": tone, "label": _plain(series.name) + " (peer)" * peer}
        mark = {
            "marker": _MARKERS[shape(styles[series.name])],
            "markersize": 5,
            "fillstyle": "none" if peer else "full",
        }
        inside, beyond = ([p for p in series.points if (p.y > most) is over] for over in (False, True))
        axes.plot([p.x for p in inside], [p.y for p in inside], **style, **mark, linestyle="")
        for p in beyond:  # an arrow at the edge, with the value; the values of all below each other
            axes.plot(p.x, most, marker=r"$\uparrow$", markersize=9, color=tone, linestyle="")
            place = {"xytext": (6, -3 - 9 * len(axes.texts)), "textcoords": "offset points"}
            axes.annotate(number(p.y), (p.x, most), **place, fontsize=7, color=tone)
        if series.joined:
            axes.plot(*zip(*medians(series.points), strict=True), color=tone, linewidth=1, ls=":" if peer else "-")
    if figure.level is not None:
        axes.axhline(figure.level, color=COLOURS[1], linewidth=1, linestyle="--")
    values = [p.x for s in figure.series for p in s.points], [p.y for s in figure.series for p in s.points]
    level = [] if figure.level is None else [figure.level]
    x = scale(figure.x, values[0], from_zero=figure.fit is not None)
    y = scale(figure.y, [*values[1], *level], from_zero=figure.fit is not None)
    if figure.fit:
        axes.axline((0, figure.fit.intercept), slope=figure.fit.slope, color=COLOURS[1], linewidth=1.2)
    for axis, way, put in ((x, figure.x, "x"), (y, figure.y, "y")):
        getattr(axes, f"set_{put}scale")("log" if way.log else "linear")
        getattr(axes, f"set_{put}ticks")(axis.ticks, [tick_text(t) for t in axis.ticks])
        getattr(axes, f"set_{put}ticks")([], minor=True)
        getattr(axes, f"set_{put}lim")(axis.low, axis.high)
        getattr(axes, f"set_{put}label")(_plain(way.label))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _bars(axes: Any, figure: Figure) -> None:
    most = figure.x.most or math.inf
    colours = [{OURS: COLOURS[0], PEER: COLOURS[2]}.get(bar.whose, COLOURS[1]) for bar in figure.bars]
    drawn = axes.barh(range(len(figure.bars)), [min(bar.value, most) for bar in figure.bars], color=colours)
    axes.bar_label(drawn, [number(b.value) + " →" * (b.value > most) for b in figure.bars], padding=3, fontsize=8)
    axes.set_yticks(range(len(figure.bars)), [_plain(b.label) + " (peer)" * (b.whose == PEER) for b in figure.bars])
    axes.tick_params("y", labelsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(_plain(figure.x.label))


def _plain(text: str) -> str:
    """Return text in which matplotlib finds no formulas, and that leaves room for the chart."""
    short = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    return short.replace("$", r"\$")
