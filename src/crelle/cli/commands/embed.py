"""crelle embed: embeddings of texts by an encoder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crelle.cli.common.console import (
    Bits,
    Device,
    Json,
    KernelName,
    Model,
    Scales,
    Threads,
    out,
    print_json,
    use_threads,
)
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor

NAME = "embed"
_SHOWN = 12  # texts whose similarities are printed


def run(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts to embed.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Also embed each line of this UTF-8 file; - reads standard input.")
    ] = None,
    pooling: Annotated[
        Literal["mean", "cls"], typer.Option("--pooling", help="The mean over the tokens, or the first token.")
    ] = "mean",
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale embeddings to unit length.")
    ] = True,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Cut longer texts; default: the model's context.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Texts per forward pass.")] = 32,
    scales: Scales = None,
    bits: Bits = None,
    kernel: KernelName = None,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Embed texts with an encoder (BERT, MiniLM). `--json` prints the embeddings, otherwise their similarities.

    **Examples**

    `crelle embed out/minilm-3bit "A cat sleeps." "A kitten is napping." "Stocks fell."`

    `crelle embed out/minilm-3bit --file sentences.txt --json > embeddings.json`
    """
    from crelle.engine.embedding.embedder import Embedder

    use_threads(threads)
    given = [*(texts or []), *_lines(file)]
    if not given:
        raise SchemeError("there is no text to embed: give texts, or a file with --file")
    embedder = Embedder.load(model, scales=scales, device=device, kernel=kernel, bits=bits)
    found = embedder.embed(given, pooling=pooling, normalize=normalize, batch=batch, max_tokens=max_tokens)
    tokens = [len(embedder.encode(text, max_tokens)) for text in given]
    if json:
        print_json({"dimensions": embedder.width, "tokens": tokens, "embeddings": found.tolist()})
        return
    _show(given, found)


def _lines(file: Path | None) -> list[str]:
    import sys

    from crelle.eval.text import read_text

    if file is None:
        return []
    text = sys.stdin.read() if str(file) == "-" else read_text(file)
    return [line for line in text.splitlines() if line.strip()]


def _show(texts: list[str], found: "Tensor") -> None:
    """Print the cosine similarity of each text to the others."""
    import torch
    from rich.table import Table

    from crelle.printable import printable

    unit = torch.nn.functional.normalize(found[:_SHOWN], dim=-1)
    out.print(f"{len(found)} embeddings of {found.shape[1]} dimensions; cosine similarities:", highlight=False)
    table = Table("", *(str(i + 1) for i in range(len(unit))), "text")
    for i, row in enumerate((unit @ unit.T).tolist()):
        text = texts[i] if len(texts[i]) <= 50 else texts[i][:49] + "…"
        table.add_row(str(i + 1), *(f"{x:.2f}" for x in row), printable(text))
    out.print(table)
    if len(found) > _SHOWN:
        out.print(f"and {len(found) - _SHOWN} more; --json prints the embeddings", highlight=False)
