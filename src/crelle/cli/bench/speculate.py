"""crelle bench speculate: decoding with tokens that are guessed, and without."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from rich.table import Table

from crelle.cli.bench.rows import ResultFile, Rows, show
from crelle.cli.common.console import Json, use_threads
from crelle.cli.common.option_groups import ModelOptions, SpeculationOptions, model_options
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.bench.load.speculation import Kind
    from crelle.engine.llm import LLM

NAME = "speculate"


@model_options
def run(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="Crelle checkpoint, Hugging Face directory, or .gguf file; or --shape."),
    ] = None,
    clients: Annotated[str, typer.Option("--clients", help="Numbers of sequences at once, e.g. 1,16.")] = "1",
    speculate: Annotated[
        str | None,
        typer.Option("--speculate", help="What guesses tokens: ngram (default) or draft, e.g. ngram:tokens=5."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="The model that guesses, or the bits of a nested checkpoint.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="Kinds of prompts: summary, edit and prose (default: all), or random."),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Pairs of runs, one with drafts and one without; one more goes first.")
    ] = 5,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens per prompt that answers repeat.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens per completion.")] = 128,
    exact: Annotated[
        bool,
        typer.Option("--exact/--no-exact", help="Batch-invariant engines, whose answers must be equal, or faster."),
    ] = True,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Instead of MODEL: a model shape with random weights, e.g. llama2-7b.")
    ] = None,
    scheme: Annotated[str, typer.Option("--scheme", help="With --shape: its quantization scheme.")] = "fp16",
    draft_shape: Annotated[
        str | None, typer.Option("--draft-shape", help="With --shape: the shape of the draft model, e.g. llama-160m.")
    ] = None,
    draft_scheme: Annotated[
        str | None, typer.Option("--draft-scheme", help="Its quantization scheme; default: that of --scheme.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option("--acceptance", help="Simulate that each guess is right with this probability, 0 to 1."),
    ] = None,
    results: ResultFile = None,
    *,
    options: ModelOptions,
    json: Json = False,
) -> None:
    """Decode the same prompts with guessed tokens and without, alternating, and check that the answers are equal.

    With --no-exact on a GPU they may differ as they do from batch to batch; the share of equal ones is reported.
    Prompts that answers repeat are Crelle's own texts (summary) and source files (edit); prose shows what guessing
    costs where it does not help. With --shape and --acceptance, models of random weights run at their real cost, and
    whether a guess is right is decided by lot.

    **Example**: `crelle bench speculate out/m --clients 1,64 --out bench/results/speculation`

    **Example**: `crelle bench speculate --shape llama2-7b --draft-shape llama-160m --acceptance 0.7 --device cuda`
    """
    from crelle.bench.load.decode_throughput import parse_batches
    from crelle.bench.load.speculation import Kind, measure
    from crelle.engine.speculation.settings import Speculation

    if (model is None) == (shape is None):
        raise SchemeError("the benchmark needs either a MODEL or --shape")
    speculate = speculate or ("draft" if draft or draft_shape else "ngram")
    if Speculation.parse(speculate).method == "off" or rounds < 1 or tokens < 2:
        raise SchemeError("the benchmark needs --speculate ngram or draft, a round and two tokens at least")
    kinds = prompts.split(",") if prompts else ["random"] if shape else ["summary", "edit", "prose"]
    if odd := [k for k in kinds if k not in get_args(Kind) or (shape and k != "random")]:
        raise SchemeError(f"--prompts must be of {', '.join(get_args(Kind))}, and random with --shape; got '{odd[0]}'")
    use_threads(options.threads)
    sizes = parse_batches(clients, "--clients")
    llm, name = _load(model, shape, scheme, draft_shape, draft_scheme, SpeculationOptions(speculate, draft), options)
    rows = Rows(results)
    for n in sizes:
        for kind in cast("list[Kind]", kinds):
            how = {"exact": exact, "acceptance": acceptance}
            one = partial(measure, llm, name, speculate, kind, n, rounds, prompt, tokens, **how)  # type: ignore[arg-type]
            rows.add(f"{n} clients, {kind}", one)
    if rows.finish(json, drawn=False):
        table = Table("clients", "prompts", "tokens/s", "without", "speedup", "accepted", "guessed", "steps", "without")
        for r in rows.rows:
            speeds = f"{r.tokens_per_second:.1f}", f"{r.plain_tokens_per_second:.1f}", f"{r.speedup:.2f}"
            counts = map(str, (r.accepted, r.drafted, r.steps, r.plain_steps))
            table.add_row(str(r.clients), r.prompts, *speeds, *counts)
        show(table)
    rows.end(json)


def _load(
    model: Path | None,
    shape: str | None,
    scheme: str,
    draft_shape: str | None,
    draft_scheme: str | None,
    speculation: SpeculationOptions,
    options: ModelOptions,
) -> "tuple[LLM, str]":
    """Return the model with what guesses for it, and its scheme."""
    from crelle.bench.load.model_sources import random_llm
    from crelle.engine.speculation.draft_model import Draft
    from crelle.formats.kv.pages import KVFormat
    from crelle.formats.storage.open import scheme_of
    from crelle.models.loader import choose_device

    if model is not None:
        if draft_shape:
            raise SchemeError("--draft-shape goes with --shape; a MODEL takes --draft")
        llm = options.load(model, speculation)
        return llm, scheme_of(llm.weights)
    assert shape is not None
    device = choose_device(options.device)
    llm = random_llm(shape, scheme, device, kernel=options.kernel)
    llm.kv = KVFormat.parse(options.kv) if options.kv else llm.kv
    if draft_shape is not None:
        how = draft_scheme or scheme
        llm.draft = Draft(random_llm(draft_shape, how, device).model, f"{draft_shape} {how}")
    return llm, scheme
