"""Plots with matplotlib, in one style."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crelle.errors import UnsupportedError

COLOURS = ("#1f5fa8", "#c9c9c9", "#d98032")


def pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files; or the sentence that says how to get it."""
    try:
        import matplotlib
    except ImportError as e:
        raise UnsupportedError("plots need matplotlib: pip install 'crelle[plots]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_bars(
    path: Path,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    title: str,
    unit: str,
    between: tuple[float, float] | None = None,
) -> None:
    """Draw one group of horizontal bars a label, one bar a series, the value at its end.

    between: the part of the axis to show; a longer bar ends at its edge, with its value.
    """
    plt = pyplot()
    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.45 * len(labels)), layout="constrained")
    for i, (name, values) in enumerate(series.items()):
        places = [row + (i - (len(series) - 1) / 2) * height for row in range(len(labels))]
        bars = axes.barh(places, values, height * 0.92, label=name, color=COLOURS[i % len(COLOURS)])
        if between is None:
            axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
            continue
        for place, value in zip(places, values, strict=True):
            beyond = value > between[1]
            axes.annotate(
                f"{value:.4g} →" if beyond else f"{value:.4g}",
                (min(value, between[1]), place),
                (-3 if beyond else 3, 0),
                textcoords="offset points",
                ha="right" if beyond else "left",
                va="center",
                fontsize=8,
                color="white" if beyond else "black",
            )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit, xlim=between)
    if between is None:
        axes.margins(x=0.12)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_lines(
    path: Path, panels: Mapping[str, Mapping[str, Mapping[int, float]]], title: str, along: str, unit: str
) -> None:
    """Draw curves over counts that double, by panel and name; 1 is marked."""
    plt = pyplot()
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(1 + 4.5 * len(panels), 4.5), layout="constrained", squeeze=False, sharey=True
    )
    for axes, (panel, curves) in zip(all_axes[0], panels.items(), strict=True):
        for name, points in curves.items():
            places = sorted(points)
            axes.plot(places, [points[p] for p in places], marker="o", markersize=3, label=name)
        axes.axhline(1.0, color=COLOURS[1], linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(title=panel, xlabel=along)
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel(unit)
    all_axes[0][-1].legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_runs(path: Path, runs: Mapping[str, Sequence[float]], title: str, unit: str) -> None:
    """Draw repeated measurements of each label as dots on a line, with their mean."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.32 * len(runs)), layout="constrained")
    for row, values in enumerate(runs.values()):
        mean = sum(values) / len(values)
        axes.plot(values, [row] * len(values), "o", markersize=4, color=COLOURS[0])
        axes.plot([mean, mean], [row - 0.35, row + 0.35], color=COLOURS[1], linewidth=2)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set(title=title, xlabel=unit)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_training(path: Path, losses: Sequence[float], blocks: Mapping[str, Sequence[float | None]]) -> None:
    """Draw the loss of end-to-end steps with its running mean, and each layer's loss before and after its own steps."""
    plt = pyplot()
    panels = bool(losses) + bool(blocks)
    figure, all_axes = plt.subplots(1, panels, figsize=(7 * panels, 4), layout="constrained", squeeze=False)
    axes = list(all_axes[0])
    if blocks:
        here, few = axes.pop(0), 8
        known = [[float("nan") if loss is None else loss for loss in block] for block in blocks.values()]
        first, last = [block[0] for block in known], [sum(block[-few:]) / len(block[-few:]) for block in known]
        here.plot(first, color=COLOURS[1], marker="o", markersize=3, label="first step")
        here.plot(last, color=COLOURS[0], marker="o", markersize=3, label=f"mean of the last {few} steps")
        here.set(title="Loss of each layer in block-wise training", xlabel="layer", ylabel="relative squared error")
        here.legend()
    if losses:
        here, window = axes.pop(0), max(1, len(losses) // 50)
        runs = [losses[max(0, i - window) : i + 1] for i in range(len(losses))]
        here.plot(losses, color=COLOURS[1], linewidth=0.8)
        here.plot([sum(run) / len(run) for run in runs], color=COLOURS[0], label=f"mean of {window + 1}")
        here.set(title="Training loss", xlabel="step", ylabel="loss")
        here.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_memory(
    path: Path, title: str, along: Sequence[int], parts: Mapping[str, Sequence[float]], limit: float
) -> None:
    """Draw GB by part, one above the other, against a number of sequences, and the limit."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.stackplot(along, *parts.values(), labels=list(parts), colors=COLOURS)
    axes.axhline(limit, color="black", linewidth=1, linestyle="--", label="GPU memory")
    axes.set(title=title, xlabel="concurrent sequences", ylabel="GB per GPU", xlim=(along[0], along[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)
