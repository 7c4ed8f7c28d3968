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
    repeat: Annotated[
        int, typer.Option("--repeat", help="Number of processes to start; the fastest one is reported.")
    ] = 5,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue by one token.")] = PROMPT,
    results: Results = None,
    json: Json = False,
) -> None:
    """Time `crelle generate` in new processes, from the start of the process to the first token, and show the parts.

    Separate instrumented runs measure the parts. The tokenizer and the weights load concurrently, so the parts can add
    up to more than the total. If CRELLE_CACHE is empty, the first start on a GPU compiles its kernels.

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
    table = Table("time to", "fastest", "median")
    m = measured
    table.add_row("first token", f"{m.first_token_seconds:.2f} s", f"{m.first_token_seconds_median:.2f} s")
    table.add_row("process exit", f"{m.process_seconds:.2f} s", f"{m.process_seconds_median:.2f} s")
    out.print(table)
    out.print(
        "time to the first token of each start: " + ", ".join(f"{s:.2f}" for s in m.starts) + " s", highlight=False
    )
    parts = Table("part of the fastest instrumented run", "ms")
    for name, seconds in m.parts.items():
        parts.add_row(name, f"{1e3 * seconds:.0f}")
    out.print(parts)
