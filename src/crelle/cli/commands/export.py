"""crelle export: a checkpoint in another project's format."""

from pathlib import Path
from typing import Annotated, Any

import typer

from crelle.cli.common.console import Json, Model, out, print_json, tracking, warn
from crelle.errors import SchemeError

NAME = "export"
FORMATS = ("gptq", "awq", "compressed-tensors", "gguf")


def run(
    model: Model,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create; for gguf, the file to create.")],
    to: Annotated[str, typer.Option("--to", help=f"Target format: {', '.join(FORMATS)}.")] = "gptq",
    gptq_version: Annotated[
        int,
        typer.Option(
            "--gptq-version", help="GPTQ format version. 1: for older readers, which store zero - 1; 2: any zero point."
        ),
    ] = 2,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT, but only if Crelle created everything in it.")
    ] = False,
    json: Json = False,
) -> None:
    """Convert a quantized model to a format that vLLM, transformers or llama.cpp can load.

    The matrices of the layers keep their exact values. This works for uniform grids: gptq and compressed-tensors with
    2, 3, 4 and 8 bits (compressed-tensors also mxfp4 and nvfp4), awq with 4 bits, gguf with groups that are multiples
    of 32 (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0). The export fails if the format cannot represent a matrix exactly, for example
    a binary-coded one.

    There is one exception: if the format has no 8-bit embedding or head, these are written as fp16, which rounds some
    values. A warning prints how many, and by how much. `crelle quantize --head none` avoids this.

    **Example**: `crelle quantize SRC out/m --scheme rtn:bits=4,group=128`, then `crelle export out/m out/m-gptq`

    **Example**: `crelle quantize SRC out/m --scheme rtn:bits=4,group=32,symmetric=true`, then
    `crelle export out/m out/m.gguf --to gguf`
    """
    from crelle.formats.storage.destination import destination, refuse_overlap
    from crelle.formats.storage.open import open_weights

    if to not in FORMATS:
        raise SchemeError(f"unknown export format '{to}'; choose one of: {', '.join(FORMATS)}")
    if to != "gptq" and gptq_version != 2:
        raise SchemeError(f"--gptq-version applies to --to gptq, not to {to}")
    refuse_overlap(destination(target), model)
    warnings: list[str] = []
    with tracking("exporting") as track:
        weights = open_weights(model, encoded=True)
        if to == "gguf":
            from crelle.formats.exporters.gguf import export_gguf

            facts = export_gguf(weights, target, overwrite=overwrite, progress=track)
        else:
            from crelle.formats.exporters.directory import export_directory

            layout = _layout(to, gptq_version)
            facts = export_directory(weights, target, layout, overwrite=overwrite, progress=track, warn=warnings.append)
    warn(warnings)
    if json:
        print_json(
            {"out": str(target), **(facts if to == "gguf" else {"quantization_config": facts}), "warnings": warnings}
        )
        return
    out.print(f"{target}: {_in_words(to, facts)}", highlight=False, markup=False, soft_wrap=True)


def _layout(to: str, gptq_version: int) -> Any:
    from crelle.formats.exporters.awq import AWQLayout
    from crelle.formats.exporters.compressed_tensors import CompressedTensorsLayout
    from crelle.formats.exporters.gptq import GPTQLayout

    if to == "gptq":
        return GPTQLayout(gptq_version)
    return AWQLayout() if to == "awq" else CompressedTensorsLayout()


def _tensors(count: int, kind: str) -> str:
    return f"{count} {kind} tensor{'s' * (count != 1)}"


def _in_words(to: str, facts: dict[str, Any]) -> str:
    if to == "gguf":
        return f"{facts['architecture']}, " + ", ".join(_tensors(n, kind) for kind, n in facts["types"].items())
    if to == "compressed-tensors":
        kinds = [group["weights"] for group in facts["config_groups"].values()]
        return (
            "; ".join(f"{k['num_bits']} bits, group {k['group_size'] or 'row'}" for k in kinds) + f", {facts['format']}"
        )
    return f"{facts['bits']} bits, group {facts['group_size']}, {facts.get('checkpoint_format', facts.get('version'))}"
