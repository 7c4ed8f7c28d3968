"""What the demo adds on a GPU: how fast each scheme decodes in the shape of a 7B model, with random weights.

A step of the demo's own model takes a GPU less than a millisecond and is bound by kernel launches: fewer bytes do not
show there. In a real shape they do, and speed does not depend on the values of the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from crelle.cli.common.console import tracking

if TYPE_CHECKING:
    import torch

SHAPE = "llama2-7b"


@dataclass(frozen=True, slots=True)
class ShapeRow:
    """One scheme in a real shape."""

    scheme: str
    gigabytes: float | None = None  # of the matrices that a step reads
    milliseconds_per_token: float | None = None
    note: str | None = None  # why it was not timed


def decode_rows(
    schemes: Sequence[str], device: "torch.device", shape: str = SHAPE, layers: int | None = None
) -> list[ShapeRow]:
    """Time decode steps of one sequence; a scheme that does not fit the device's memory says so."""
    from crelle.bench.decode_cuda import measure
    from crelle.bench.model_shapes import RandomWeights
    from crelle.errors import CapacityError

    rows = []
    with tracking(f"decoding in the shape of {shape}, random weights") as track:
        for i, scheme in enumerate(schemes):
            weights = RandomWeights(shape, scheme, device, layers=layers)
            try:
                found = measure(weights, scheme, device, tokens=32, context=64, rounds=2, energy=False)
                rows.append(ShapeRow(scheme, found.weight_bytes / 1e9, found.milliseconds_per_token))
            except CapacityError as e:
                rows.append(ShapeRow(scheme, note=str(e)))
            track(i + 1, len(schemes), "")
    return rows


def shape_table(rows: Sequence[ShapeRow], labels: dict[str, str], shape: str = SHAPE) -> Table:
    """Return sizes and speeds, each beside the first row's where that was timed."""
    table = Table("model", "GB", "ms per token", "tokens/s", "x fp16", title=f"shape of {shape}, random weights")
    plain = rows[0].milliseconds_per_token if rows else None
    for r in rows:
        name, ms = labels.get(r.scheme, r.scheme), r.milliseconds_per_token
        if ms is None:
            table.add_row(name, "", "does not fit", "", "")
        else:
            faster = f"{plain / ms:.2f}" if plain else ""
            table.add_row(name, f"{r.gigabytes:.2f}", f"{ms:.2f}", f"{1e3 / ms:.0f}", faster)
    return table
