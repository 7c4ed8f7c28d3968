"""Figures of speed: latency over bytes, throughput over batch, energy and cost per token."""

from collections.abc import Iterator, Sequence

from crelle.bench.report.figures import (
    Axis,
    Bar,
    Figure,
    Fit,
    Point,
    Series,
    fit_line,
    grouped,
    number,
    slug,
    unique_sources,
    whose_scheme,
)
from crelle.bench.report.rows import OURS, PEER, REFERENCE, Attention, Product, Quantizing, Step, Throughput
from crelle.bench.report.sources import family

_FEWEST_FOOTPRINTS = 3  # through two points any line fits


def latency_over_bytes(rows: Sequence[Product]) -> Iterator[Figure]:
    """One row of x: time against footprint, with a line fitted for the kernel that most of the points ran on."""
    for (device, setting, (N, K)), some in grouped(_on_a_line(rows), _matrix).items():
        kernel, fit = _fit(some)
        series = [
            Series(name, [Point((r.bytes or 0) / 1e6, r.microseconds, _timed(r)) for r in of])
            for name, of in sorted(grouped(some, lambda r: family(r.scheme)).items())
        ]
        told = f" {_told(fit, kernel)}" if fit else ""
        times = sorted(r.baseline_microseconds for r in some)
        baseline = number(times[0]) if times[0] == times[-1] else f"{number(times[0])} to {number(times[-1])}"
        yield Figure(
            slug("latency", device, setting, f"{N}x{K}"),
            f"Latency over bytes: {N} x {K}, {device}" + f", {setting}" * bool(setting),
            f"One row of x, from x to y, everything that a call does.{told} "
            f"{some[0].baseline}: {baseline} µs in the same runs.",
            ("scheme", "MB", "µs", "GB/s", "speed-up", "baseline µs", "mJ", "peers, µs", "file"),
            [
                (
                    r.scheme,
                    number((r.bytes or 0) / 1e6),
                    number(r.microseconds),
                    number((r.bytes or 0) / r.microseconds / 1e3),
                    f"{r.speedup:.2f}",
                    number(r.baseline_microseconds),
                    number(r.joules and 1e3 * r.joules),
                    "; ".join(f"{who} {number(us)}" for who, us in r.peers.items()) or "–",
                    r.source.file,
                )
                for r in sorted(some, key=lambda r: r.bytes or 0)
            ],
            unique_sources(r.source for r in some),
            Axis("MB of weights and scales"),
            Axis("µs"),
            series,
            fit=fit,
        )


def products_alone(rows: Sequence[Product]) -> Iterator[Figure]:
    """Products of too few sizes for a curve: their times as bars, with those of the baseline and of peers."""
    curves = {id(r) for r in (*_on_a_line(rows), *_over_batches(rows))}
    single = [r for r in rows if id(r) not in curves]
    for (device, setting, (N, K), batch), some in grouped(
        single, lambda r: (r.device, r.setting, r.shape, r.batch)
    ).items():
        bars: list[tuple[str, float, str, Product]] = []
        for r in some:
            bars.append((f"{r.scheme} ({r.source.file.removesuffix('.json')})", r.microseconds, OURS, r))
            bars += [(who, us, PEER, r) for who, us in r.peers.items()]
            bars.append((r.baseline, r.baseline_microseconds, REFERENCE, r))
        yield _bars(
            slug("product", device, setting, f"{N}x{K}", str(batch)),
            f"{N} x {K}, batch {batch}: {device}" + f", {setting}" * bool(setting),
            "Microseconds from x to y; below each scheme what else ran in the same run.",
            "µs",
            bars,
        )


def _fit(rows: Sequence[Product]) -> tuple[str, Fit | None]:
    kernels = grouped(rows, lambda r: r.kernel)
    kernel = max(kernels, key=lambda name: (len(kernels[name]), name))
    points = [((r.bytes or 0) / 1e6, r.microseconds) for r in kernels[kernel]]
    return kernel, fit_line(points) if len({x for x, _ in points}) >= _FEWEST_FOOTPRINTS else None


def _on_a_line(rows: Sequence[Product]) -> list[Product]:
    """Return the rows that latency over bytes shows."""
    groups = grouped([r for r in rows if r.batch == 1 and r.bytes], _matrix).values()
    return [r for some in groups if len({r.bytes for r in some}) >= _FEWEST_FOOTPRINTS for r in some]


def _over_batches(rows: Sequence[Product]) -> list[Product]:
    """Return the rows that products over batch show: schemes that were timed at several."""
    groups = grouped(rows, lambda r: (*_matrix(r), r.scheme)).values()
    return [r for some in groups if len({r.batch for r in some}) > 1 for r in some]


def _matrix(r: Product) -> tuple[str, str, tuple[int, int]]:
    return r.device, r.setting, r.shape


