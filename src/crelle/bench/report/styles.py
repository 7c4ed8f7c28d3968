"""One colour and shape for each series of the page: a scheme looks the same in every figure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from crelle.bench.report.figures import Figure

COLOURS, SHAPES = 10, 5
Styles = Mapping[str, int]  # name of a series: index of its style


def styles(figures: Iterable[Figure]) -> dict[str, int]:
    """Return a style for each name of a series.

    Names that many figures have come first. No two series of a figure have the same colour, as far as ten colours
    suffice; beyond that their shapes differ. rtn:bits=4 has the colour of rtn where no figure has both.
    """
    together: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for figure in figures:
        names = {series.name for series in figure.series}
        counts.update(names)
        for name in names:
            together.setdefault(name, set()).update(names - {name})
    found: dict[str, int] = {}
    for name in sorted(together, key=lambda n: (-counts[n], n)):
        near = [found[other] for other in together[name] if other in found]
        family = found.get(name.partition(":")[0])
        uses = Counter(found.values())
        found[name] = min(
            range(COLOURS * SHAPES),
            key=lambda i: (
                i in near,
                colour(i) in map(colour, near),
                family is not None and colour(i) != colour(family),
                uses[i],
                i,
            ),
        )
    return found


def colour(style: int) -> int:
    return style % COLOURS


def shape(style: int) -> int:
    """Return the index of a style's shape; styles of one colour have different ones."""
    return (style + style // COLOURS) % SHAPES
