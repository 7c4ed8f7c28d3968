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
        raise UnsupportedError("drawing needs matplotlib: pip install 'crelle[plots]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_bars(path: Path, labels: Sequence[str], series: Mapping[str, Sequence[float]], title: str, unit: str) -> None:
    """Draw one group of horizontal bars a label, one bar a series, the value at its end."""
    plt = pyplot()
    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.45 * len(labels)), layout="constrained")
    for i, (name, values) in enumerate(series.items()):
        places = [row + (i - (len(series) - 1) / 2) * height for row in range(len(labels))]
        bars = axes.barh(places, values, height * 0.92, label=name, color=COLOURS[i % len(COLOURS)])
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit)
    axes.margins(x=0.12)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_curve(path: Path, values: Sequence[float], title: str, x: str, y: str) -> None:
    """Draw a noisy series and its running mean."""
    plt = pyplot()
    window = max(1, len(values) // 50)
    mean = [
        sum(values[max(0, i - window) : i + 1]) / len(values[max(0, i - window) : i + 1]) for i in range(len(values))
    ]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(values, color=COLOURS[1], linewidth=0.8)
    axes.plot(mean, color=COLOURS[0], label=f"mean of {window + 1}")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
