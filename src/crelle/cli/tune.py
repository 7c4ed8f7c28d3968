"""crelle tune: train a quantized model."""

from pathlib import Path
from typing import Annotated

import typer

from crelle.cli.common.console import (
    Device,
    Devices,
    Json,
    Threads,
    device_or_devices,
    out,
    print_json,
    tracking,
    use_threads,
    warn,
)
from crelle.cli.views.training_plot import draw_training
from crelle.errors import SchemeError

NAME = "tune"


def run(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A Crelle checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint directory to make.")],
    teacher: Annotated[
        Path | None,
        typer.Option(
            "--teacher", metavar="SRC", help="The full-precision model to distil from; default: language-model loss."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="What to train on. Default: Python's documentation."),
    ] = None,
    own: Annotated[int, typer.Option("--own", help="Sequences sampled from the teacher, besides the text.")] = 0,
    train: Annotated[
        str, typer.Option("--train", help="What trains: scales (codes fixed) or all (weights too; affine grids).")
    ] = "scales",
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps.")] = 200,
    batch: Annotated[int, typer.Option("--batch", help="Sequences per optimizer step.")] = 8,
    length: Annotated[int, typer.Option("--length", help="Tokens per sequence.")] = 512,
    rate: Annotated[
        float, typer.Option("--rate", help="Learning rate, in steps of the grid; scales move at half of it.")
    ] = 2e-3,
    seed: Annotated[int, typer.Option("--seed", help="For batches and for what the teacher samples.")] = 0,
    low_memory: Annotated[
        bool | None,
        typer.Option(
            "--low-memory/--fast",
            help="8-bit Adam and activation checkpointing, or neither. Default: what the device has room for.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was killed.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if Crelle wrote it and all in it.")
    ] = False,
    device: Device = "auto",
    devices: Devices = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Train the scales (and weights) of a quantized model end to end, and write a new checkpoint.

    With `--teacher` the loss is the KL divergence from the full-precision model; without, the plain
    language-model loss on the text: AlphaTuning to a task. The loss curve is plotted in OUT/training.png.

    **Examples**

    `crelle tune out/m-3bit out/m-3bit-tuned --teacher ./model --text calibration.txt --steps 500`

    `crelle tune out/m-3bit out/m-3bit-poems --text poems.txt`
    """
    from crelle.eval.text import read_text
    from crelle.formats.storage.destination import destination, refuse_overlap
    from crelle.quantize_job.run import tune_checkpoint
    from crelle.quantizers.training.blockwise import Training

    use_threads(threads)
    refuse_overlap(destination(target), source, teacher, text)
    if train not in ("scales", "all"):
        raise SchemeError(f"--train takes 'scales' or 'all', got '{train}'")
    if min(steps, batch) < 1 or length < 8 or not rate > 0:
        raise SchemeError("--steps and --batch must be at least 1, --length at least 8, --rate above 0")
    with tracking("training") as track:
        report = tune_checkpoint(
            source,
            teacher,
            target,
            Training(steps=steps, batch=batch, rate=rate, scale_rate=rate / 2, seed=seed),
            text=read_text(text),
            own=own,
            length=length,
            what="all" if train == "all" else "scales",
            device=device_or_devices(context, device, devices),
            devices=devices,
            resume=resume,
            overwrite=overwrite,
            low_memory=low_memory,
            progress=track,
        )
    draw_training(report.out, report.losses, {}, report.seconds)
    warn(report.warnings)
    if json:
        print_json(report)
        return
    first, last = (sum(part) / len(part) for part in (report.losses[:10], report.losses[-10:]))
    out.print(
        f"{report.out}: {report.trained:,} parameters trained in {report.seconds:.0f} s, "
        f"loss {first:.4f} to {last:.4f}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
