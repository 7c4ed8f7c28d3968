"""Figures of kernels: products over bytes and batch, attention, and the time to quantize."""

from collections.abc import Iterator, Sequence

from crelle.bench.report.figures import (
    Axis,
    Figure,
    Fit,
    Point,
    Series,
    bar_figure,
    fit_line,
    grouped,
    number,
    slug,
    unique_sources,
)
from crelle.bench.report.rows import OURS, PEER, REFERENCE, Attention, Product, Quantizing
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
        yield bar_figure(
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
        yield bar_figure(
            slug("quantizing", model, machine),
            f"Time to quantize: {model}, {machine}",
            f"Seconds from start to end.{guess}",
            "seconds",
            [(r.scheme, r.seconds, OURS, r) for r in some],
        )
