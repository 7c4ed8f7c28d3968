"""crelle export: a checkpoint in another project's format."""

from pathlib import Path
from typing import Annotated

import typer

from crelle.cli.console import Json, Model, out, print_json, tracking, warn
from crelle.errors import SchemeError

NAME = "export"


def run(
    model: Model,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make.")],
    to: Annotated[str, typer.Option("--to", help="The format: gptq.")] = "gptq",
    gptq_version: Annotated[
        int, typer.Option("--gptq-version", help="1: older readers, stores zero - 1; 2: any zero point.")
    ] = 2,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if Crelle wrote it and all in it.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a quantized model as a directory that vLLM, GPTQModel and transformers load, bit for bit.

    For uniform grids of 2, 3, 4 and 8 bits; binary-coded matrices have no place in GPTQ and are refused.

    **Example**: `crelle quantize SRC out/m --scheme rtn:bits=4,group=128`, then `crelle export out/m out/m-gptq`
    """
    from crelle.formats.destination import destination, refuse_overlap
    from crelle.formats.exporters.gptq import export_gptq
    from crelle.formats.open import open_weights

    if to != "gptq":
        raise SchemeError(f"there is no export to '{to}'; choose: gptq")
    refuse_overlap(destination(target), model)
    told: list[str] = []
    with tracking("exporting") as track:
        facts = export_gptq(
            open_weights(model), target, version=gptq_version, overwrite=overwrite, progress=track, warn=told.append
        )
    warn(told)
    if json:
        print_json({"out": str(target), "quantization_config": facts, "warnings": told})
        return
    layout = f"{facts['bits']} bits, group {facts['group_size']}, {facts['checkpoint_format']}"
    out.print(f"{target}: {layout}", highlight=False, markup=False, soft_wrap=True)
