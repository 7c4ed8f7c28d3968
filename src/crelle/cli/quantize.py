"""crelle quantize: quantize a model into a checkpoint."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.cli.common.calibration import CalibrationText
from crelle.cli.common.completion import models, schemes
from crelle.cli.common.console import (
    Device,
    Devices,
    Json,
    Threads,
    device_or_devices,
    err,
    out,
    print_json,
    tracking,
    use_threads,
    warn,
)
from crelle.cli.views.quantize_cost import DeviceMemory, as_json, show
from crelle.cli.views.quantize_plan import show_next, show_plan, show_time
from crelle.cli.views.quantize_progress import stages
from crelle.cli.views.training_plot import draw_training
from crelle.errors import CrelleError, SchemeError, UnsupportedError

if TYPE_CHECKING:
    from crelle.formats.storage.open import Weights

NAME = "quantize"
SCHEME = "auto:bits=4.35"  # crelle.quantize_job.effort.SCHEME, without loading torch for --help
_HEAD = "8"  # bits: half the bytes of a step of a small model are its head's, and 8 bits lose nothing that shows


def run(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A Hugging Face directory (plain, GPTQ, AWQ, …) or a .gguf file.",
            autocompletion=models,
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint directory to make.")],
    scheme: Annotated[
        str | None, typer.Option("--scheme", help=f"The recipe; default: {SCHEME}.", autocompletion=schemes)
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="none|BITS|SCHEME",
            help="How embedding and output head are quantized; default: 8 bits where the layers are.",
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="PATTERN=SCHEME", help="Another recipe for some matrices; repeatable."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan of `crelle search`: bits and group of every matrix.")
    ] = None,
    effort: Annotated[
        str,
        typer.Option(
            "--effort",
            metavar="fast|balanced|best",
            help="How long to work on it; chooses what other options leave open.",
        ),
    ] = "balanced",
    calib: CalibrationText = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Calibration sequences. Default: by the effort.")] = None,
    length: Annotated[int, typer.Option("--length", help="Tokens per sequence.")] = 512,
    own: Annotated[
        int | None,
        typer.Option("--own", help="Extra calibration sequences sampled from the model. Default: by the effort."),
    ] = None,
    device: Device = "auto",
    devices: Devices = None,
    memory: DeviceMemory = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: measure a layer, print what all would take.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was killed.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if Crelle wrote it and all in it.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a model, a layer at a time, into a new checkpoint directory.

    **Schemes**

    - `auto:bits=3.35`: the recommended recipe (default: `auto:bits=4.35`), at most that many bits per weight of the
      layers, every scale counted. `--effort` says how long to work on it: on a GPU `fast` takes seconds, `balanced` a
      minute or two, `best` adds end-to-end training; on a CPU `balanced` takes about ten minutes for a small model

    - `fp16`, `bf16`, `fp32`: only stored at that width

    - `keep`: every matrix as SRC has it, e.g. GPTQ or GGUF's Q4_0: a lossless conversion

    - `rtn:bits=4,group=128`: round to nearest, seconds, good at 4 bits and more (`symmetric=true` drops zero points)

    - `bcq:bits=3,group=64`: binary coding by alternating least squares, better at 2 and 3 bits
      (`rounds=0` greedy, `bias=false` without z)

    - `gptq:bits=3,group=128`: error feedback on calibration data (`free=true`: affine grids);
      `awq:bits=4,group=128`: activation-aware scales; `hbcq:bits=3,group=128`: binary coding with error feedback

    - `bcq-nested:bits=4,group=128`: one checkpoint that serves 2, 3 and 4 bits

    - `mixed:four=0.25,outliers=0.002,group=16`: sensitive groups of input channels at 4 bits, the others at 2, single
      weights at 16; `tune=short` and `tune=full` train it

    - `atom:w=4,a=4,kv=4,group=128,outliers=128`: integer weights and activations (3, 4 or 8 bits), the channels with
      the largest activations at 8 bits; `a=16`: weights only; `levels=2`: two-level scales; `tune=short`, `tune=full`

    `auto`, `gptq`, `awq`, `hbcq`, `bcq-nested`, `mixed` and `atom` calibrate on data: `--calib FILE`. Without it they
    take Python's documentation and text sampled from the model itself.

    `group` is how many inputs share a scale: smaller is better and larger on disk; `group=row` shares over a row.

    **Examples**

    `crelle quantize ./Llama-3.2-1B out/llama`

    `crelle quantize ./Llama-3.2-1B out/llama-3bit --scheme auto:bits=3.35 --effort best --calib text.txt`

    `crelle quantize model.gguf out/m --scheme rtn:bits=3,group=64 --override '*.down_proj=rtn:bits=4,group=64'`

    `crelle quantize model.gguf out/m --scheme bcq:bits=2,group=64 --head 4`

    The embedding and the output head have 8 bits where the layers are quantized: `--head none` leaves them as they
    are, `--head 4` makes them smaller. Bits per weight are those of the layers.

    `--dry-run` quantizes the first layer only, into a temporary directory, and prints stages, minutes and gigabytes
    that the whole model would take on this machine. `--memory 16GB` bounds what calibration uses of a GPU.

    `--devices 0,1` spreads calibration and training over several GPUs (`all`: all that are visible): sequences of the
    calibration data, matrices of a stage, rows of training batches. Results differ from one GPU's in their last digits.

    A run that was killed continues with `--resume` and ends in the same bytes. A scheme that trains leaves its losses
    in OUT/training.json and plots them in OUT/training.png.
    """
    from crelle.engine.memory import parse_bytes
    from crelle.eval.text import read_text
    from crelle.formats.storage.destination import destination, refuse_existing, refuse_overlap
    from crelle.formats.storage.open import open_weights
    from crelle.quantize_job.data import CalibrationData
    from crelle.quantize_job.first_layers import layer_count
    from crelle.quantize_job.run import dry_run as measured
    from crelle.quantize_job.run import effort_for, estimate_for, quantize

    use_threads(threads)
    refuse_overlap(destination(target), source, calib, plan)
    if not dry_run:
        refuse_existing(destination(target), resume=resume, overwrite=overwrite)
    overrides: dict[str, str] = {}
    for item in override or []:
        pattern, eq, recipe = item.partition("=")
        if not eq or not recipe:
            raise SchemeError(f"--override should read PATTERN=SCHEME, got '{item}'")
        overrides[pattern] = recipe
    if plan is not None:
        scheme, planned = _planned(plan, scheme)
        overrides |= {m: s for m, s in planned.items() if m not in overrides}
    if (rows is not None and rows < 1) or length < 8:
        raise SchemeError(f"--rows must be at least 1 and --length at least 8, got {rows} and {length}")
    if own is not None and own < 0:
        raise SchemeError(f"--own must be 0 or more sequences, got {own}")
    text = CalibrationData(text="" if calib is None else read_text(calib), rows=rows, length=length, own=own)
    where = device_or_devices(context, device, devices)
    opened = open_weights(source)
    chosen = effort_for(opened, scheme, effort, text=text, device=where, devices=devices, overrides=overrides)
    head = head_scheme(head, chosen.scheme)
    options = {
        "effort": chosen,
        "text": text,
        "device": where,
        "devices": devices,
        "head": head,
        "overrides": overrides,
        "memory": None if memory is None else parse_bytes(memory),
    }
    if dry_run:
        with tracking("measuring") as track:
            cost = measured(source, progress=track, **options)  # type: ignore[arg-type]
        print_json(as_json(cost)) if json else show(cost)
        return
    show_plan(opened, chosen, device=where, head=head, calib=calib, length=_length(opened, length))
    expected = None
    if devices is None:
        with suppress(CrelleError), err.status("measuring this machine"):  # what is wrong, the run says better
            expected = estimate_for(
                source,
                chosen,
                text=text,
                device=where,
                head=head,
                memory=options["memory"],  # type: ignore[arg-type]
            )
    show_time(None if expected is None else expected.seconds)
    parts = None if expected is None else expected.parts
    count = layer_count(opened)
    del opened
    with stages(parts, count) as track:
        report = quantize(
            source,
            target,
            resume=resume,
            overwrite=overwrite,
            progress=track,
            **options,  # type: ignore[arg-type]
        )
    draw_training(report.out, report.losses, report.block_losses)
    warn(report.warnings)
    if json:
        print_json({**asdict(report), "estimated_seconds": None if expected is None else expected.seconds})
        return
    if report.resumed_units:
        err.print(f"resumed with {report.resumed_units} finished shards")
    out.print(
        f"{report.out}: {report.scheme}, {report.bits_per_weight:.3f} bits per weight, "
        f"{report.bytes / 1e6:.1f} MB of quantized weights, {report.seconds:.1f} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    show_next(source, report.out)


def _length(weights: "Weights", length: int) -> int:
    """Return the tokens of a calibration sequence: never more than the model's context."""
    from crelle.models.loader import read_spec

    try:
        return min(length, read_spec(weights).context)
    except UnsupportedError:  # a family that is quantized all the same, without data
        return length


def _planned(path: Path, scheme: str | None) -> tuple[str, dict[str, str]]:
    """Return the scheme and the overrides of a plan file."""
    from crelle.quantizers.search.plan_file import read_plan

    plan = read_plan(path)
    return scheme or plan.scheme, dict(plan.overrides)


def head_scheme(head: str | None, scheme: str) -> str | None:
    """Return the scheme that --head means: a bare number of bits is round to nearest in groups of 64."""
    from crelle.quantizers.base import GroupedConfig
    from crelle.quantizers.scheme import parse

    if head is None:
        head = _HEAD if isinstance(parse(scheme), GroupedConfig) else "none"
    if head == "none":
        return None
    if not head.lstrip("-").isdigit():
        return head
    return f"rtn:bits={head},group=64" + (",symmetric=true" if head == "8" else "")  # as GGUF's Q8_0 has it
