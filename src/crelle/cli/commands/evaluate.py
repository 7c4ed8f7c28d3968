"""crelle eval: perplexity, accuracy on tasks, and the divergence that a quantized model or cache causes."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from crelle.cli.common.console import Json, Model, err, out, print_json, tracking, use_threads
from crelle.cli.common.option_groups import ModelOptions, model_options
from crelle.cli.views.eval_tasks import TaskOptions, run_tasks, task_options
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.engine.llm import LLM
    from crelle.eval.perplexity import Perplexity

NAME = "eval"
DEFAULT_TOKENS = 20480  # 10 windows of 2048: minutes on two cores, where a whole book takes hours


@model_options
@task_options
def run(
    model: Model,
    text: Annotated[
        Path | None, typer.Option("--text", help="Evaluation text (UTF-8); default: Python's documentation.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens per window; default: 2048, or the model's context if that is shorter."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="N|all", help=f"Evaluate the first N tokens of the text; default: {DEFAULT_TOKENS}."
        ),
    ] = None,
    bos: Annotated[bool, typer.Option("--bos/--no-bos", help="Start windows with BOS if the tokenizer does.")] = True,
    *,
    chosen: TaskOptions,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Compare MODEL with this model, for example the unquantized one."),
    ] = None,
    options: ModelOptions,
    kl: Annotated[
        bool,
        typer.Option(
            "--kl", help="Measure the KL divergence of the next-token distribution from that of a 16-bit cache."
        ),
    ] = False,
    kl_limit: Annotated[
        float | None,
        typer.Option("--kl-limit", help="With --kl: exit with status 1 if the mean divergence is above this."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure perplexity (lower is better), or with `--tasks` accuracy; `--against` compares with another model.

    By default the first 20480 tokens of the text are evaluated; `--tokens all` evaluates the whole text. Compare
    perplexities only over the same text, context and number of tokens.

    Windows do not overlap. Each starts with BOS if the tokenizer adds one (BOS + context-1 tokens). The same
    model object runs evaluation and generation. `--kv 8` or `--kv 4` also quantizes the KV cache
    (`crelle explain MODEL --kv 4` prints the code path).

    `--kl` runs every window twice, with a 16-bit cache and with the cache of `--kv`, and reports the mean and the 99th
    percentile of the divergence in nats. With `--kl-limit` the command fails if the mean is above the limit.

    `--against SRC` runs every window through both models. It reports the ratio of perplexities, the mean and the 99th
    percentile of KL(SRC || MODEL) in nats, and how often both models have the same most likely token. SRC runs with its
    own defaults.

    `--tasks` scores the endings of each item in `--data` (NAME.jsonl; NAME.yaml next to it describes a custom task)
    and reports plain and length-normalised accuracy with standard errors. `--against` adds the difference per item
    with the p-value of McNemar's exact test. With `--results`, an interrupted run continues.

    **Example**: `crelle eval out/smollm2-3bit --text wiki.txt --context 1024 --tokens 20480`

    **Example**: `crelle eval out/smollm2-3bit --tasks piqa,arc_easy --data tasks --against smollm2 --results scored`

    **Example**: `crelle eval out/smollm2-3bit --text wiki.txt --kv k4v2 --kl --kl-limit 0.05`
    """
    from crelle.eval.perplexity import perplexity
    from crelle.eval.text import read_text

    if kl_limit is not None and not kl_limit >= 0:
        raise SchemeError(f"--kl-limit must be a divergence of at least 0 nats, got {kl_limit:g}")
    chosen.check()
    if against is not None and (kl or kl_limit is not None):
        raise SchemeError("--against compares two models and --kl two caches of one model; give only one of them")
    of_text = {
        "--text": text is not None,
        "--context": context is not None,
        "--tokens": tokens is not None,
        "--no-bos": not bos,
        "--kl": kl or kl_limit is not None,
    }
    if chosen.tasks is not None and (given := [name for name, there in of_text.items() if there]):
        raise SchemeError(f"{given[0]} applies to perplexity and --tasks to accuracy; give only one of them")
    wanted = _count(tokens)
    use_threads(options.threads)
    if chosen.tasks is not None:
        run_tasks(model, against, options, chosen, json)
        return
    corpus, llm = read_text(text), options.load(model)
    context = min(2048, llm.model.spec.context) if context is None else context
    limit = max(DEFAULT_TOKENS, context) if tokens is None else wanted
    if kl or kl_limit is not None:
        _divergence(llm, corpus, context, limit, bos, kl_limit, json)
        return
    if against is not None:
        _against(llm, options.plain().load(against), corpus, context, limit, bos, json)
        return
    with tracking("perplexity") as track:
        result = perplexity(llm, corpus, context=context, tokens=limit, bos=bos, progress=track)
    if json:
        print_json(result)
    else:
        _print_perplexity(llm, result)


