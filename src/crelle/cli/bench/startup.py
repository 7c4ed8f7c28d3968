"""crelle bench startup: from the shell to the first token."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from crelle.cli.common.console import Json, Model, Results, out, print_json, tracking

NAME = "startup"
PROMPT = "The capital of France is"


def run(
    model: Model,
    repeat: Annotated[int, typer.Option("--repeat", help="Fresh processes to start; the quickest counts.")] = 5,
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue by one token.")] = PROMPT,
    results: Results = None,
    json: Json = False,
) -> None:
    """Time `crelle generate` in fresh processes, from the shell to the first token, and show its parts.

    Plain runs give the times, further ones under a watch the parts. The tokenizer is read beside the weights, so parts
    may add up to more than the whole. With an empty CRELLE_CACHE the first start on a GPU compiles its kernels.

    **Example**: `crelle bench startup out/smollm2-4bit --repeat 10`
    """
    from crelle.bench.environment import write_result
    from crelle.bench.startup import measure

    with tracking("starting") as track:
        measured = measure(model, prompt=prompt, repeat=repeat, progress=track)
    if results:
        write_result(results, asdict(measured))
    if json:
        print_json(measured)
        return
    table = Table("from the start to", "quickest", "median")
    m = measured
    table.add_row("the first token", f"{m.first_token_seconds:.2f} s", f"{m.first_token_seconds_median:.2f} s")
    table.add_row("the end of the process", f"{m.process_seconds:.2f} s", f"{m.process_seconds_median:.2f} s")
    out.print(table)
    out.print("starts in order, to the first token: " + ", ".join(f"{s:.2f}" for s in m.starts) + " s", highlight=False)
    parts = Table("part of the quickest watched run", "ms")
    for name, seconds in m.parts.items():
        parts.add_row(name, f"{1e3 * seconds:.0f}")
    out.print(parts)
