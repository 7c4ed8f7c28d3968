"""Errors name parameters as Python has them, `overwrite=True`; the command line prints its option: --overwrite."""

import re
from collections.abc import Sequence
from typing import Any

_PARAMETER = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")


def with_options(sentence: str, options: dict[str, str]) -> str:
    """Return a sentence with options {parameter: --option} instead of parameters; others stay as they are."""

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in options:
            return match[0]
        return options[name] if value in (None, "True") else f"{options[name]} {value.strip(chr(39))}"

    return _PARAMETER.sub(option, sentence)


def options_of(command: Any, words: Sequence[str]) -> dict[str, str]:
    """Return the options of the command that some words call, such as `bench decode`: {"gptq_version": "--gptq-…"}."""
    for word in words:
        if inner := getattr(command, "commands", {}).get(word):
            command = inner
    options = [option for p in command.params for option in p.opts if option.startswith("--")]
    return {option.removeprefix("--").replace("-", "_"): option for option in options}
