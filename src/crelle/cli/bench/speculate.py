"""crelle bench speculate: decoding with tokens that are guessed, and without."""

from functools import partial
from typing import Annotated, get_args

import typer
from rich.table import Table

from crelle.cli.bench.rows import ResultFile, Rows, show
from crelle.cli.common.console import Json, Model, use_threads
from crelle.cli.common.option_groups import ModelOptions, SpeculationOptions, model_options

NAME = "speculate"


@model_options
def run(
    model: Model,
    clients: Annotated[str, typer.Option("--clients", help="Numbers of sequences at once, e.g. 1,16.")] = "1",
    speculate: Annotated[
        str, typer.Option("--speculate", help="What guesses tokens: ngram or draft, e.g. ngram:tokens=5.")
    ] = "ngram",
    draft: Annotated[
        str | None, typer.Option("--draft", help="The model that guesses, or the bits of a nested checkpoint.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Pairs of runs, one with drafts and one without.")] = 5,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens per prompt that answers repeat.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens per completion.")] = 128,
    exact: Annotated[
        bool,
        typer.Option("--exact/--no-exact", help="Batch-invariant engines, whose answers must be equal, or faster."),
    ] = True,
    results: ResultFile = None,
    *,
    options: ModelOptions,
    json: Json = False,
) -> None:
    """Decode the same prompts with guessed tokens and without, alternating, and check that the answers are equal.

    With --no-exact on a GPU they may differ as they do from batch to batch; the share of equal ones is reported.
    Prompts that answers repeat are Crelle's own source files; prose shows what guessing costs where it does not help.

    **Example**: `crelle bench speculate out/m --clients 1,16 --out bench/results/speculation`
    """
    from crelle.bench.load.decode_throughput import parse_batches
    from crelle.bench.load.speculation import Kind, measure
    from crelle.engine.speculation.settings import Speculation
    from crelle.errors import SchemeError
    from crelle.formats.storage.open import scheme_of

    if Speculation.parse(speculate).method == "off" or rounds < 1 or tokens < 2:
        raise SchemeError("the benchmark needs --speculate ngram or draft, a round and two tokens at least")
    use_threads(options.threads)
    sizes, kinds = parse_batches(clients, "--clients"), get_args(Kind)
    llm = options.load(model, SpeculationOptions(speculate, draft))
    rows = Rows(results)
    for n in sizes:
        for kind in kinds:
            how = partial(measure, llm, scheme_of(llm.weights), speculate, kind, n, rounds, prompt, tokens, exact=exact)
            rows.add(f"{n} clients, {kind}", how)
    if rows.finish(json, drawn=False):
        table = Table("clients", "prompts", "tokens/s", "without", "speedup", "accepted", "guessed", "steps", "without")
        for r in rows.rows:
            speeds = f"{r.tokens_per_second:.1f}", f"{r.plain_tokens_per_second:.1f}", f"{r.speedup:.2f}"
            counts = map(str, (r.accepted, r.drafted, r.steps, r.plain_steps))
            table.add_row(str(r.clients), r.prompts, *speeds, *counts)
        show(table)
    rows.end(json)
