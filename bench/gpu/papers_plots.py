"""The papers' figures from our result files: latency over bytes, and mixed products over their outliers.

    python bench/gpu/papers_plots.py [RESULTS] [OUT]        default: bench/results, docs/images

papers-latency.png      microseconds of binary-coded products over bytes, a colour for each group (LUT-GEMM, Figure 4)
papers-outliers.png     times cuBLAS fp16 over the share of outliers, a line for each dataflow (ICCAD 2024, Figure 9)

Quality over bits and groups is drawn by bcq_quality.py.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np

from crelle.formats.storage.io import read_json
from crelle.plots import pyplot

GROUPS = ("row", "128", "64", "32")
WAYS = {"default": "default kernel", "pipelined": "pipelined", "asynchronous": "asynchronous", "synchronous": "waiting"}
Row = dict[str, Any]


def group(row: Row) -> str:
    """Return the group of a product's scheme."""
    found = re.search(r"group=(\w+)", row["scheme"])
    assert found is not None
    return found[1]


def line(rows: list[Row]) -> tuple[float, float, float]:
    """Return microseconds at no bytes, microseconds per MB, and R² of the straight line through products."""
    x, y = np.array([r["bytes"] / 1e6 for r in rows]), np.array([r["microseconds"] for r in rows])
    slope, start = np.polyfit(x, y, 1)
    return float(start), float(slope), float(np.corrcoef(x, y)[0, 1] ** 2)


def latency(rows: list[Row], to: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    square = [r for r in rows if r["shape"] == [12288, 12288]]
    for ax, some, title in zip(axes, (rows, square), ("eight shapes", "12288 × 12288"), strict=True):
        for i, of in enumerate(GROUPS):
            mine = [r for r in some if group(r) == of]
            label = "one scale a row" if of == "row" else f"groups of {of}"
            ax.scatter(
                [r["bytes"] / 1e6 for r in mine], [r["microseconds"] for r in mine], s=14, color=f"C{i}", label=label
            )
        start, slope, r2 = line(some)
        ends = np.array([0, max(r["bytes"] for r in some) / 1e6])
        ax.plot(ends, start + slope * ends, color="black", linewidth=0.8, linestyle=":")
        ax.set(
            title=f"{title}: {start:.1f} µs + {slope:.3f} µs per MB, R² = {r2:.3f}", xlabel="MB", ylabel="µs", ylim=0
        )
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(to, dpi=100)


def outliers(rows: list[Row], to: Path) -> None:
    plt = pyplot()
    shapes = sorted({tuple(r["shape"]) for r in rows})
    figure, axes = plt.subplots(1, len(shapes), figsize=(4 * len(shapes), 3.8), layout="constrained")
    for ax, shape in zip(axes, shapes, strict=True):
        mine = sorted((r for r in rows if tuple(r["shape"]) == shape), key=lambda r: float(r["outliers"]))
        for i, (way, label) in enumerate(WAYS.items()):
            us = [r[way]["microseconds"] for r in mine]
            times = [r["baseline_microseconds"] / t for r, t in zip(mine, us, strict=True)]
            ax.plot([100 * r["outliers"] for r in mine], times, marker="o", markersize=3, color=f"C{i}", label=label)
        ax.set(title=f"{shape[0]} × {shape[1]}", xlabel="outliers, %", ylabel="times cuBLAS fp16", ylim=0)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(to, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=Path("bench/results"))
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/images"))
    args = parser.parse_args()
    latency(read_json(args.results / "h200-papers-products.json")["rows"], args.out / "papers-latency.png")
    outliers(read_json(args.results / "h200-papers-dataflow.json")["rows"], args.out / "papers-outliers.png")


if __name__ == "__main__":
    main()
