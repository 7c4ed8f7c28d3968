"""Plots of `crelle bench serve`: throughput over the batch, and what the cache held over time."""

from pathlib import Path
from typing import Any

from crelle.plots import pyplot

Row = dict[str, Any]
_COLOURS = ("#1f5fa8", "#d98032", "#3a8f5c", "#8a4fa3", "#b8403a", "#7a7a7a")


def plot_serving(path: Path, rows: list[Row]) -> None:
    """Plot rows of a result file; those of decoding and those of a load each get their panels."""
    decoded = [r for r in rows if "milliseconds_per_step" in r]
    served = [r for r in rows if r.get("over_time")]
    plt = pyplot()
    panels = bool(decoded) + 2 * bool(served)
    figure, axes = plt.subplots(
        1, max(1, panels), figsize=(6 * max(1, panels), 4.2), layout="constrained", squeeze=False
    )
    free = iter(axes[0])
    if decoded:
        _throughput(next(free), decoded)
    if served:
        _over_time(next(free), served, "pages in use, share of all", lambda m, r: m["pages_used"] / r["pages"])
        _over_time(next(free), served, "sequences: running, and (dotted) waiting", lambda m, _: m["running"], "waiting")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _throughput(axes: Any, rows: list[Row]) -> None:
    names = list(dict.fromkeys((r["scheme"], r["kv"]) for r in rows))
    for name, colour in zip(names, _COLOURS * len(names), strict=False):
        mine = [r for r in rows if (r["scheme"], r["kv"]) == name]
        line = sorted((r["batch"], r["tokens_per_second"]) for r in mine if not r["memory"])
        if line:
            axes.plot(*zip(*line, strict=True), "o-", color=colour, label=", ".join(name), markersize=4)
        for r in mine:
            if r["memory"]:
                said = f"{r['memory']}: {r['batch']}"
                axes.plot(r["batch"], r["tokens_per_second"], "*", color=colour, markersize=13)
                axes.annotate(
                    said, (r["batch"], r["tokens_per_second"]), fontsize=7, xytext=(4, -10), textcoords="offset points"
                )
    axes.set(xscale="log", yscale="log", xlabel="sequences at once", ylabel="tokens per second")
    axes.set_title(f"{rows[0]['model']}, {rows[0]['device']}, behind {rows[0]['context']} tokens", fontsize=9)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _over_time(axes: Any, rows: list[Row], what: str, value: Any, dotted: str | None = None) -> None:
    for r, colour in zip(rows, _COLOURS * len(rows), strict=False):
        times = [m["seconds"] for m in r["over_time"]]
        label = f"{r['scheme']}, {r['kv']}" + (f", {r['memory']}" if r["memory"] else "")
        axes.plot(times, [value(m, r) for m in r["over_time"]], color=colour, label=label, linewidth=1)
        if dotted:
            axes.plot(times, [m[dotted] for m in r["over_time"]], ":", color=colour, linewidth=1)
    axes.set(xlabel="seconds", ylabel=what, ylim=(0, None))
    axes.set_title(f"{rows[0]['model']}, {rows[0]['device']}: {rows[0]['traffic']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
