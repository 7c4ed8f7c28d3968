r"""A task's description: NAME.yaml beside its data NAME.jsonl, one JSON object a line.

    type: multiple_choice         the likeliest of several endings of one prompt
    prompt: "{query}\nAnswer:"    a template: {query} is the field `query` of a line
    choices: choices              the field with the endings, a list of strings
    answer: gold                  the field with the index of the right one, from 0
    delimiter: " "                what stands between prompt and ending; this is the default

    type: shared_ending           the prompt after which one ending is likeliest (WinoGrande)
    prompts: context_options      the field with the prompts, a list of strings
    ending: "{continuation}"      a template
    answer: gold

    type: last_word               whether the likeliest tokens are the last word of a text (LAMBADA)
    text: "{text}"                a template

    type: generate                whether the generated text is the answer (exact match, white space around it apart)
    prompt: "{question}\nAnswer:"
    answer: answer                the field with the answer: a string, or a list of those that are right
    max_tokens: 32
    stop: ["\n"]                  strings that end the text; this is the default

Any type: `data: FILE.jsonl` where the data has another name.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from crelle.errors import FormatError, SchemeError
from crelle.formats.storage.io import is_plain_name, read_bounded, shown

_BUILT_IN = Path(__file__).parent
_MAX_BYTES = 1 << 16  # of a description
FIELD = re.compile(r"\{(\w+)\}")  # in a template
_REQUIRED = {
    "multiple_choice": ("prompt", "choices", "answer"),
    "shared_ending": ("prompts", "ending", "answer"),
    "last_word": ("text",),
    "generate": ("prompt", "answer", "max_tokens"),
}
_OPTIONAL = {"multiple_choice": ("delimiter",), "shared_ending": ("delimiter",), "last_word": (), "generate": ("stop",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """What a task asks, and where its data lies; which settings there are depends on the type."""

    name: str
    type: str
    data: Path
    prompt: str = ""
    prompts: str = ""
    choices: str = ""
    ending: str = ""
    text: str = ""
    answer: str = ""
    delimiter: str = " "
    max_tokens: int = 0
    stop: tuple[str, ...] = ("\n",)

    @property
    def settings(self) -> dict[str, Any]:
        """All that results depend on, but for the data."""
        return {key: value for key, value in asdict(self).items() if key != "data"}


def known_tasks(data: Path) -> list[str]:
    """Return the names of the built-in tasks and of those that a data folder describes."""
    return sorted({file.stem for folder in (_BUILT_IN, data) for file in folder.glob("*.yaml")})


def find_task(name: str, data: Path) -> TaskSpec:
    """Return a task: as the data folder describes it, else the built-in description."""
    if not data.is_dir():
        raise FormatError(f"{data} is not a folder; `data` takes the folder with the tasks' files (piqa.jsonl, …)")
    file = data / f"{name}.yaml"
    if not is_plain_name(file.name) or not file.is_file():
        file = _BUILT_IN / f"{name}.yaml"
        if name not in known_tasks(_BUILT_IN):
            raise SchemeError(
                f"there is no task {shown(name)}; known are {', '.join(known_tasks(data))}, and {data} may describe "
                "others (NAME.yaml, docs/guide/evaluate.md)"
            )
    return parse_spec(name, file, data)


def parse_spec(name: str, file: Path, data: Path) -> TaskSpec:
    """Return the task that a file describes, or say what is wrong with it."""
    try:
        given = yaml.safe_load(read_bounded(file, _MAX_BYTES))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as e:
        raise FormatError(f"{file} is not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(given, dict):
        raise FormatError(f"{file} should hold settings (type: …), but holds {shown(given)}")
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise FormatError(f"{file}: 'type' should be one of {', '.join(_REQUIRED)}, not {shown(kind)}")
    needed, allowed = _REQUIRED[kind], ("type", "data", *_REQUIRED[kind], *_OPTIONAL[kind])
    if missing := [key for key in needed if key not in given]:
        raise FormatError(f"{file}: a task of type {kind} needs '{missing[0]}'")
    if unknown := [key for key in given if key not in allowed]:
        raise FormatError(f"{file}: {kind} has no setting {shown(unknown[0])}, only {', '.join(allowed)}")
    settings = _checked({key: value for key, value in given.items() if key not in ("type", "data")}, file)
    found = given.get("data", f"{name}.jsonl")
    if not isinstance(found, str) or not is_plain_name(found):
        raise FormatError(f"{file}: 'data' should be the name of a file beside it, not {shown(found)}")
    return TaskSpec(name=name, type=kind, data=data / found, **settings)


def _checked(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    found = dict(settings)
    for key, value in settings.items():
        if key == "max_tokens":
            fine, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 1, "a number from 1 on"
        elif key == "stop":
            fine = isinstance(value, list) and all(isinstance(s, str) and s for s in value)
            wanted, found[key] = "a list of strings", tuple(value) if fine else ()
        else:
            fine, wanted = isinstance(value, str) and (bool(value) or key == "delimiter"), "a string"
        if not fine:
            raise FormatError(f"{file}: '{key}' should be {wanted}, not {shown(value)}")
    return found
