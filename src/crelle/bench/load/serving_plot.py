"""Plots of `crelle bench serve`: throughput and latency over the batch, within a budget, by kernel; and over time."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from crelle.plots import pyplot

Row = dict[str, Any]
Panel = Callable[[Any, list[Row]], None]
_COLOURS = (
    "#1f5fa8",
    "#d98032",
    "#3a8f5c",
    "#8a4fa3",
    "#b8403a",
    "#7a7a7a",
    "#c2a12e",
    "#4aa3b5",
    "#d46a9f",
    "#5b6b2f",
)
_KINDS = {
    "attention": "#1f5fa8",
    "gemm": "#d98032",
    "encode": "#3a8f5c",
    "append": "#8a4fa3",
    "rest": "#7a7a7a",
    "idle": "#e3e3e3",
}
_DASHES = ("-", "--", ":", "-.")


def plot_serving(path: Path, rows: list[Row]) -> None:
    """Plot rows of a result file; those of decoding and those of a load each get their panels."""
    decoded = [r for r in rows if "milliseconds_per_step" in r]
    served = [r for r in rows if r.get("over_time")]
    panels: list[tuple[Panel, list[Row]]] = []
    if any(not r["memory"] for r in decoded):
        panels += [(_throughput, decoded), (_latency, decoded)]
    if capped := [r for r in decoded if r["memory"]]:
        panels.append((_within, capped))
    if broken := [r for r in decoded if r.get("breakdown")]:
        panels.append((_breakdown, broken))
    if served:
        panels += [(_answered, served), (_pages, served), (_running, served)]
    plt = pyplot()
    columns = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
    lines = -(-max(1, len(panels)) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6.5 * columns, 4.4 * lines), layout="constrained", squeeze=False
    )
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    for place, (draw, mine) in zip(axes.flat, panels, strict=False):
        draw(place, mine)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def scheme_label(scheme: str) -> str:
    """Return a scheme as papers name it: W4A4, W4A16, FP16; as it is where there is no such name."""
    if scheme == "fp16":
        return "FP16"
    name, _, settings = scheme.partition(":")
    said = dict(item.partition("=")[::2] for item in settings.split(",") if item)
    if name != "atom":
        return f"W{said['bits']}A16 ({name})" if said.get("bits", "").isdigit() else scheme
    label = f"W{said.get('w', '4')}A{said.get('a', '4')}"
    label += " per row" if said.get("group") == "row" else ""
    return label + (" two-level" if said.get("levels") == "2" else "")


def _label(r: Row) -> str:
    return f"{scheme_label(r['scheme'])}, {re.sub('^kv', 'KV', r['kv'])}"


def _styles(rows: Iterable[Row]) -> dict[str, tuple[str, str]]:
    """Return a colour for each kind of weights and a dash for each cache, the same in all panels."""
    found: dict[str, list[str]] = {}
    for r in rows:
        caches = found.setdefault(scheme_label(r["scheme"]), [])
        caches += [] if _label(r) in caches else [_label(r)]
    return {
        label: (_COLOURS[i % len(_COLOURS)], _DASHES[j % len(_DASHES)])
        for i, labels in enumerate(found.values())
        for j, label in enumerate(labels)
    }


def _throughput(axes: Any, rows: list[Row]) -> None:
    _curves(axes, [r for r in rows if not r["memory"]], rows, "tokens_per_second")
    styles, stars = _styles(rows), sorted({r["memory"] for r in rows if r["memory"]})
    for r in rows:
        if r["memory"]:
            axes.plot(r["batch"], r["tokens_per_second"], "*", color=styles[_label(r)][0], markersize=11)
    title = f"{rows[0]['model']}, {rows[0]['device']}, behind {rows[0]['context']} tokens"
    _over_batch(axes, f"{title}; stars: within {', '.join(stars)}" if stars else title, "tokens per second")


def _latency(axes: Any, rows: list[Row]) -> None:
    _curves(axes, [r for r in rows if not r["memory"]], rows, "milliseconds_per_step")
    _over_batch(axes, "Time of a token", "ms of a step")


def _curves(axes: Any, shown: list[Row], rows: list[Row], key: str) -> None:
    """Draw values over the batch; rows: all that have a colour."""
    for name, (colour, dash) in _styles(rows).items():
        line = sorted((r["batch"], r[key]) for r in shown if _label(r) == name)
        if line:
            axes.plot(*zip(*line, strict=True), "o", linestyle=dash, color=colour, label=name, markersize=4)


def _over_batch(axes: Any, title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="sequences at once", ylabel=unit)
    axes.set_title(title, fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _within(axes: Any, rows: list[Row]) -> None:
    """Bars of the most tokens a second that each kind of weights and cache gives within its budget."""
    best: dict[str, Row] = {}
    for r in rows:
        name = f"{_label(r)}, {r['memory']}" if len({x["memory"] for x in rows}) > 1 else _label(r)
        if name not in best or r["tokens_per_second"] > best[name]["tokens_per_second"]:
            best[name] = r
    styles, speeds = _styles(rows), [r["tokens_per_second"] for r in best.values()]
    bars = axes.barh(list(best), speeds, color=[styles[_label(r)][0] for r in best.values()])
    axes.bar_label(bars, [_said(r) for r in best.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(speeds))
    axes.set(xlabel="tokens per second")
    said = "sequences; times FP16" if any(r.get("times_fp16") for r in rows) else "sequences"
    axes.set_title(f"Decoding within {rows[0]['memory']}, in brackets: {said}", fontsize=9)


def _said(r: Row) -> str:
    times = f"; {r['times_fp16']:.2f}" if r.get("times_fp16") else ""
    return f"{r['tokens_per_second']:.0f} ({r['batch']}{times})"


def _breakdown(axes: Any, rows: list[Row]) -> None:
    """Stacked bars: where the time of a step's graph goes."""
    labels = [f"{_label(r)}, {r['batch']}: encode {_share(r, 'encode'):.1%}" for r in rows]
    left = [0.0] * len(rows)
    for kind, colour in _KINDS.items():
        times = [r["breakdown"]["milliseconds"].get(kind, 0.0) for r in rows]
        bars = axes.barh(labels, times, left=left, color=colour, label=kind)
        shares = [_share(r, kind) for r in rows]
        axes.bar_label(bars, [f"{s:.0%}" if s >= 0.1 else "" for s in shares], label_type="center", fontsize=7)
        left = [a + b for a, b in zip(left, times, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms, profiled")
    axes.set_title("A step's graph by kernel", fontsize=9)
    axes.set_xlim(0, 1.3 * max(left))
    axes.legend(fontsize=7, loc="center right")


def _share(r: Row, kind: str) -> float:
    return float(r["breakdown"]["milliseconds"].get(kind, 0.0) / r["breakdown"]["profiled_ms"])


def _answered(axes: Any, rows: list[Row]) -> None:
    """Bars of the tokens a second of the later half, when the batch has its size; and what a token took."""
    labels = [_label(r) + (f", {r['memory']}" if r["memory"] else "") for r in rows]
    styles, speeds = _styles(rows), [r["late_tokens_per_second"] for r in rows]
    bars = axes.barh(labels, speeds, color=[styles[_label(r)][0] for r in rows])
    axes.bar_label(bars, [_waited(r) for r in rows], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(speeds))
    axes.set(xlabel="tokens per second, later half")
    axes.set_title("Answers; in brackets the median time of a token", fontsize=9)


def _waited(r: Row) -> str:
    each = f" ({1e3 * r['per_token']['p50']:.0f} ms)" if r["per_token"] else ""
    return f"{r['late_tokens_per_second']:.0f}{each}"


def _pages(axes: Any, rows: list[Row]) -> None:
    _over_time(axes, rows, "pages in use, share of all", lambda m, r: m["pages_used"] / r["pages"])


def _running(axes: Any, rows: list[Row]) -> None:
    _over_time(axes, rows, "sequences: running, and (dotted) waiting", lambda m, _: m["running"], "waiting")


def _over_time(axes: Any, rows: list[Row], what: str, value: Any, dotted: str | None = None) -> None:
    for r, colour in zip(rows, _COLOURS * len(rows), strict=False):
        times = [m["seconds"] for m in r["over_time"]]
        label = _label(r) + (f", {r['memory']}" if r["memory"] else "")
        axes.plot(times, [value(m, r) for m in r["over_time"]], color=colour, label=label, linewidth=1)
        if dotted:
            axes.plot(times, [m[dotted] for m in r["over_time"]], ":", color=colour, linewidth=1)
    axes.set(xlabel="seconds", ylabel=what, ylim=(0, None))
    axes.set_title(f"{rows[0]['model']}, {rows[0]['device']}: {rows[0]['traffic']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
