"""The lines of a task's data as items: what is asked, and what is right."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crelle.errors import FormatError
from crelle.eval.tasks.spec import FIELD, TaskSpec
from crelle.formats.storage.io import parse_json, read_bounded, shown

_MAX_BYTES = 1 << 30  # of a task's data


@dataclass(frozen=True, slots=True)
class Item:
    """One line: pairs of prompt and ending (a single one where there is no choice), and the answer."""

    line: int  # from 1
    pairs: tuple[tuple[str, str], ...]  # delimiters are part of the endings; generate: the prompt and ""
    lengths: tuple[int, ...]  # of the endings in characters without the delimiter
    right: int = 0  # which pair
    answers: tuple[str, ...] = ()  # generate: texts that are right


def read_items(spec: TaskSpec) -> list[Item]:
    """Return the items of a task; the first line that makes no sense is an error."""
    items = []
    for line, data in enumerate(read_bounded(spec.data, _MAX_BYTES).split(b"\n"), 1):
        if data.strip():
            items.append(_item(spec, line, _Fields(spec.data, line, parse_json(data, f"{spec.data}, line {line},"))))
    if not items:
        raise FormatError(f"{spec.data} has no items; it should hold one JSON object a line")
    return items


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one line; a missing one is a sentence with file, line and name."""

    file: Path
    line: int
    values: dict[str, Any]

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise FormatError(f"{self.file}, line {self.line}: the field '{name}' is missing")
        return self.values[name]

    def wrong(self, name: str, wanted: str) -> FormatError:
        value = shown(self.get(name))
        return FormatError(f"{self.file}, line {self.line}: the field '{name}' should be {wanted}, not {value}")

    def string(self, name: str) -> str:
        if not isinstance(value := self.get(name), str):
            raise self.wrong(name, "a string")
        return value

    def strings(self, name: str, least: int) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) < least or not all(isinstance(s, str) and s for s in value):
            raise self.wrong(name, f"a list of at least {least} strings that are not empty")
        return value

    def index(self, name: str, count: int) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
            raise self.wrong(name, f"a number from 0 to {count - 1}")
        return value

    def fill(self, template: str) -> str:
        """Return a template with the values of its fields."""
        return FIELD.sub(lambda m: self.string(m[1]), template)


def _item(spec: TaskSpec, line: int, fields: _Fields) -> Item:
    match spec.type:
        case "multiple_choice":
            prompt, choices = fields.fill(spec.prompt), fields.strings(spec.choices, 2)
            pairs = tuple((prompt, spec.delimiter + choice) for choice in choices)
            return Item(line, pairs, tuple(map(len, choices)), fields.index(spec.answer, len(choices)))
        case "shared_ending":
            prompts, ending = fields.strings(spec.prompts, 2), fields.fill(spec.ending)
            if not ending:
                raise FormatError(f"{spec.data}, line {line}: the ending is empty")
            pairs = tuple((prompt, spec.delimiter + ending) for prompt in prompts)
            return Item(line, pairs, (len(ending),) * len(pairs), fields.index(spec.answer, len(prompts)))
        case "last_word":
            text = fields.fill(spec.text).rstrip()
            word = (text.split() or [""])[-1]
            if word == text.strip():
                raise FormatError(f"{spec.data}, line {line}: the text should have at least two words")
            before = text[: -len(word)].rstrip()
            return Item(line, ((before, text[len(before) :]),), (len(word),))
        case _:
            answer = fields.get(spec.answer)
            answers = fields.strings(spec.answer, 1) if isinstance(answer, list) else [fields.string(spec.answer)]
            return Item(line, ((fields.fill(spec.prompt), ""),), (0,), answers=tuple(a.strip() for a in answers))
