"""crelle chat: talk to a model in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.cli.console import Json, Model, err, print_json, reading_input, use_threads
from crelle.cli.option_groups import ModelOptions, model_options
from crelle.cli.sampling import sampling_options

if TYPE_CHECKING:
    from crelle.engine.sampler import Sampling

NAME = "chat"
_PROMPT = 128  # tokens of a message up to which kernels are compiled ahead


@model_options
@sampling_options(max_tokens=512)
def run(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", help="What the assistant is told beforehand.")] = None,
    *,
    sampling: "Sampling",
    options: ModelOptions,
    json: Json = False,
) -> None:
    """Chat with a model: one line is one message; an empty line or Ctrl-D ends.

    The conversation is written with the model's own chat template. With `--json` the whole conversation is printed as
    one object at the end, so that it can be scripted: `echo "Hi" | crelle chat out/smollm2-3bit --json`.
    """
    from crelle.engine.compile_ahead import prompt_sizes
    from crelle.engine.tokenizer import Message

    use_threads(options.threads)
    llm = options.load(model)
    options.compile(llm, model, prompt_sizes(_PROMPT))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    while line := _ask():
        messages.append({"role": "user", "content": line})
        answer = ""
        for piece in llm.chat(messages, sampling):
            answer += piece.text
            if not json:
                print(piece.text, end="", flush=True)
        if not json:
            print()
        messages.append({"role": "assistant", "content": answer})
    if json:
        print_json({"messages": messages})


def _ask() -> str:
    """Return the next line; empty at the end of the input. The prompt sign shows only to a person."""
    if sys.stdin.isatty():
        err.print("[bold]>[/bold] ", end="")
    with reading_input():
        return sys.stdin.readline().strip()
