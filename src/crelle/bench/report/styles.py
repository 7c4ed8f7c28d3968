"""One colour and shape for each series of the page: a scheme looks the same in every figure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from crelle.bench.report.figures import Figure

COLOURS, SHAPES = 10, 5
_NEXT = 32  # names among which the next one is chosen
Styles = Mapping[str, int]  # name of a series: index of its style


def styles(figures: Iterable[Figure]) -> dict[str, int]:
    """Return a style for each name of a series.

    Names that many figures have come first, and of the next few the one that its figures leave the fewest colours. No
    two series of a figure have the same colour, as far as ten colours suffice; beyond that their shapes differ.
    rtn:bits=4 has the colour of rtn where no figure has both.
    """
    shown: dict[str, list[set[int]]] = {}  # for each name, the styles that its figures use so far
    for figure in figures:
        used: set[int] = set()
        for name in {series.name for series in figure.series}:
            shown.setdefault(name, []).append(used)
    found: dict[str, int] = {}
    uses: Counter[int] = Counter()
    left = sorted(shown, key=lambda n: (-len(shown[n]), n))
    while left:
        taken = [len({colour(i) for used in shown[n] for i in used}) for n in left[:_NEXT]]
        name = left.pop(taken.index(max(taken)))
        near = set().union(*shown[name])
        colours, family = {colour(i) for i in near}, found.get(name.partition(":")[0])
        found[name] = min(
            range(COLOURS * SHAPES),
            key=lambda i: (
                i in near,
                colour(i) in colours,
                family is not None and colour(i) != colour(family),
                uses[i],
                i,
            ),
        )
        uses[found[name]] += 1
        for used in shown[name]:
            used.add(found[name])
    return found


def colour(style: int) -> int:
    return style % COLOURS


def shape(style: int) -> int:
    """Return the index of a style's shape; styles of one colour have different ones."""
    return (style + style // COLOURS) % SHAPES
