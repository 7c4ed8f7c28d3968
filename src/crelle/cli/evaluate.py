"""crelle eval: perplexity, accuracy on tasks, and what a quantized model or cache changes."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from crelle.cli.console import Json, Model, err, out, print_json, tracking, use_threads
from crelle.cli.eval_tasks import TaskOptions, run_tasks, task_options
from crelle.cli.option_groups import ModelOptions, model_options
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.engine.llm import LLM
    from crelle.eval.perplexity import Perplexity

NAME = "eval"


@model_options
@task_options
def run(
    model: Model,
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text; default: Python's documentation.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens in a window; default: 2048, or what the model has.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Use only the first N tokens of the text.")] = None,
    bos: Annotated[bool, typer.Option("--bos/--no-bos", help="Start windows with BOS if the tokenizer does.")] = True,
    *,
    chosen: TaskOptions,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Compare with another model, such as the unquantized one: MODEL minus this."),
    ] = None,
    options: ModelOptions,
    kl: Annotated[
        bool, typer.Option("--kl", help="KL divergence of the next token's distribution from that of a 16-bit cache.")
    ] = False,
    kl_limit: Annotated[
        float | None, typer.Option("--kl-limit", help="With --kl: end with status 1 where its mean is above this.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure perplexity (lower is better), or with `--tasks` accuracy; `--against` compares with another model.

    Windows do not overlap. Each starts with BOS where the tokenizer adds one (BOS + context-1 tokens). The model that
    is measured is the very object that generates. `--kv 8` and `--kv 4` quantize the cache as well, and all tokens read
    it so (`crelle explain MODEL --kv 4` tells which path that takes).

    `--kl` runs every window twice, with a 16-bit cache and with the one of `--kv`, and tells mean and 99th percentile
    of the divergence in nats; `--kl-limit` makes a gate of it.

    `--against SRC` runs every window through both models and tells the ratio of perplexities, mean and 99th percentile
    of KL(SRC || MODEL) in nats, and how often both find the same token the likeliest. SRC runs with its own defaults.

    `--tasks` scores the endings of each item in `--data` (NAME.jsonl; NAME.yaml beside it describes a task of your own)
    and tells plain and length-normalised accuracy with standard errors; `--against` adds the difference item by item
    with the p-value of McNemar's exact test. With `--results` a run that was stopped goes on.

    **Example**: `crelle eval out/smollm2-3bit --text wiki.txt --context 1024 --tokens 20480`

    **Example**: `crelle eval out/smollm2-3bit --tasks piqa,arc_easy --data tasks --against smollm2 --results scored`

    **Example**: `crelle eval out/smollm2-3bit --text wiki.txt --kv k4v2 --kl --kl-limit 0.05`
    """
    from crelle.eval.perplexity import perplexity
    from crelle.eval.text import read_text

    if kl_limit is not None and not kl_limit >= 0:
        raise SchemeError(f"--kl-limit is a divergence in nats, at least 0, not {kl_limit:g}")
    chosen.check()
    if against is not None and (kl or kl_limit is not None):
        raise SchemeError("--against compares models and --kl caches of one model; give one of them")
    of_text = {
        "--text": text is not None,
        "--context": context is not None,
        "--tokens": tokens is not None,
        "--no-bos": not bos,
        "--kl": kl or kl_limit is not None,
    }
    if chosen.tasks is not None and (given := [name for name, there in of_text.items() if there]):
        raise SchemeError(f"{given[0]} is for perplexity over a text and --tasks for accuracy; give one of them")
    use_threads(options.threads)
    if chosen.tasks is not None:
        run_tasks(model, against, options, chosen, json)
        return
    corpus, llm = read_text(text), options.load(model)
    context = min(2048, llm.model.spec.context) if context is None else context
    if kl or kl_limit is not None:
        _divergence(llm, corpus, context, tokens, bos, kl_limit, json)
        return
    if against is not None:
        _against(llm, options.plain().load(against), corpus, context, tokens, bos, json)
        return
    with tracking("perplexity") as track:
        result = perplexity(llm, corpus, context=context, tokens=tokens, bos=bos, progress=track)
    if json:
        print_json(result)
    else:
        _print_perplexity(llm, result)


def _print_perplexity(llm: "LLM", result: "Perplexity") -> None:
    windows = f"{result.windows} windows of {result.context}" + (" with BOS" if result.bos else "")
    cache = f", cache {result.kv}" if llm.kv.coded else ""
    out.print(f"perplexity {result.perplexity:.4f} over {result.tokens} tokens, {windows}{cache}", highlight=False)


def _against(
    llm: "LLM", reference: "LLM", corpus: str, context: int, tokens: int | None, bos: bool, json: bool
) -> None:
    """Print a model's perplexity and how far its distributions are from a reference's."""
    from crelle.eval.divergence import model_divergence

    with tracking("KL divergence") as track:
        result, found = model_divergence(
            llm, reference, corpus, context=context, tokens=tokens, bos=bos, progress=track
        )
    if json:
        print_json(asdict(result) | {"against": {"model": str(reference.weights.path)} | asdict(found)})
        return
    _print_perplexity(llm, result)
    nats = f"KL mean {found.kl_mean:.4g}, 99% {found.kl_p99:.4g}, most {found.kl_max:.4g} nats"
    other = f"against {reference.weights.path}: perplexity {found.perplexity:.4f}, ratio {found.ratio:.4f}"
    out.print(
        f"{other}; {nats}; same likeliest token {found.top1_agreement:.2%}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _divergence(
    llm: "LLM", corpus: str, context: int, tokens: int | None, bos: bool, limit: float | None, json: bool
) -> None:
    """Print what the cache changes, then refuse it where that is above the limit."""
    from crelle.eval.kv_divergence import above_limit, kv_divergence

    with tracking("KL divergence") as track:
        found = kv_divergence(llm, corpus, context=context, tokens=tokens, bos=bos, progress=track)
    if json:
        print_json(asdict(found) | {"kl_limit": limit})
    else:
        table = Table("cache", "bits per value", "perplexity", "ratio", "KL mean", "KL 99%", "KL most")
        table.add_row("kv16", "16", f"{found.perplexity_16:.4f}", "1", "0", "0", "0")
        shown = f"{found.perplexity:.4f}", f"{found.ratio:.4f}"
        nats = (f"{x:.3g}" for x in (found.kl_mean, found.kl_p99, found.kl_max))
        table.add_row(found.kv, f"{found.bits_per_value:.4g}", *shown, *nats)
        out.print(table)
        windows = f"{found.windows} windows of {found.context}" + (" with BOS" if found.bos else "")
        out.print(f"{found.tokens} tokens, {windows}; KL in nats", highlight=False)
    if limit is not None and (sentence := above_limit(found, limit)):
        err.print(sentence, highlight=False, soft_wrap=True)
        raise typer.Exit(1)
