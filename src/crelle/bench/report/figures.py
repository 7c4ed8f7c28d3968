"""What a figure is, before it is drawn: points or bars, a table of all of them, and where they come from."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from crelle.bench.report.rows import OURS, REFERENCE, Row, Source

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_LONGEST = 150


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    whose: str = OURS
    joined: bool = False  # by lines through the median at each x


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    log: bool = False
    most: float | None = None  # what is beyond is drawn at the edge, with its value


@dataclass(frozen=True, slots=True)
class Fit:
    """Least squares: y = intercept + slope * x."""

    intercept: float
    slope: float
    r2: float
    count: int


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    whose: str = OURS


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart with its table; `series` or `bars`."""

    name: str  # of the anchor and the PNG
    title: str
    caption: str
    columns: Sequence[str]
    table: Sequence[Sequence[str]]
    sources: Sequence[Source]
    x: Axis = Axis("")
    y: Axis = Axis("")
    series: Sequence[Series] = ()
    level: float | None = None  # a horizontal line, such as full precision
    fit: Fit | None = None
    bars: Sequence[Bar] = ()


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    figures: list[Figure] = field(default_factory=list)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by key, in the order in which keys first occur."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_size(groups: dict[K, list[T]]) -> list[tuple[K, list[T]]]:
    """Return groups, those with the most items first."""
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def fit_line(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Return the least-squares line with its coefficient of determination; None without two different x and y."""
    n = len(points)
    if len({x for x, _ in points}) < 2 or len({y for _, y in points}) < 2:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope = xy / xx
    return Fit(mean_y - slope * mean_x, slope, xy * xy / (xx * yy), n)


def number(value: float | None, digits: int = 4) -> str:
    """Return a figure as a table shows it."""
    if value is None:
        return "–"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def whose_scheme(scheme: str) -> str:
    return REFERENCE if scheme in ("fp16", "fp32", "as it is") else OURS


def slug(*parts: str) -> str:
    """Return an anchor of letters, digits and dashes, short enough for the name of a file."""
    text = "".join(c if c.isascii() and c.isalnum() else " " for c in " ".join(parts).lower())
    return "-".join(text.split())[:_LONGEST]


def unique_sources(rows: Iterable[Source]) -> list[Source]:
    return list(dict.fromkeys(rows))


def bar_figure(
    name: str,
    title: str,
    caption: str,
    unit: str,
    rows: Sequence[tuple[str, float, str, Row]],
) -> Figure:
    """Return bars whose table is their labels and values."""
    return Figure(
        name,
        title,
        caption,
        ("what", unit, "file"),
        [(label, number(value), row.source.file) for label, value, _, row in rows],
        unique_sources(row.source for *_, row in rows),
        Axis(unit),
        bars=[Bar(label, value, whose) for label, value, whose, _ in rows],
    )
