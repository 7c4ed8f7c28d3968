"""crelle generate: continue a prompt."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.cli.common.console import Json, Memory, Model, err, print_json, print_text, reading_input, use_threads
from crelle.cli.common.option_groups import ModelOptions, SpeculationOptions, model_options, speculation_options
from crelle.cli.common.sampling import sampling_options
from crelle.cli.views.acceptance import drafts

if TYPE_CHECKING:
    from crelle.engine.sampling.sampler import Sampling

NAME = "generate"


@model_options
@speculation_options
@sampling_options(max_tokens=128)
def run(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue; - reads it from standard input.")],
    sampling: "Sampling",
    options: ModelOptions,
    speculation: SpeculationOptions,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Continue a prompt and print the text as it is generated.

    **Examples**

    `crelle generate out/smollm2-3bit --prompt "The capital of France is" --max-tokens 20`

    `crelle generate model.gguf --prompt - --temperature 0.8 --top-p 0.95 --seed 1 < prompt.txt`
    """
    use_threads(options.threads)
    with reading_input():
        text = sys.stdin.read() if prompt == "-" else prompt
    llm = options.load(model, speculation, memory)
    options.compile(llm, model, [len(llm.encode(text))])
    pieces = llm.stream(text, sampling)
    if not json:
        print_text(text)
    for piece in pieces:
        if not json:
            print_text(piece.text)
        if done := piece.completion:
            if json:
                print_json(done)
                return
            print()
            err.print(
                f"{len(done.tokens)} tokens, {done.tokens_per_second:.1f} per second, {drafts(done)}"
                f"first token after {done.first_token_seconds:.2f} s, finish reason: {done.finish_reason}",
                style="dim",
            )
