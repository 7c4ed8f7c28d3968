"""crelle bench quantize: how long quantizing a model of a real shape takes, stage by stage."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from crelle.cli.console import Device, Json, Results, Threads, out, print_json, tracking, use_threads

if TYPE_CHECKING:
    from crelle.engine.quantize_cost import QuantizeCost

NAME = "quantize"


def run(
    shape: Annotated[str, typer.Option("--shape", help="A real shape, e.g. llama3-8b; its weights are synthetic.")],
    scheme: Annotated[str, typer.Option("--scheme", help="The recipe.")] = "gptq:bits=3,group=128",
    layers: Annotated[int, typer.Option("--layers", help="The first so many layers are quantized and timed.")] = 1,
    rows: Annotated[int, typer.Option("--rows", help="Calibration sequences.")] = 128,
    length: Annotated[int, typer.Option("--length", help="Tokens per sequence.")] = 2048,
    device: Device = "auto",
    threads: Threads = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Quantize the first layers of a model with synthetic weights and say what all of it would take.

    The layers go through what `crelle quantize` runs, with all of the calibration data, in the real shape; nothing is
    downloaded. The last measured layer, times the number of layers, and what is done once make the whole model's time:
    that figure is extrapolated, and the output says so. No disk is read: weights are sampled on the device.

    **Example**: `crelle bench quantize --shape llama3-8b --scheme gptq:bits=3,group=128 --layers 2 --device cuda`
    """
    from crelle.bench.environment import write_result
    from crelle.bench.quantize import bench_quantize
    from crelle.models.loader import choose_device

    use_threads(threads)
    where = choose_device(device)
    with tracking("quantizing") as track:
        cost = bench_quantize(shape, scheme, where, layers=layers, rows=rows, length=length, progress=track)
    if results:
        write_result(results, as_json(cost))
    if json:
        print_json(as_json(cost))
        return
    show(cost)


def as_json(cost: "QuantizeCost") -> dict[str, Any]:
    """Return the figures, with those that are extrapolated under a name that says so."""
    extrapolated = {"layers": cost.layers, "seconds": cost.extrapolated_seconds, "from": _how(cost)}
    return {**asdict(cost), "seconds_per_layer": cost.seconds_per_layer, "extrapolated": extrapolated}


def show(cost: "QuantizeCost") -> None:
    """Print stages by layer, memory and the extrapolation."""
    stages = list(dict.fromkeys(name for each in (*cost.layer_seconds, cost.once_seconds) for name in each))
    table = Table(f"{cost.model}, {cost.scheme}", *(f"layer {i}, s" for i in range(len(cost.layer_seconds))), "once, s")
    for stage in stages:
        table.add_row(stage, *(_seconds(each.get(stage)) for each in (*cost.layer_seconds, cost.once_seconds)))
    table.add_row("all", *(_seconds(sum(each.values())) for each in (*cost.layer_seconds, cost.once_seconds)))
    out.print(table)
    lines = [
        f"{cost.rows} sequences of {cost.length} tokens on {cost.device}, {cost.bits_per_weight:.3f} bits per weight"
    ]
    if cost.device_peak_bytes is not None and cost.device_reserved_bytes is not None:
        peak, reserved = cost.device_peak_bytes / 1e9, cost.device_reserved_bytes / 1e9
        lines.append(f"peak of GPU memory {peak:.2f} GB, {reserved:.2f} GB with what torch keeps for reuse")
    lines.append(f"peak of host memory {cost.host_peak_bytes / 1e9:.2f} GB")
    lines.append(f"whole model, extrapolated ({_how(cost)}): {cost.extrapolated_seconds / 60:.1f} min")
    for line in (*lines, *cost.left_out):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _how(cost: "QuantizeCost") -> str:
    return f"{cost.layers} x {cost.seconds_per_layer:.2f} s a layer + {sum(cost.once_seconds.values()):.2f} s once"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
