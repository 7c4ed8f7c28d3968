"""Figures as inline SVG that fills the width it is given: x in percent, y in pixels, so that text keeps its size.

Colours are classes (s0 … s9) of page.css, which has them for light and dark; shapes tell series apart without colour.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from statistics import median
from textwrap import wrap

from crelle.bench.report.figures import Figure, Point, Series, grouped, number
from crelle.bench.report.rows import OURS, PEER
from crelle.bench.report.scale import Scale, scale, tick_text
from crelle.bench.report.styles import Styles, colour, shape

_HEIGHT = 260
_LABEL, _LINE, _BAR = 46, 15, 24  # characters of a label's line, pixels of it and of a bar
_SHAPES = (
    "M0-4.2A4.2 4.2 0 1 1 0 4.2A4.2 4.2 0 1 1 0-4.2Z",  # circle
    "M-3.8-3.8H3.8V3.8H-3.8Z",
    "M0-4.8L4.6 3.6H-4.6Z",
    "M0-5L5 0L0 5L-5 0Z",
    "M0 4.8L4.6-3.6H-4.6Z",
)
_BEYOND = "M0-7L4-1H1.2V6H-1.2V-1H-4Z"  # an arrow


def draw(figure: Figure, styles: Styles) -> str:
    """Return a figure as SVG; `styles` are those of the whole page."""
    return _bars(figure) if figure.bars else _points(figure, styles)


def marker(style: int, peer: bool) -> str:
    """Return the path of a series' points; those of peers are hollow."""
    kind = f"s{colour(style)}" + " peer" * peer
    return f'<path class="{kind}" d="{_SHAPES[shape(style)]}"/>'


def legend(series: Sequence[Series], styles: Styles) -> str:
    items = (
        '<li><svg width="14" height="14" viewBox="-7 -7 14 14" aria-hidden="true">'
        f"{marker(styles[s.name], s.whose == PEER)}</svg>"
        f"{escape(s.name)}{' (peer)' if s.whose == PEER else ''}</li>"
        for s in series
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _points(figure: Figure, styles: Styles) -> str:
    points = [p for s in figure.series for p in s.points]
    level = [] if figure.level is None else [figure.level]
    x = scale(figure.x, [p.x for p in points], from_zero=figure.fit is not None)
    y = scale(figure.y, [*(p.y for p in points), *level], from_zero=figure.fit is not None)
    drawn = "".join(
        (
            *_grid(x, y),
            *_level(figure, y),
            *_fit(figure, x, y),
            *_lines(figure, x, y, styles),
            *_marks(figure, x, y, styles),
        )
    )
    title = escape(figure.title)
    return (
        f'{legend(figure.series, styles)}<p class="unit">{escape(figure.y.label)}</p><div class="plot">'
        f'<svg role="img" width="100%" height="{_HEIGHT}" overflow="visible"><title>{title}</title>{drawn}</svg></div>'
        f'<p class="unit right">{escape(figure.x.label)}</p>'
    )


def _grid(x: Scale, y: Scale) -> Iterator[str]:
    for tick in y.ticks:
        at = f"{_y(y, tick):.1f}"
        yield f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>'
        yield f'<text x="-8" y="{at}" dy="4" text-anchor="end">{tick_text(tick)}</text>'
    for tick in x.ticks:
        at = f"{100 * x.at(tick):.2f}%"
        yield f'<line class="tick" x1="{at}" x2="{at}" y1="{_HEIGHT}" y2="{_HEIGHT + 5}"/>'
        yield f'<text x="{at}" y="{_HEIGHT + 20}" text-anchor="middle">{tick_text(tick)}</text>'
    yield f'<line class="axis" x1="0" x2="100%" y1="{_HEIGHT}" y2="{_HEIGHT}"/>'


def _level(figure: Figure, y: Scale) -> Iterator[str]:
    if figure.level is not None:
        at = f"{_y(y, figure.level):.1f}"
        yield f'<line class="level" x1="0" x2="100%" y1="{at}" y2="{at}"/>'


def _fit(figure: Figure, x: Scale, y: Scale) -> Iterator[str]:
    """Draw the fitted line as far as it lies inside."""
    if (fit := figure.fit) and fit.slope > 0:
        first = max(x.low, (y.low - fit.intercept) / fit.slope)
        last = min(x.high, (y.high - fit.intercept) / fit.slope)
        (x1, y1), (x2, y2) = ((100 * x.at(v), _y(y, fit.intercept + fit.slope * v)) for v in (first, last))
        yield f'<line class="fit" x1="{x1:.2f}%" x2="{x2:.2f}%" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _lines(figure: Figure, x: Scale, y: Scale, styles: Styles) -> Iterator[str]:
    for series in figure.series:
        if series.joined:
            middle = medians(series.points)
            for (x1, y1), (x2, y2) in pairwise(middle):
                ends = (
                    f'x1="{100 * x.at(x1):.2f}%" x2="{100 * x.at(x2):.2f}%" y1="{_y(y, y1):.1f}" y2="{_y(y, y2):.1f}"'
                )
                yield f'<line class="s{colour(styles[series.name])} line{" peer" * (series.whose == PEER)}" {ends}/>'


def medians(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the median of y at each x, in the order of x."""
    by_x = grouped(points, lambda p: p.x)
    return [(at, median(p.y for p in by_x[at])) for at in sorted(by_x)]


def _marks(figure: Figure, x: Scale, y: Scale, styles: Styles) -> Iterator[str]:
    for series in figure.series:
        style = styles[series.name]
        for p in series.points:
            beyond = figure.y.most is not None and p.y > figure.y.most
            arrow = f'<path class="s{colour(style)}" d="{_BEYOND}"/>'
            path = arrow if beyond else marker(style, series.whose == PEER)
            place = f'x="{100 * x.at(p.x):.2f}%" y="{_y(y, min(p.y, figure.y.most or p.y)):.1f}"'
            yield f'<svg class="mark" {place} overflow="visible"><title>{escape(p.label)}</title>{path}</svg>'


def _y(y: Scale, value: float) -> float:
    return _HEIGHT * (1 - y.at(value))


def _bars(figure: Figure) -> str:
    """Draw labels above their bars: long ones fit on a phone too, in as many lines as they need."""
    most = figure.x.most or max(bar.value for bar in figure.bars)
    longest = max(min(bar.value, most) for bar in figure.bars)
    drawn, top = [], 0
    for bar in figure.bars:
        label = bar.label + (" (peer)" if bar.whose == PEER else "")
        for line in wrap(label, _LABEL, break_on_hyphens=False) or [""]:
            drawn.append(f'<text x="0" y="{top + 12}">{escape(line)}</text>')
            top += _LINE
        width, beyond = f"{80 * min(bar.value, most) / longest:.2f}%", " →" if bar.value > most else ""
        kind = "bar" if bar.whose == OURS else f"bar {bar.whose}"
        drawn.append(f'<rect class="{kind}" x="0" y="{top + 2}" width="{width}" height="12" rx="2"/>')
        drawn.append(f'<text class="value" x="{width}" dx="6" y="{top + 12}">{number(bar.value)}{beyond}</text>')
        top += _BAR
    return (
        f'<p class="unit">{escape(figure.x.label)}</p><svg role="img" width="100%" height="{top}">'
        f"<title>{escape(figure.title)}</title>{''.join(drawn)}</svg>"
    )
