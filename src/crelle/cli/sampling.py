"""The sampling options, declared once for all commands that generate."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

_OPTIONS: dict[str, tuple[Any, Any]] = {  # field of Sampling: (what typer reads, default)
    "max_tokens": (Annotated[int, typer.Option("--max-tokens", help="Stop after this many tokens.")], 128),
    "temperature": (Annotated[float, typer.Option("--temperature", help="0 = always the most likely token.")], 0.0),
    "top_k": (Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 = all.")], 0),
    "top_p": (
        Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens of this total probability.")],
        1.0,
    ),
    "min_p": (
        Annotated[float, typer.Option("--min-p", help="Drop tokens less likely than this share of the best one.")],
        0.0,
    ),
    "repetition_penalty": (
        Annotated[float, typer.Option("--repetition-penalty", help="Above 1: repeat less.")],
        1.0,
    ),
    "seed": (Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")], None),
    "stop": (Annotated[list[str] | None, typer.Option("--stop", help="End at this string; repeatable.")], None),
}


def sampling_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the options where a command has its parameter `sampling`; it then gets one Sampling made of them."""
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=defaults.get(name, default))
        for name, (kind, default) in _OPTIONS.items()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            from crelle.engine.sampler import Sampling

            chosen = {name: given.pop(name) for name in _OPTIONS}
            chosen["stop"] = tuple(chosen["stop"] or ())
            command(**given, sampling=Sampling(**chosen))

        shown: list[Parameter] = []
        for parameter in signature(command).parameters.values():
            shown += options if parameter.name == "sampling" else [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
        run.__signature__ = signature(command).replace(parameters=shown)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown}  # typer reads both
        return run

    return decorate