def _count(tokens: str | None) -> int | None:
    """Return the value of --tokens; None: all tokens."""
    if tokens is None or tokens == "all":
        return None
    try:
        return int(tokens)
    except ValueError as e:
        raise SchemeError(f"--tokens must be a number or 'all', got '{tokens}'") from e


def _of_the_text(tokens: int, text_tokens: int, window: int) -> str:
    """Return how much of the text was evaluated; a remainder shorter than a window is not mentioned."""
    if text_tokens - tokens < window:
        return f"{tokens:,} tokens"
    return f"the first {tokens:,} of {text_tokens:,} tokens (--tokens all for the whole text)"


def _print_perplexity(llm: "LLM", result: "Perplexity") -> None:
    windows = f"{result.windows} windows of {result.context}" + (" with BOS" if result.bos else "")
    cache = f", cache {result.kv}" if llm.kv.coded else ""
    extent = _of_the_text(result.tokens, result.text_tokens, result.context)
    out.print(f"perplexity {result.perplexity:.4f} over {extent}, {windows}{cache}", highlight=False, soft_wrap=True)


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
    nats = f"KL mean {found.kl_mean:.4g}, p99 {found.kl_p99:.4g}, max {found.kl_max:.4g} nats"
    other = f"against {reference.weights.path}: perplexity {found.perplexity:.4f}, ratio {found.ratio:.4f}"
    out.print(
        f"{other}; {nats}; top-1 agreement {found.top1_agreement:.2%}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _divergence(
    llm: "LLM", corpus: str, context: int, tokens: int | None, bos: bool, limit: float | None, json: bool
) -> None:
    """Print the divergence that the cache causes; exit with 1 if it is above the limit."""
    from crelle.eval.kv_divergence import above_limit, kv_divergence

    with tracking("KL divergence") as track:
        found = kv_divergence(llm, corpus, context=context, tokens=tokens, bos=bos, progress=track)
    if json:
        print_json(asdict(found) | {"kl_limit": limit})
    else:
        table = Table("cache", "bits per value", "perplexity", "ratio", "KL mean", "KL p99", "KL max")
        table.add_row("kv16", "16", f"{found.perplexity_16:.4f}", "1", "0", "0", "0")
        shown = f"{found.perplexity:.4f}", f"{found.ratio:.4f}"
        nats = (f"{x:.3g}" for x in (found.kl_mean, found.kl_p99, found.kl_max))
        table.add_row(found.kv, f"{found.bits_per_value:.4g}", *shown, *nats)
        out.print(table)
        windows = f"{found.windows} windows of {found.context}" + (" with BOS" if found.bos else "")
        extent = _of_the_text(found.tokens, found.text_tokens, found.context)
        out.print(f"{extent}, {windows}; KL in nats", highlight=False, soft_wrap=True)
    if limit is not None and (sentence := above_limit(found, limit)):
        err.print(sentence, highlight=False, soft_wrap=True)
        raise typer.Exit(1)
