"""crelle bench quantize: how long quantizing a model of a real shape takes, stage by stage."""

from typing import Annotated

import typer

from crelle.cli.common.console import (
    Device,
    Devices,
    Json,
    Results,
    Threads,
    device_or_devices,
    print_json,
    tracking,
    use_threads,
)
from crelle.cli.views.quantize_cost import DeviceMemory, as_json, show

NAME = "quantize"


def run(
    context: typer.Context,
    shape: Annotated[str, typer.Option("--shape", help="Model shape, e.g. llama3-8b; the weights are synthetic.")],
    scheme: Annotated[str, typer.Option("--scheme", help="Quantization scheme.")] = "gptq:bits=3,group=128",
    layers: Annotated[int, typer.Option("--layers", help="Number of layers to quantize and time.")] = 1,
    rows: Annotated[int, typer.Option("--rows", help="Number of calibration sequences.")] = 128,
    length: Annotated[int, typer.Option("--length", help="Tokens per calibration sequence.")] = 2048,
    device: Device = "auto",
    devices: Devices = None,
    memory: DeviceMemory = None,
    threads: Threads = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Quantize the first layers of a model with synthetic weights and estimate the time and memory of all layers.

    The layers have their real shape and run the code of `crelle quantize` with all calibration data; nothing is
    downloaded. The time of the whole model is extrapolated: the time of the last measured layer times the number of
    layers, plus the work that is done once. No disk is read: the weights are sampled on the device.

    **Example**: `crelle bench quantize --shape llama3-8b --scheme gptq:bits=3,group=128 --layers 2 --device cuda`
    """
    from crelle.bench.environment import write_result
    from crelle.bench.quantize import bench_quantize
    from crelle.engine.memory.plan import parse_bytes

    use_threads(threads)
    budget = None if memory is None else parse_bytes(memory)
    with tracking("quantizing") as track:
        cost = bench_quantize(
            shape,
            scheme,
            device=device_or_devices(context, device, devices),
            devices=devices,
            layers=layers,
            rows=rows,
            length=length,
            memory=budget,
            progress=track,
        )
    if results:
        write_result(results, as_json(cost))
    if json:
        print_json(as_json(cost))
        return
    show(cost)
