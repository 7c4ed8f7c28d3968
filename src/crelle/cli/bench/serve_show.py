"""What `crelle bench serve` shows, and the same load sent to a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from crelle.cli.bench.rows import show
from crelle.cli.common.console import err, out, print_json

if TYPE_CHECKING:
    from crelle.bench.kernels.step_breakdown import StepBreakdown
    from crelle.bench.load.engine_load import EngineLoadResult
    from crelle.bench.load.load_report import Percentiles
    from crelle.bench.load.trace import TraceRequest

_GIVE_UP = 8  # requests that may fail before any was answered
_WAITS = ("first token ms, p50/p99", "ms/token, p50/p90/p99")
_SHARES = "time in prefill / decoding"


def over_http(
    url: str,
    api_key: str | None,
    requests: "Sequence[TraceRequest] | None",
    clients: Sequence[int],
    seconds: float,
    prompt: int,
    tokens: int,
    seed: int,
    ignore_eos: bool,
    results: Path | None,
    json: bool,
) -> None:
    """Put a server under load and say what its clients saw."""
    from crelle.bench.environment import write_result
    from crelle.bench.load.http_load import Arrival, LoadOptions, run_closed_loop, run_trace
    from crelle.bench.load.trace import random_words

    options: LoadOptions = {"api_key": api_key, "extra": {"ignore_eos": True} if ignore_eos else None}
    options |= {"chat": None, "give_up": _GIVE_UP}
    reports = []
    with err.status(f"asking {url}"):
        if requests is not None:
            arrivals = [Arrival(w.at, random_words(w.prompt, seed + i), w.tokens) for i, w in enumerate(requests)]
            reports.append(run_trace(url, arrivals, **options))
        prompts = [random_words(prompt, seed + i) for i in range(256)]
        for n in clients:
            report = run_closed_loop(url, clients=n, seconds=seconds, prompts=prompts, max_tokens=tokens, **options)
            reports.append(report)
    found = [report.summary() for report in reports]
    if results:
        write_result(results, {"rows": found})
    if json:
        print_json(found[0] if len(found) == 1 else {"rows": found})
        return
    table = Table("clients", "tokens/s", "requests/s", "answers", "failed", *_WAITS)
    for r in reports:
        table.add_row(
            "trace" if r.clients is None else str(r.clients),
            f"{r.tokens_per_second:.1f}",
            f"{r.requests_per_second:.2f}",
            str(r.requests - r.failures),
            str(r.failures),
            _first_token(r.first_token),
            _waits(r.per_token, 1e3, "{:.1f}"),
        )
    show(table)
    if not reports[0].chat:
        out.print(
            f"{reports[0].model} at {url} has no chat template; measured /v1/completions", highlight=False, markup=False
        )
    for sentence, times in ((sentence, n) for r in reports for sentence, n in r.errors.items()):
        out.print(f"{times} times: {sentence}", highlight=False, markup=False, soft_wrap=True)


def _waits(p: "Percentiles | None", unit: float, form: str) -> str:
    return "–" if p is None else " / ".join(form.format(unit * v) for v in (p.p50, p.p90, p.p99))


def _first_token(p: "Percentiles | None") -> str:
    return "–" if p is None else f"{1e3 * p.p50:.1f} / {1e3 * p.p99:.1f}"


def show_rows(rows: list[Any]) -> None:
    """Print a table of decoding and one of loads."""
    from crelle.bench.load.decode_throughput import DecodeThroughput

    decoded: list[DecodeThroughput] = [r for r in rows if isinstance(r, DecodeThroughput)]
    served: list[EngineLoadResult] = [r for r in rows if not isinstance(r, DecodeThroughput)]
    scheme = Column("scheme", no_wrap=True)
    if decoded:
        out.print(
            f"{decoded[0].model}, {decoded[0].device}, decoding after a context of {decoded[0].context}",
            highlight=False,
        )
        table = Table(scheme, "cache", "batch", "ms/step", "tokens/s", "weights GB", "cache GB", "memory")
        for r in decoded:
            sizes = (f"{r.weight_bytes / 1e9:.2f}", f"{r.cache_bytes / 1e9:.2f}")
            speed = (f"{r.milliseconds_per_step:.2f}", f"{r.tokens_per_second:.0f}")
            table.add_row(r.scheme, r.kv, str(r.batch), *speed, *sizes, r.memory or "–")
        show(table)
        for r in decoded:
            if r.breakdown:
                _show_breakdown(f"{r.scheme}, {r.kv}, batch {r.batch}", r.breakdown)
            if r.no_breakdown:
                out.print(
                    f"the breakdown was not measured: {r.no_breakdown}", highlight=False, markup=False, soft_wrap=True
                )
    if served:
        out.print(f"{served[0].model}, {served[0].device}", highlight=False)
        table = Table(
            scheme, "cache", "traffic", "within", "tokens/s", "requests/s", *_WAITS, _SHARES, "pages", "preempted"
        )
        for s in served:
            table.add_row(
                *(s.scheme, s.kv, s.traffic, s.memory or "–"),
                *(f"{s.tokens_per_second:.1f}", f"{s.requests_per_second:.2f}"),
                _first_token(s.first_token),
                _waits(s.per_token, 1e3, "{:.1f}"),
                f"{s.prefill_share:.0%} / {1 - s.prefill_share:.0%}",
                f"{s.mean_pages / s.pages:.0%}, peak {s.most_pages / s.pages:.0%}",
                str(s.preemptions),
            )
        show(table)
        for sentence in sorted({e for s in served for e in s.errors}):
            out.print(f"failed: {sentence}", highlight=False, markup=False, soft_wrap=True)


def _show_breakdown(what: str, found: "StepBreakdown") -> None:
    """Print where the time of a step's graph goes, by kind and by kernel."""
    from crelle.bench.kernels.step_breakdown import MEANING

    out.print(
        f"{what}: {found.launches} launches in a graph of {found.graph_ms:.2f} ms, {found.profiled_ms:.2f} profiled",
        highlight=False,
    )
    table = Table("kind", "ms", "share", "description")
    for kind, ms in found.milliseconds.items():
        table.add_row(kind, f"{ms:.3f}", f"{found.share(kind):.1%}", MEANING[kind])
    show(table)
    table = Table(Column("kernel", overflow="fold"), "kind", "launches", "us each", "ms")
    for k in found.kernels:
        times = (f"{k.microseconds / k.launches:.1f}", f"{k.microseconds / 1e3:.3f}")
        table.add_row(k.name, k.kind, str(k.launches), *times)
    show(table)
