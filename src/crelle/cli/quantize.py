"""crelle quantize: make a model small."""

from pathlib import Path
from typing import Annotated

import typer

from crelle.cli.console import Json, Threads, err, out, print_json, tracking, use_threads
from crelle.errors import SchemeError

NAME = "quantize"


def run(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face directory or a .gguf file.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint directory to make.")],
    scheme: Annotated[str, typer.Option("--scheme", help="The recipe, e.g. rtn:bits=4,group=128.")],
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="BITS|SCHEME", help="Quantize the embedding and the output head too."),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="PATTERN=SCHEME", help="Another recipe for some matrices; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a killed run stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a model, a layer at a time, into a new checkpoint directory.

    **Schemes**

    - `fp16`, `bf16`, `fp32`: only stored at that width

    - `rtn:bits=4,group=128`: round to nearest, seconds, good at 4 bits and more (`symmetric=true` drops zero points)

    - `bcq:bits=3,group=64`: binary coding by alternating least squares, better at 2 and 3 bits
      (`rounds=0` greedy, `bias=false` without z)

    `group` is how many inputs share a scale: smaller is better and larger on disk; `group=row` shares over a row.

    **Examples**

    `crelle quantize ./Llama-3.2-1B out/llama-3bit --scheme bcq:bits=3,group=64`

    `crelle quantize model.gguf out/m --scheme rtn:bits=3,group=64 --override '*.down_proj=rtn:bits=4,group=64'`

    `crelle quantize model.gguf out/m --scheme bcq:bits=2,group=64 --head 4`

    A run that was killed continues with `--resume` and ends in the same bytes.
    """
    from crelle.quantizers.driver import quantize

    use_threads(threads)
    overrides: dict[str, str] = {}
    for item in override or []:
        pattern, eq, recipe = item.partition("=")
        if not eq or not recipe:
            raise SchemeError(f"--override should read PATTERN=SCHEME, got '{item}'")
        overrides[pattern] = recipe
    with tracking("quantizing") as track:
        report = quantize(
            source,
            target,
            scheme,
            head=head_scheme(head),
            overrides=overrides,
            resume=resume,
            overwrite=overwrite,
            progress=track,
        )
    if json:
        print_json(report)
        return
    if report.resumed_units:
        err.print(f"took over {report.resumed_units} finished shards")
    out.print(
        f"{report.out}: {report.scheme}, {report.bits_per_weight:.3f} bits per weight, "
        f"{report.bytes / 1e6:.1f} MB of quantized weights, {report.seconds:.1f} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def head_scheme(head: str | None) -> str | None:
    """Return the scheme that --head means: a bare number of bits is round to nearest in groups of 64."""
    return f"rtn:bits={head},group=64" if head and head.lstrip("-").isdigit() else head
