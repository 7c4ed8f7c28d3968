"""How `crelle bench quantize` and `crelle quantize --dry-run` show what quantizing costs."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from crelle.cli.common.console import out

if TYPE_CHECKING:
    from crelle.quantize_job.cost import QuantizeCost
    from crelle.quantize_job.training_cost import TrainingCost

DeviceMemory = Annotated[
    str | None,
    typer.Option("--memory", help="At most so much memory for calibration, like 16GB; on a GPU default: all of it."),
]


def as_json(cost: "QuantizeCost") -> dict[str, Any]:
    """Return the figures, with those that are extrapolated under a name that says so."""
    plan = cost.memory_plan
    planned = None if plan is None else {**asdict(plan), "states": str(plan.states).removeprefix("torch.")}
    extrapolated = {"layers": cost.layers, "seconds": cost.extrapolated_seconds, "from": _how(cost)}
    figures = {**asdict(replace(cost, memory_plan=None)), "memory_plan": planned}
    return {**figures, "seconds_per_layer": cost.seconds_per_layer, "extrapolated": extrapolated}


def show(cost: "QuantizeCost") -> None:
    """Print stages by layer, memory and the extrapolation."""
    stages = list(dict.fromkeys(name for each in (*cost.layer_seconds, cost.once_seconds) for name in each))
    table = Table(f"{cost.model}, {cost.scheme}", *(f"layer {i}, s" for i in range(len(cost.layer_seconds))), "once, s")
    for stage in stages:
        table.add_row(stage, *(_seconds(each.get(stage)) for each in (*cost.layer_seconds, cost.once_seconds)))
    table.add_row("all", *(_seconds(sum(each.values())) for each in (*cost.layer_seconds, cost.once_seconds)))
    out.print(table)
    lines = [
        f"{cost.rows} sequences of {cost.length} tokens on {_where(cost)}, {cost.bits_per_weight:.3f} bits per weight"
    ]
    if cost.device_peak_bytes is not None and cost.device_reserved_bytes is not None:
        peak, reserved = cost.device_peak_bytes / 1e9, cost.device_reserved_bytes / 1e9
        lines.append(f"peak of GPU memory {peak:.2f} GB, {reserved:.2f} GB with what torch keeps for reuse")
    lines.append(f"peak of host memory {cost.host_peak_bytes / 1e9:.2f} GB")
    if (plan := cost.memory_plan) is not None:
        where = "on the device" if plan.states_on_device else f"in host memory, {plan.host_bytes / 1e9:.2f} GB"
        again = "" if plan.keep else "; products of a layer are computed again for each of its stages"
        lines.append(f"batches of {plan.batch} sequences, hidden states {where}{again}")
    if (t := cost.training) is not None:
        lines += _training(t)
    lines.append(f"whole model, extrapolated ({_how(cost)}): {cost.extrapolated_seconds / 60:.1f} min")
    for line in (*lines, *cost.left_out):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _training(t: "TrainingCost") -> list[str]:
    """Return what end-to-end training takes."""
    how = "8-bit Adam, layers computed twice" if t.low_memory else "f32 Adam"
    peak = "" if t.peak_bytes is None else f", about {t.peak_bytes / 1e9:.1f} GB"
    steps = f"{t.steps} steps of {t.batch} sequences of {t.length} tokens"
    made = f", of {t.pieces} pieces each" if t.pieces > 1 else ""
    sampled = f"{t.own} sequences that the model writes{made}, {t.sampling_batch} at a time: "
    sampled = f"{sampled}{t.sampling_seconds / 60:.1f} min, and " if t.own else ""
    return [
        f"then end to end, {t.what} trained ({how}): {steps}, {t.step_seconds:.2f} s each{peak}: "
        f"{t.steps * t.step_seconds / 60:.1f} min, extrapolated from 1 and {t.measured} layers",
        f"before it {sampled}the full-precision model on all sequences: {t.teacher_seconds / 60:.1f} min",
    ]


def _where(cost: "QuantizeCost") -> str:
    return cost.device if cost.devices == 1 else f"{cost.devices} devices ({cost.device}; figures are of the first)"


def _how(cost: "QuantizeCost") -> str:
    parts = [
        f"{cost.layers} x {cost.seconds_per_layer:.2f} s a layer",
        f"{sum(cost.once_seconds.values()):.2f} s once",
        *([] if cost.training is None else [f"{cost.training.seconds:.0f} s end to end"]),
    ]
    return " + ".join(parts)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
