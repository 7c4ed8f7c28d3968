"""Figures of quality: perplexity and accuracy over bits, caches, ablations."""

import math
from collections.abc import Iterator, Sequence

from crelle.bench.report.figures import (
    Axis,
    Bar,
    Figure,
    Point,
    Series,
    by_size,
    grouped,
    number,
    slug,
    unique_sources,
    whose_scheme,
)
from crelle.bench.report.rows import OURS, PEER, REFERENCE, Ablation, Accuracy, CacheQuality, Quality
from crelle.bench.report.sources import family

_MOST_RATIO = 6.0  # beyond it a model is of no use, and how far beyond would hide all the rest


def perplexity_over_bits(rows: Sequence[Quality]) -> Iterator[Figure]:
    for (model, text), all_rows in by_size(grouped(rows, lambda r: (r.model, r.text))):
        own = [r for r in all_rows if whose_scheme(r.scheme) != REFERENCE]
        if not own:
            continue
        named = grouped(own, lambda r: (r.who or family(r.scheme), PEER if r.who else OURS))
        series = [
            Series(name, [Point(r.bits, r.ratio, f"{r.scheme}: {number(r.ratio)}") for r in some], whose)
            for (name, whose), some in sorted(named.items(), key=lambda item: (item[0][1], item[0][0]))
        ]
        table = [
            (r.who or "Crelle", r.scheme, number(r.bits), number(r.ratio), number(r.perplexity), r.source.file)
            for r in sorted(all_rows, key=lambda r: (r.bits, r.ratio))
        ]
        yield Figure(
            slug("perplexity", model, text),
            f"Perplexity over bits: {model}, {text}",
            "Relative to full precision, lower is better; every scale is counted in the bits."
            + f" Arrows: above {_MOST_RATIO:g}, see the table." * any(r.ratio > _MOST_RATIO for r in own),
            ("who", "scheme", "bits per weight", "ratio", "perplexity", "file"),
            table,
            unique_sources(r.source for r in all_rows),
            Axis("bits per weight"),
            Axis("perplexity / full precision", log=True, most=_MOST_RATIO),
            series,
            level=1.0,
        )


def accuracy_over_bits(rows: Sequence[Accuracy]) -> Iterator[Figure]:
    for (model, tasks), some in grouped(rows, lambda r: (r.model, tuple(sorted(r.tasks)))).items():
        plain = next((r.mean for r in some if whose_scheme(r.scheme) == REFERENCE), None)
        own = [r for r in some if whose_scheme(r.scheme) != REFERENCE]
        series = [
            Series(name, [Point(r.bits, r.mean, f"{r.scheme}: {r.mean:.3f}") for r in of])
            for name, of in sorted(grouped(own, lambda r: family(r.scheme)).items())
        ]
        error = max(math.hypot(*(e for _, e in r.tasks.values())) / len(r.tasks) for r in some)
        table = [
            (
                r.scheme,
                number(r.bits),
                f"{r.mean:.3f}",
                *(f"{r.tasks[t][0]:.3f} ± {r.tasks[t][1]:.3f}" for t in tasks),
                r.source.file,
            )
            for r in sorted(some, key=lambda r: r.bits)
        ]
        yield Figure(
            slug("accuracy", model),
            f"Zero-shot accuracy over bits: {model}",
            f"Mean of {', '.join(tasks)}, whose standard error is up to {error:.3f}; the line is full precision. "
            "The table has each task with its own.",
            ("scheme", "bits per weight", "mean", *tasks, "file"),
            table,
            unique_sources(r.source for r in some),
            Axis("bits per weight"),
            Axis("mean accuracy"),
            series,
            level=plain,
        )


def caches(rows: Sequence[CacheQuality]) -> Iterator[Figure]:
    for model, some in grouped(rows, lambda r: r.model).items():
        series = [
            Series(name, [Point(r.bits, r.ratio, f"{r.kv}: {number(r.ratio, 5)}") for r in of])
            for name, of in sorted(grouped(some, lambda r: r.kv.partition(":")[0]).items())
        ]
        yield Figure(
            slug("cache", model),
            f"Perplexity over bits of the KV cache: {model}",
            "Relative to a 16-bit cache, lower is better.",
            ("cache", "bits per value", "ratio", "perplexity", "file"),
            [(r.kv, number(r.bits), number(r.ratio, 5), number(r.perplexity), r.source.file) for r in some],
            unique_sources(r.source for r in some),
            Axis("bits per value"),
            Axis("perplexity / 16-bit cache"),
            series,
            level=1.0,
        )


def ablations(rows: Sequence[Ablation]) -> Iterator[Figure]:
    for (source, model), some in grouped(rows, lambda r: (r.source, r.model)).items():
        yield Figure(
            slug("ablation", source.file.removesuffix(".json")),
            f"Ablation: {model}, {source.file.removesuffix('.json')}",
            "Perplexity relative to full precision, lower is better.",
            ("what", "bits per weight", "ratio", "file"),
            [(r.name, number(r.bits or None), number(r.ratio), source.file) for r in some],
            [source],
            Axis("perplexity / full precision", most=_MOST_RATIO),
            bars=[Bar(r.name, r.ratio, OURS if r.bits else REFERENCE) for r in some],
        )
