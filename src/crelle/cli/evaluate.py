"""crelle eval: perplexity."""

from pathlib import Path
from typing import Annotated

import typer

from crelle.cli.console import Json, Model, err, out, print_json, tracking, use_threads
from crelle.cli.option_groups import ModelOptions, model_options

NAME = "eval"


@model_options
def run(
    model: Model,
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text; default: Python's documentation.")] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens in a window.")] = 2048,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Use only the first N tokens of the text.")] = None,
    bos: Annotated[bool, typer.Option("--bos/--no-bos", help="Start windows with BOS if the tokenizer does.")] = True,
    *,
    options: ModelOptions,
    kv: Annotated[
        str,
        typer.Option(
            "--kv", help="Bits of the KV cache, e.g. 4, k4v2, kv4:group=64 or 4,layers.0=8 (docs/notes/kv.md)."
        ),
    ] = "16",
    json: Json = False,
) -> None:
    """Measure perplexity: lower is better, and the ratio to the unquantized model tells what quantizing cost.

    Windows do not overlap. Each starts with BOS where the tokenizer adds one (BOS + context-1 tokens). The model that
    is measured is the very object that generates. `--kv 8` and `--kv 4` quantize the cache as well, and all tokens read
    it so (`crelle explain MODEL --kv 4` tells which path that takes).

    **Example**: `crelle eval out/smollm2-3bit --text wiki.txt --context 1024 --tokens 20480`
    """
    from crelle.eval.perplexity import perplexity
    from crelle.eval.text import read_text
    from crelle.models.cache import why_not_fused

    use_threads(options.threads)
    corpus = read_text(text)
    llm = options.load(model, kv)
    if reason := why_not_fused(llm.kv, llm.model.device.type):
        err.print(f"runs layer by layer: {reason}", highlight=False, soft_wrap=True)
    with tracking("perplexity") as track:
        result = perplexity(llm, corpus, context=context, tokens=tokens, bos=bos, progress=track)
    if json:
        print_json(result)
    else:
        windows = f"{result.windows} windows of {result.context}" + (" with BOS" if result.bos else "")
        cache = f", cache {result.kv}" if llm.kv.coded else ""
        out.print(f"perplexity {result.perplexity:.4f} over {result.tokens} tokens, {windows}{cache}", highlight=False)
