"""Figures of whole models: decoding, throughput, energy and cost per token."""

from collections.abc import Iterator, Sequence

from crelle.bench.report.figures import (
    Axis,
    Bar,
    Figure,
    Point,
    Series,
    bar_figure,
    grouped,
    number,
    slug,
    unique_sources,
    whose_scheme,
)
from crelle.bench.report.rows import OURS, PEER, Step, Throughput


def decoding_over_bytes(rows: Sequence[Step]) -> Iterator[Figure]:
    """Whole steps whose weights were counted, by device."""
    for (device, batch), some in grouped([r for r in rows if r.weight_bytes], lambda r: (r.device, r.batch)).items():
        series = [
            Series(
                model,
                [
                    Point(
                        (r.weight_bytes or 0) / 1e9, r.milliseconds, f"{model} {r.scheme}: {number(r.milliseconds)} ms"
                    )
                    for r in of
                ],
            )
            for model, of in sorted(grouped(some, lambda r: r.model).items())
        ]
        yield Figure(
            slug("decode", device, str(batch)),
            f"Decoding: latency over bytes, {device}",
            f"Milliseconds of a step, over the bytes of the weights that it reads; batch {batch}.",
            ("model", "scheme", "GB", "ms per step", "tokens/s", "J per token", "setting", "file"),
            [
                (
                    r.model,
                    r.scheme,
                    number((r.weight_bytes or 0) / 1e9),
                    number(r.milliseconds),
                    number(r.tokens_per_second),
                    number(r.joules),
                    r.setting,
                    r.source.file,
                )
                for r in sorted(some, key=lambda r: (r.model, r.weight_bytes or 0))
            ],
            unique_sources(r.source for r in some),
            Axis("GB of weights", log=True),
            Axis("ms per step", log=True),
            series,
        )


def decoding_beside_peers(rows: Sequence[Step]) -> Iterator[Figure]:
    plain = [r for r in rows if not r.weight_bytes]
    for (device, setting), some in grouped(plain, lambda r: (r.device, r.setting.split(",")[0])).items():
        yield bar_figure(
            slug("decode", device, setting),
            f"Decoding: {device}, {setting}",
            "Tokens per second of one sequence; peers ran in the same run as the rows of the same file.",
            "tokens/s",
            [(_step(r), r.tokens_per_second, PEER if r.who else OURS, r) for r in some],
        )


def _step(r: Step) -> str:
    kernel = r.setting.partition(", ")[2]
    return f"{r.who or 'Crelle ' + r.scheme}" + f", {kernel}" * bool(kernel)


def energy(rows: Sequence[Step]) -> Iterator[Figure]:
    for (device, model), some in grouped([r for r in rows if r.joules], lambda r: (r.device, r.model)).items():
        yield bar_figure(
            slug("energy", device, model),
            f"Energy per token: {model}, {device}",
            "Joules of the device for a decoded token, by its own counter.",
            "J per token",
            [
                (f"{r.scheme}, batch {r.batch}", r.joules or 0, whose_scheme(r.scheme), r)
                for r in sorted(some, key=lambda r: r.joules or 0)
            ],
        )


def cost(rows: Sequence[Step], how: str) -> Iterator[Figure]:
    paid = grouped([r for r in rows if r.cost], lambda r: (r.device, r.model, r.currency))
    for (device, model, currency), some in paid.items():
        yield bar_figure(
            slug("cost", device, model),
            f"Cost of a million tokens: {model}, {device}",
            f"Hardware over its years of service, and electricity; {how}.",
            f"{currency} per million tokens",
            [
                (f"{r.scheme}, batch {r.batch}", r.cost or 0, whose_scheme(r.scheme), r)
                for r in sorted(some, key=lambda r: r.cost or 0)
            ],
        )


def throughput_over_batch(rows: Sequence[Throughput]) -> Iterator[Figure]:
    free = [r for r in rows if r.over != "trace" and not r.memory and r.count]
    for (device, model, setting, over), some in grouped(free, _load).items():
        series = [
            Series(name, [Point(r.count or 0, r.tokens_per_second, _speed(r)) for r in of], of[0].whose, joined=True)
            for name, of in sorted(grouped(some, lambda r: r.series).items())
        ]
        yield Figure(
            slug("throughput", device, model, setting, over),
            f"Throughput over {over}: {model}, {device}",
            f"Tokens per second of all sequences together{', ' + setting if setting else ''}; "
            "where a count was run several times, the line goes through the median.",
            ("who", over, "tokens/s", "first token s, median", "99%", "file"),
            [_load_row(r) for r in sorted(some, key=lambda r: (r.series, r.count or 0))],
            unique_sources(r.source for r in some),
            Axis("sequences at once" if over == "batch" else "clients", log=True),
            Axis("tokens/s", log=True),
            series,
        )


def throughput_within_memory(rows: Sequence[Throughput]) -> Iterator[Figure]:
    capped = [r for r in rows if r.over != "trace" and r.memory]
    for (device, model, memory), some in grouped(capped, lambda r: (r.device, r.model, r.memory)).items():
        yield bar_figure(
            slug("throughput", device, model, memory),
            f"Throughput within {memory}: {model}, {device}",
            "Tokens per second with as many sequences as fit beside the weights, "
            f"{some[0].setting}; rows of one scheme are batches.",
            "tokens/s",
            [
                (f"{r.series}, batch {r.count}", r.tokens_per_second, r.whose, r)
                for r in sorted(some, key=lambda r: (r.series, r.count or 0))
            ],
        )


def traces(rows: Sequence[Throughput]) -> Iterator[Figure]:
    played = [r for r in rows if r.over == "trace"]
    for (device, model, setting), some in grouped(played, lambda r: (r.device, r.model, r.setting)).items():
        bars = [Bar(f"{r.series}, {r.memory}".strip(", "), r.tokens_per_second, r.whose) for r in some]
        yield Figure(
            slug("trace", device, model, setting),
            f"Under a trace: {model}, {device}",
            f"Tokens per second, {setting or 'requests as they came'}; the table has the wait for the first token.",
            ("who", "memory", "tokens/s", "first token s, median", "99%", "file"),
            [(r.series, r.memory or "–", *_load_row(r)[2:]) for r in some],
            unique_sources(r.source for r in some),
            Axis("tokens/s"),
            bars=bars,
        )


def _load(r: Throughput) -> tuple[str, str, str, str]:
    return r.device, r.model, r.setting, r.over


def _speed(r: Throughput) -> str:
    return f"{r.series}, {r.count}: {number(r.tokens_per_second)} tokens/s"


def _load_row(r: Throughput) -> tuple[str, ...]:
    median, slow = r.first_token or (None, None)
    return r.series, str(r.count), number(r.tokens_per_second), number(median, 3), number(slow, 3), r.source.file
