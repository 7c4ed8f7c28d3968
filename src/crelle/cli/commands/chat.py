"""crelle chat: talk to a model in the terminal."""

import re
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.cli.common.console import Json, Memory, Model, err, print_json, print_text, reading_input, use_threads
from crelle.cli.common.option_groups import ModelOptions, SpeculationOptions, model_options, speculation_options
from crelle.cli.common.sampling import ChatSampling, chat_sampling_options
from crelle.cli.views.acceptance import drafts
from crelle.errors import CrelleError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator

    from crelle.cli.views.conversation import Conversation
    from crelle.engine.llm import LLM
    from crelle.engine.sampling.sampler import Sampling

NAME = "chat"
_PROMPT = 128  # tokens of a message up to which kernels are compiled ahead
_HELP = """\
/help     show this list
/reset    start a new conversation (the system message stays)
/quit     end the chat; Ctrl-D does the same
Ctrl-C    stop the reply; at an empty prompt, press it twice to quit"""


@model_options
@speculation_options
@chat_sampling_options(max_tokens=512)
def run(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", help="System message for the assistant.")] = None,
    *,
    sampling: ChatSampling,
    options: ModelOptions,
    speculation: SpeculationOptions,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Chat with a model. Type /help for the commands and /quit to leave; Ctrl-C stops a reply.

    The model's own chat template formats the conversation. When it no longer fits the context, the oldest turns are
    dropped. Sampling follows the model's generation_config.json, or else temperature 0.7 and top-p 0.95.

    In scripts, each line of standard input is one message, and an empty line or the end of the input ends the chat.
    With `--json` the whole conversation is printed as one object at the end: `echo "Hi" | crelle chat OUT --json`.
    """
    from crelle.cli.views.conversation import Conversation
    from crelle.engine.compile_ahead import prompt_sizes

    use_threads(options.threads)
    llm = options.load(model, speculation, memory)
    if not llm.tokenizer.chats:
        raise UnsupportedError(f'{model} has no chat template; use `crelle generate {model} --prompt "…"` instead')
    chosen, source = sampling.for_model(llm.weights)
    talk = Conversation(llm, chosen, system)
    options.compile(llm, model, prompt_sizes(_PROMPT))
    if _at_a_terminal():
        _banner(llm, model, chosen, source)
        _interactive(talk, json)
    else:
        while line := _read_line():
            _show(talk, _send(talk, line), json)
    if json:
        print_json({"messages": talk.messages, "dropped_messages": talk.dropped, "sampling": asdict(chosen)})


def _banner(llm: "LLM", model: Path, sampling: "Sampling", source: str) -> None:
    _say(f"{model.resolve().name}: {llm.describe()}")
    rules = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
    rules += f", top-k {sampling.top_k}" * (sampling.top_k > 0) + f", min-p {sampling.min_p:g}" * (sampling.min_p > 0)
    if sampling.repetition_penalty != 1:
        rules += f", repetition penalty {sampling.repetition_penalty:g}"
    _say(f"sampling: {rules} ({source}), at most {sampling.max_tokens} tokens per reply")
    _say("Type /help for the commands, /quit or Ctrl-D to leave. Ctrl-C stops a reply.")


def _interactive(talk: "Conversation", json: bool) -> None:
    """Ask and answer until the user leaves."""
    interrupted = False  # the last thing that the user did was to press Ctrl-C
    while True:
        try:
            line = _ask()
        except EOFError:
            err.print()
            return
        except KeyboardInterrupt:
            err.print()
            if _half_typed():
                interrupted = False
                continue
            if interrupted:
                return
            _say("Press Ctrl-C again or type /quit to leave.")
            interrupted = True
            continue
        interrupted = False
        if re.fullmatch(r"/[a-z]+", line):
            if line in ("/quit", "/exit", "/bye"):
                return
            _command(talk, line)
        elif line:
            try:
                pieces = _send(talk, line)
            except CrelleError as e:  # too long, or the template refuses it: the conversation goes on without it
                _say(str(e))
            else:
                interrupted = not _show(talk, pieces, json)


def _command(talk: "Conversation", line: str) -> None:
    if line == "/help":
        _say(_HELP)
    elif line == "/reset":
        talk.reset()
        _say("Started a new conversation.")
    else:
        _say(f"Unknown command {line}; /help lists the commands.")


def _send(talk: "Conversation", line: str) -> "Generator[str]":
    """Return the pieces of the answer to a message, and say which older messages made room for it."""
    before = talk.dropped
    pieces = talk.answer(line)
    if talk.dropped > before:
        _say(f"The context is full: the oldest {talk.dropped - before} messages were dropped.")
    return pieces


def _show(talk: "Conversation", pieces: "Generator[str]", json: bool) -> bool:
    """Print an answer as it comes; return False if Ctrl-C stopped it."""
    try:
        with closing(pieces):
            for piece in pieces:
                if not json:
                    print_text(piece)
    except KeyboardInterrupt:
        if not _at_a_terminal():
            raise
        _say("\n(stopped)")
        return False
    if not json:
        print()
    done = talk.completion
    if done is not None and done.drafted and _at_a_terminal():
        _say(f"({drafts(done)}{done.tokens_per_second:.1f} tokens per second)")
    if done is not None and done.finish_reason == "length" and _at_a_terminal():
        full = len(done.tokens) < talk.sampling.max_tokens
        _say("(the context is full)" if full else f"(stopped after {len(done.tokens)} tokens: --max-tokens)")
    return True


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _half_typed() -> str:
    """Return what stood on the line that Ctrl-C cleared."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline and sys.stdout.isatty() else ""


def _ask() -> str:
    """Return the next line that a person types."""
    with reading_input():
        if sys.stdout.isatty():
            with suppress(ImportError):  # Windows has none
                import readline  # noqa: F401  # which gives `input` line editing and a history
            return input("> ").strip()
        err.print("> ", end="")  # standard output goes elsewhere, where the prompt has no place
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.strip()


def _read_line() -> str:
    """Return the next line of a pipe or a file; empty at its end."""
    with reading_input():
        return sys.stdin.readline().strip()


def _say(text: str) -> None:
    err.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
