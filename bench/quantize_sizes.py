"""Seconds per weight over the size of a model, from files of `crelle bench quantize`; writes OUT.json and OUT.png.

    python bench/quantize_sizes.py OUT.json FILE.json …

Per weight of a layer, in nanoseconds: all of it (that is the model's as well, embedding and head aside: layers of one
shape take the same time at any depth), and those stages of which the arithmetic per weight grows with the width K: the
Cholesky (K³ of an input, over K N weights) and the passes with error feedback (N K² of a matrix).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from crelle.bench.planner.plan_shapes import planned_shape
from crelle.formats.storage.io import to_json, write_whole
from crelle.plots import pyplot


def row_of(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    shape = planned_shape(found["model"].removeprefix("synthetic-"))
    weights = shape.weights(expert=False) / found["layers"]
    stages = found["layer_seconds"][-1]
    return {
        "file": path.name,
        "command": found["command"],
        "model": shape.name,
        "scheme": found["scheme"],
        **{k: found[k] for k in ("rows", "length", "device")},
        "parameters": shape.parameters,
        "weights_per_layer": weights,
        "layer_seconds": [sum(each.values()) for each in found["layer_seconds"]],
        "nanoseconds_per_weight": {k: 1e9 * s / weights for k, s in {**stages, "all": sum(stages.values())}.items()},
        "extrapolated_minutes": found["extrapolated"]["seconds"] / 60,
        "gigabytes": (found["device_reserved_bytes"] or found["host_peak_bytes"]) / 1e9,
    }


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = [row["parameters"] / 1e9 for row in rows]
    for name in ("all", "solve", "Hessian", "factor"):
        axes.plot(sizes, [row["nanoseconds_per_weight"][name] for row in rows], marker="o", label=name)
    for row, size in zip(rows, sizes, strict=True):
        text = f"{row['model']}\n{row['extrapolated_minutes']:.1f} min"
        axes.annotate(
            text, (size, row["nanoseconds_per_weight"]["all"]), (4, 6), textcoords="offset points", fontsize=8
        )
    axes.set(xscale="log", yscale="log", xlabel="billion parameters", ylabel="ns per weight of a layer")
    axes.set_title(f"Quantizing, {rows[0]['rows']} sequences of {rows[0]['length']} tokens, {rows[0]['device']}")
    axes.margins(0.15)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    rows = sorted(map(row_of, args.files), key=lambda row: row["parameters"])
    command = f"python bench/quantize_sizes.py OUT.json {' '.join(f.name for f in args.files)}"
    write_whole(args.out, to_json({"command": command, "rows": rows}))
    draw(args.out.with_suffix(".png"), rows)
    for row in rows:
        each, minutes = row["nanoseconds_per_weight"]["all"], row["extrapolated_minutes"]
        print(f"{row['model']:>14} {each:7.1f} ns a weight, {minutes:5.1f} min, {row['gigabytes']:5.1f} GB")


if __name__ == "__main__":
    main()