def _told(fit: Fit, kernel: str) -> str:
    speed = 1e3 / fit.slope if fit.slope > 0 else 0.0
    return (
        f"The line is fitted to the {fit.count} points of kernel {kernel}: R² = {fit.r2:.3f}, "
        f"{number(fit.intercept, 3)} µs plus the bytes at {number(speed, 3)} GB/s."
    )


def _timed(r: Product) -> str:
    return f"{r.scheme}: {number((r.bytes or 0) / 1e6)} MB, {number(r.microseconds)} µs"


def products_over_batch(rows: Sequence[Product]) -> Iterator[Figure]:
    for (device, setting, (N, K)), own in grouped(_over_batches(rows), _matrix).items():
        series = [
            Series(scheme, [Point(r.batch, r.speedup, f"{scheme}: {r.speedup:.2f}") for r in of], joined=True)
            for scheme, of in sorted(grouped(own, lambda r: r.scheme).items())
        ]
        peers: dict[str, list[Point]] = {}
        for r in own:
            for who, us in r.peers.items():
                times = r.baseline_microseconds / us
                peers.setdefault(who, []).append(Point(r.batch, times, f"{who}: {times:.2f}"))
        series += [Series(who, points, PEER, joined=True) for who, points in sorted(peers.items())]
        baseline = own[0].baseline
        yield Figure(
            slug("products", device, setting, f"{N}x{K}"),
            f"Products over batch: {N} x {K}, {device}" + f", {setting}" * bool(setting),
            f"How many times as fast as {baseline} in the same run, from x to y; the line is {baseline}.",
            ("scheme", "batch", "µs", "baseline µs", "speed-up", "peers, µs", "file"),
            [
                (
                    r.scheme,
                    str(r.batch),
                    number(r.microseconds),
                    number(r.baseline_microseconds),
                    f"{r.speedup:.2f}",
                    "; ".join(f"{who} {number(us)}" for who, us in r.peers.items()) or "–",
                    r.source.file,
                )
                for r in sorted(own, key=lambda r: (r.scheme, r.batch))
            ],
            unique_sources(r.source for r in own),
            Axis("rows of x", log=True),
            Axis(f"times {baseline}"),
            series,
            level=1.0,
        )


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
        yield _bars(
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
        yield _bars(
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
    for (device, model), some in grouped([r for r in rows if r.cost], lambda r: (r.device, r.model)).items():
        yield _bars(
            slug("cost", device, model),
            f"Cost of a million tokens: {model}, {device}",
            f"Hardware over its years of service and electricity, {how}; in the currency of the prices given.",
            "per million tokens",
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
        yield _bars(
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


def attention(rows: Sequence[Attention]) -> Iterator[Figure]:
    for (source, device, setting), some in grouped(rows, lambda r: (r.source, r.device, r.setting)).items():
        series = [
            Series(
                kv,
                [
                    Point(
                        r.batch * r.context, r.torch_microseconds / r.microseconds, f"{kv}: {number(r.microseconds)} µs"
                    )
                    for r in of
                ],
                joined=True,
            )
            for kv, of in sorted(grouped(some, lambda r: r.kv).items())
        ]
        yield Figure(
            slug("attention", device, setting, source.file.removesuffix(".json")),
            f"Attention of a decode step: {setting}, {device}",
            "How many times as fast as the fastest of torch's kernels with a 16-bit cache in the same run; "
            "the line is torch.",
            ("cache", "batch", "context", "µs", "torch µs", "torch's kernel", "file"),
            [
                (
                    r.kv,
                    str(r.batch),
                    str(r.context),
                    number(r.microseconds),
                    number(r.torch_microseconds),
                    r.torch_kernel,
                    r.source.file,
                )
                for r in some
            ],
            [source],
            Axis("tokens in the cache", log=True),
            Axis("times torch"),
            series,
            level=1.0,
        )


def quantizing(rows: Sequence[Quantizing]) -> Iterator[Figure]:
    for (model, machine), some in grouped(rows, lambda r: (r.model, r.source.machine)).items():
        guess = " The whole model is extrapolated from the layers that were timed." if some[0].extrapolated else ""
        yield _bars(
            slug("quantizing", model, machine),
            f"Time to quantize: {model}, {machine}",
            f"Seconds from start to end.{guess}",
            "seconds",
            [(r.scheme, r.seconds, OURS, r) for r in some],
        )


def _bars(
    name: str,
    title: str,
    caption: str,
    unit: str,
    rows: Sequence[tuple[str, float, str, Product | Step | Throughput | Quantizing]],
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


def _load(r: Throughput) -> tuple[str, str, str, str]:
    return r.device, r.model, r.setting, r.over


def _speed(r: Throughput) -> str:
    return f"{r.series}, {r.count}: {number(r.tokens_per_second)} tokens/s"


def _load_row(r: Throughput) -> tuple[str, ...]:
    median, slow = r.first_token or (None, None)
    return r.series, str(r.count), number(r.tokens_per_second), number(median, 3), number(slow, 3), r.source.file
