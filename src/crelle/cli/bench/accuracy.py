"""crelle bench accuracy: the error of the kernels."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from crelle.cli.common.console import Json, Model, Results, Threads, out, print_json, tracking, use_threads

if TYPE_CHECKING:
    from crelle.eval.accuracy import ProductError, Quality

NAME = "accuracy"


def run(
    model: Model,
    text: Annotated[
        Path | None, typer.Option("--text", help="Evaluation text (UTF-8); default: Python's documentation.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Evaluate only the first N tokens of the text.")
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens per evaluation window.")] = 1024,
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", help="Number of tokens to evaluate one by one, as in decoding (slow).")
    ] = 512,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="Kernel to compare; repeatable. Default: all kernels that support the model."),
    ] = None,
    threads: Threads = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Measure the rounding error of the kernels: perplexity with each kernel, and matrix products against f64.

    Perplexity is measured over whole prompts and token by token, which run different code. The products use random
    matrices with 1 to 8 bits, on every instruction set of this machine; errors are relative to the largest output.

    **Example**: `crelle bench accuracy out/smollm2-4bit --text wiki.txt --tokens 10240`
    """
    from crelle.bench.environment import write_result
    from crelle.eval.accuracy import perplexities, product_errors
    from crelle.eval.text import read_text

    use_threads(threads)
    corpus = read_text(text)
    with tracking("perplexity") as track:
        quality, left_out = perplexities(
            model,
            corpus,
            kernels=kernel or (),
            context=context,
            tokens=tokens,
            step_tokens=step_tokens,
            progress=track,
        )
    with tracking("products") as track:
        errors = product_errors(track)
    measured = {
        "model": model.name,
        "perplexity": [asdict(q) for q in quality],
        "left_out": left_out,
        "products": [asdict(e) for e in errors],
    }
    if results:
        write_result(results, measured)
    if json:
        print_json(measured)
        return
    out.print(_perplexities(quality))
    for name, why in left_out.items():
        out.print(f"skipped {name}: {why}", highlight=False, markup=False, soft_wrap=True)
    if errors:
        out.print(_errors(errors))


def _perplexities(quality: "list[Quality]") -> Table:
    table = Table(Column("kernel", no_wrap=True), "mode", "perplexity", "vs. first row", "tokens", "window")
    for q in quality:
        table.add_row(
            q.kernel, q.read_as, f"{q.perplexity:.5f}", f"{q.above_first:+.4%}", str(q.tokens), str(q.context)
        )
    return table


def _errors(errors: "list[ProductError]") -> Table:
    """One row per instruction set and format: the largest error over all bits."""
    table = Table(Column("largest error", no_wrap=True), "format", "exact", "with outliers", "int8", "with outliers")
    for isa, form in dict.fromkeys((e.isa, e.format) for e in errors):
        alike = [e for e in errors if (e.isa, e.format) == (isa, form)]
        columns = ([getattr(e, n) for e in alike] for n in ("exact", "exact_outliers", "int8", "int8_outliers"))
        table.add_row(isa, form, *(f"{max(column):.1e}" for column in columns))
    return table
