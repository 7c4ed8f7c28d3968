"""crelle bench accuracy: what the kernels' rounding costs."""

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
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text; default: Python's documentation.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Use only the first N tokens of the text.")] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens in a window.")] = 1024,
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", help="Tokens to read one by one, as decoding does; slower.")
    ] = 512,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Kernels to compare; repeatable. Default: all that can run it.")
    ] = None,
    threads: Threads = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Measure what a kernel's rounding costs: perplexity through each kernel, and each product against f64.

    Perplexity is measured as a prompt and token by token, which run through different code. The products are random
    ones, on every instruction set of this machine, 1 to 8 bits; their error is relative to the largest output.

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
        out.print(f"without {name}: {why}", highlight=False, markup=False, soft_wrap=True)
    if errors:
        out.print(_errors(errors))


def _perplexities(quality: "list[Quality]") -> Table:
    table = Table(Column("kernel", no_wrap=True), "read as", "perplexity", "above the first", "tokens", "window")
    for q in quality:
        table.add_row(
            q.kernel, q.read_as, f"{q.perplexity:.5f}", f"{q.above_first:+.4%}", str(q.tokens), str(q.context)
        )
    return table


def _errors(errors: "list[ProductError]") -> Table:
    """One line an instruction set and format: the largest error of all bits."""
    table = Table(Column("largest error", no_wrap=True), "format", "exact", "with outliers", "int8", "with outliers")
    for isa, form in dict.fromkeys((e.isa, e.format) for e in errors):
        alike = [e for e in errors if (e.isa, e.format) == (isa, form)]
        columns = ([getattr(e, n) for e in alike] for n in ("exact", "exact_outliers", "int8", "int8_outliers"))
        table.add_row(isa, form, *(f"{max(column):.1e}" for column in columns))
    return table
