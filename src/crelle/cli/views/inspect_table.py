"""The tables of `crelle inspect`: one row for each kind of matrix (q_proj, down_proj, …), or one for each matrix."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Column, Table

Row = dict[str, Any]


def kinds(layers: Sequence[Row]) -> list[Row]:
    """Return one row for each kind of matrix, in the order of the layers: the sums and ranges of its matrices.

    A kind is the last part of a name; more of it where two kinds would have the same name (GPT-2's attn.c_proj and
    mlp.c_proj).
    """
    found: dict[str, list[Row]] = {}
    for layer in layers:
        found.setdefault(_path(layer["name"]), []).append(layer)
    short = [path.rsplit(".", 1)[-1] for path in found]
    return [
        _sum(last if short.count(last) == 1 else path, alike)
        for last, (path, alike) in zip(short, found.items(), strict=True)
    ]


def _path(name: str) -> str:
    """Return a name from its layer on, without numbers: model.layers.3.mlp.up_proj is mlp.up_proj."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(part for part in parts[numbers[0] if numbers else 0 :] if not part.isdigit())


def _format(layer: Row) -> str:
    return f"{layer['format']} {layer['inner']}" if layer["inner"] else str(layer["format"])


def _sum(name: str, alike: list[Row]) -> Row:
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in alike)
    size = sum(layer["bytes"] for layer in alike)
    bits = sorted({bits for layer in alike for bits in layer["shares"]})
    return {
        "name": name,
        "count": len(alike),
        "formats": sorted({_format(layer) for layer in alike}),
        "shapes": [list(shape) for shape in sorted({tuple(layer["shape"]) for layer in alike})],
        "bits": [min(layer["bits"] for layer in alike), max(layer["bits"] for layer in alike)],
        "groups": sorted({layer["group"] for layer in alike}, key=lambda group: (group is None, group)),
        "shares": {b: sum(layer["shares"].get(b, 0.0) for layer in alike) / len(alike) for b in bits},
        "outliers": sum(layer["outliers"] for layer in alike),
        "activations": sorted({layer["activation"] for layer in alike if layer["activation"]}),
        "weights": weights,
        "bits_per_weight": 8 * size / weights,
        "bytes": size,
    }


def table(rows: Sequence[Row], *, every: bool = False) -> Table:
    """Return a table of kinds, which fits 80 columns; every: the rows are single matrices."""
    shares, activations = any(row["shares"] for row in rows), any(row["activations"] for row in rows)
    head = [Column("matrix", no_wrap=True, overflow="fold"), *([] if every else [Column("count", justify="right")])]
    head += [Column("format"), Column("out x in", no_wrap=True), Column("bits"), Column("group")]
    head += [Column("groups"), Column("outliers")] if shares else []
    head += [Column("activations", no_wrap=True)] if activations else []
    head += [Column("per weight", justify="right"), Column("MB", justify="right", no_wrap=True)]
    shown = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        cells = [row["name"], *([] if every else [str(row["count"])]), ", ".join(row["formats"])]
        (N, K), several = row["shapes"][0], len(row["shapes"]) > 1
        cells += ["several" if several else f"{N} x {K}", _range(*row["bits"]), _groups(row["groups"])]
        if shares:
            cells.append(", ".join(f"{share:.0%} of {bits} bits" for bits, share in row["shares"].items()))
            cells.append(f"{row['outliers'] / row['weights']:.2%}" if row["outliers"] else "")
        if activations:
            cells.append("\n".join(row["activations"]))
        shown.add_row(*cells, f"{row['bits_per_weight']:.3f}", f"{row['bytes'] / 1e6:.3f}")
    return shown


def single(layers: Sequence[Row]) -> list[Row]:
    """Return a row for each matrix, under its whole name."""
    return [_sum(layer["name"], [layer]) for layer in layers]


def _range(low: float, high: float) -> str:
    return f"{low:.3g}" if low == high else f"{low:.3g}–{high:.3g}"


def _groups(groups: list[int | None]) -> str:
    if groups == [None]:
        return "several"
    return ", ".join("several" if group is None else str(group) for group in groups)
