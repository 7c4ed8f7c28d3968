"""The sampling options, declared once for all commands that generate."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.option_groups import Command, option_group

if TYPE_CHECKING:
    from crelle.engine.sampler import Sampling

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


def sampling_options(**defaults: Any) -> Callable[[Command], Command]:
    """Put the options where a command has its parameter `sampling`; it then gets one Sampling made of them."""
    options = {name: (kind, defaults.get(name, default)) for name, (kind, default) in _OPTIONS.items()}
    return option_group("sampling", options, _sampling)


def _sampling(stop: list[str] | None, **given: Any) -> "Sampling":
    from crelle.engine.sampler import Sampling

    return Sampling(**given, stop=tuple(stop or ()))
