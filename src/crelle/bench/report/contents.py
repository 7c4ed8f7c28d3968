"""What the page shows, in its order: sections of figures, and the table of the best after them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from crelle.bench.planner.cost import CostModel
from crelle.bench.report import product_figures as product
from crelle.bench.report import quality_figures as quality
from crelle.bench.report import speed_figures as speed
from crelle.bench.report.figures import Figure, Section, by_size, grouped, number, unique_sources, whose_scheme
from crelle.bench.report.rows import (
    PEER,
    REFERENCE,
    Ablation,
    Accuracy,
    Attention,
    CacheQuality,
    LeftOut,
    Product,
    Quality,
    Quantizing,
    Row,
    Source,
    Step,
    Throughput,
)

T = TypeVar("T")
_BITS = (2.6, 3.6, 4.65)  # classes of the headline: at most so many bits per weight
_SHAPE = (12288, 12288)  # of the headline, as in the papers; else the largest


@dataclass(frozen=True, slots=True)
class Headline:
    """A line of the table of the best."""

    what: str
    value: str
    against: str
    sources: Sequence[Source]


def sections(rows: Sequence[Row], prices: CostModel | None = None) -> list[Section]:
    """Return sections that have figures, figures of kinds that are there."""
    products, loads = _of(Product, rows), _of(Throughput, rows)
    steps = [_priced(r, prices) for r in _of(Step, rows)]
    how = _price_list(prices) if prices else "prices as in the files' commands"
    whole = [
        Section("Quality", [*quality.perplexity_over_bits(_of(Quality, rows))]),
        Section("Latency", [*product.latency_over_bytes(products), *speed.decoding_over_bytes(steps)]),
        Section("Throughput", [*speed.throughput_over_batch(loads), *speed.throughput_within_memory(loads)]),
        Section("Energy and cost per token", [*speed.energy(steps), *speed.cost(steps, how)]),
        Section("More of quality", [*quality.accuracy_over_bits(_of(Accuracy, rows))]),
        Section("More of speed", [*speed.decoding_beside_peers(steps), *product.products_over_batch(products)]),
    ]
    whole[2].figures.extend(speed.traces(loads))
    whole[4].figures.extend(quality.caches(_of(CacheQuality, rows)))
    whole[4].figures.extend(quality.ablations(_of(Ablation, rows)))
    whole[5].figures.extend(product.products_alone(products))
    whole[5].figures.extend(product.attention(_of(Attention, rows)))
    whole[5].figures.extend(product.quantizing(_of(Quantizing, rows)))
    return _named_apart([section for section in whole if section.figures])


def _named_apart(parts: list[Section]) -> list[Section]:
    """Number figures whose names are the same: what tells them apart may have neither letters nor digits."""
    seen: dict[str, int] = {}
    for part in parts:
        for i, figure in enumerate(part.figures):
            count = seen[figure.name] = seen.get(figure.name, 0) + 1
            if count > 1:
                part.figures[i] = replace(figure, name=f"{figure.name}--{count}")
    return parts


def headlines(rows: Sequence[Row], prices: CostModel | None = None) -> list[Headline]:
    """Return the best of each kind that is there; what it is the best of is said in its line."""
    return [
        *_quality(_of(Quality, rows)),
        *_products(_of(Product, rows)),
        *_steps([_priced(r, prices) for r in _of(Step, rows)]),
        *_loads(_of(Throughput, rows)),
    ]


def _of(kind: type[T], rows: Iterable[object]) -> list[T]:
    return [r for r in rows if isinstance(r, kind)]


def _priced(row: Step, prices: CostModel | None) -> Step:
    """Return a step with its cost by the prices given, where the power is given or was measured."""
    watt = row.joules and row.joules * row.tokens_per_second
    if prices is None or (prices.watt is None and watt is None):
        return row if prices is None else replace(row, cost=None)
    cost = prices.per_million(row.tokens_per_second, watt)
    return replace(row, cost=cost.total, currency=cost.currency)


def _price_list(prices: CostModel) -> str:
    power = "the measured power" if prices.watt is None else f"{prices.watt:g} W"
    money = prices.currency
    return f"{prices.price:g} {money} over {prices.years:g} years, {power}, {prices.kwh:g} {money} per kWh"


def _quality(rows: Sequence[Quality]) -> Iterator[Headline]:
    """For each text, the lowest ratio in each class of sizes, with how many schemes it is the lowest of."""
    own = [r for r in rows if not r.who and whose_scheme(r.scheme) != REFERENCE]
    for (model, text), some in by_size(grouped(own, lambda r: (r.model, r.text))):
        classes = [[r for r in some if low < r.bits <= high] for low, high in pairwise((0.0, *_BITS))]
        best = [(min(fits, key=lambda r: r.ratio), len(fits)) for fits in classes if fits]
        if best:
            value = ", ".join(f"{number(r.ratio)} at {number(r.bits, 3)} bits" for r, _ in best)
            how = "; ".join(f"{r.scheme} (lowest of {count})" for r, count in best)
            what = f"perplexity of {model} on {text}, times full precision"
            yield Headline(what, value, how, unique_sources(r.source for r, _ in best))


def _products(rows: Sequence[Product]) -> Iterator[Headline]:
    gpu = [r for r in rows if r.batch == 1 and not r.setting]
    for device, some in grouped(gpu, lambda r: r.device).items():
        shapes = grouped(some, lambda r: r.shape)
        N, K = _SHAPE if _SHAPE in shapes else max(shapes, key=lambda s: s[0] * s[1])
        ordered = sorted(shapes[N, K], key=lambda r: r.speedup)
        value = f"{ordered[0].speedup:.2f} to {ordered[-1].speedup:.2f} times as fast"
        how = f"{ordered[0].baseline}; {ordered[0].scheme} to {ordered[-1].scheme}"
        what = f"{N} x {K} by one row, from x to y, {device}"
        yield Headline(what, value, how, unique_sources(r.source for r in ordered))
        fits = [figure for figure in product.latency_over_bytes(some) if figure.fit]
        if fits:
            value = ", ".join(f"{f.fit.r2:.3f} ({_shape(f)})" for f in fits if f.fit)
            how = f"a straight line through {', '.join(str(f.fit.count) for f in fits if f.fit)} points"
            what = f"latency follows bytes: R², {device}"
            yield Headline(what, value, how, unique_sources(s for f in fits for s in f.sources))


def _shape(figure: Figure) -> str:
    return figure.title.partition(": ")[2].partition(",")[0]


def _steps(rows: Sequence[Step]) -> Iterator[Headline]:
    whole = [r for r in rows if not r.who and r.weight_bytes]
    alone: list[Step] = []
    for (device, model), some in grouped(whole, lambda r: (r.device, r.model)).items():
        fastest = max(some, key=lambda r: r.tokens_per_second)
        if not any(whose_scheme(r.scheme) == REFERENCE for r in some):
            alone.append(fastest)
            continue
        yield from _best(some, f"decoding {model}, {device}", lambda r: -r.tokens_per_second, _tokens)
        measured = [r for r in some if r.joules]
        yield from _best(measured, f"energy of a token, {model}, {device}", lambda r: r.joules or 0, _joules)
        paid = [r for r in some if r.cost]
        yield from _best(paid, f"a million tokens, {model}, {device}", lambda r: r.cost or 0, _cost)
    for device, best in grouped(alone, lambda r: r.device).items():
        value = "; ".join(f"{r.model} {_tokens(r)}" for r in best)
        how = "fastest scheme of each; not measured in full precision"
        yield Headline(f"decoding, {device}", value, how, unique_sources(r.source for r in best))


def _loads(rows: Sequence[Throughput]) -> Iterator[Headline]:
    batches = [r for r in rows if r.over == "batch" and r.whose != PEER]
    for (device, model, memory), some in grouped(batches, lambda r: (r.device, r.model, r.memory)).items():
        where = f"throughput of {model}, {device}" + f", within {memory}" * bool(memory)
        yield from _best(some, where, lambda r: -r.tokens_per_second, _sequences)


def _best(
    rows: Sequence[Any], what: str, key: Callable[[Any], float], tell: Callable[[Any], str]
) -> Iterator[Headline]:
    """Tell the best row, beside the best of full precision where that was measured too."""
    if rows:
        best = min(rows, key=key)
        plain = [r for r in rows if whose_scheme(getattr(r, "scheme", "")) == REFERENCE or _is_plain(r)]
        against = f"full precision: {tell(min(plain, key=key))}" if plain else "not measured in full precision"
        yield Headline(f"{what}, best of {len(rows)}", tell(best), against, [best.source])


def _is_plain(row: Any) -> bool:
    return getattr(row, "whose", "") == REFERENCE


def _tokens(r: Step) -> str:
    return f"{number(r.tokens_per_second)} tokens/s ({r.scheme})"


def _joules(r: Step) -> str:
    return f"{number(r.joules, 3)} J ({r.scheme})"


def _cost(r: Step) -> str:
    return f"{number(r.cost, 3)} {r.currency} ({r.scheme})"


def _sequences(r: Throughput) -> str:
    return f"{number(r.tokens_per_second)} tokens/s ({r.series}, batch {r.count})"


def not_drawn(rows: Sequence[Row], parts: Iterable[Section]) -> list[LeftOut]:
    """Return the files of which no figure shows anything, such as full precision alone."""
    drawn = {source.file for figure in figures(parts) for source in figure.sources}
    files = dict.fromkeys(r.source.file for r in rows)
    return [LeftOut(file, f"{file} has nothing to draw: full precision alone") for file in files if file not in drawn]


def figures(parts: Iterable[Section]) -> list[Figure]:
    return [figure for section in parts for figure in section.figures]
