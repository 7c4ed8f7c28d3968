"""The sampling options, declared once for all commands that generate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.common.option_groups import Command, option_group

if TYPE_CHECKING:
    from crelle.engine.sampling.sampler import Sampling
    from crelle.formats.storage.open import Weights

_OPTIONS: dict[str, tuple[str, Any, Any, str]] = {  # field of Sampling: option, type, default, help
    "max_tokens": ("--max-tokens", int, 128, "Maximum number of tokens to generate."),
    "temperature": ("--temperature", float, 0.0, "Sampling temperature; 0 always picks the most likely token."),
    "top_k": ("--top-k", int, 0, "Sample from the k most likely tokens; 0: all tokens."),
    "top_p": ("--top-p", float, 1.0, "Sample from the most likely tokens whose probabilities add up to this value."),
    "min_p": (
        "--min-p",
        float,
        0.0,
        "Drop tokens whose probability is below this fraction of the largest probability.",
    ),
    "repetition_penalty": ("--repetition-penalty", float, 1.0, "Values above 1 discourage repetition."),
    "seed": ("--seed", int | None, None, "Random seed; the same seed gives the same text."),
    "stop": ("--stop", list[str] | None, None, "Stop at this string; can be repeated."),
}
CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.95}  # for a model that recommends nothing
_OF_THE_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_options(**defaults: Any) -> Callable[[Command], Command]:
    """Put the options where a command has its parameter `sampling`; it then gets one Sampling made of them."""
    options = {
        name: (Annotated[kind, typer.Option(option, help=text)], defaults.get(name, default))
        for name, (option, kind, default, text) in _OPTIONS.items()
    }
    return option_group("sampling", options, _sampling)


def chat_sampling_options(**defaults: Any) -> Callable[[Command], Command]:
    """Put the same options, whose defaults the model decides: the command gets a ChatSampling."""
    options: dict[str, tuple[Any, Any]] = {}
    for name, (option, kind, default, text) in _OPTIONS.items():
        if name in _OF_THE_MODEL:
            own = f" Default: the model's generation_config.json, else {CHAT_DEFAULTS.get(name, default):g}."
            options[name] = (Annotated[kind | None, typer.Option(option, help=text + own)], None)
        else:
            options[name] = (Annotated[kind, typer.Option(option, help=text)], defaults.get(name, default))
    return option_group("sampling", options, ChatSampling.of)


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """The sampling options that the user gave; the model decides the others."""

    given: dict[str, Any]

    @classmethod
    def of(cls, **given: Any) -> "ChatSampling":
        """Keep the options that were given, and refuse values that make no sense before a model is loaded."""
        found = cls({name: value for name, value in given.items() if value is not None})
        _sampling(**{"stop": None} | found.given)
        return found

    def for_model(self, weights: "Weights") -> tuple["Sampling", str]:
        """Return the sampling for a model, and where its defaults come from."""
        from crelle.engine.generation_config import FILE, recommended_sampling

        recommended = recommended_sampling(weights)
        source = f"from {FILE}" if recommended else "Crelle's defaults"
        if set(recommended or CHAT_DEFAULTS) <= self.given.keys():
            source = "from the command line"
        return _sampling(**{"stop": None} | (recommended or CHAT_DEFAULTS) | self.given), source


def _sampling(stop: list[str] | None, **given: Any) -> "Sampling":
    from crelle.engine.sampling.sampler import Sampling

    return Sampling(**given, stop=tuple(stop or ()))
