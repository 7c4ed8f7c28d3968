"""Finds tool calls in an answer, piece by piece; formats.py shows what they look like.

    text ──<tool_call> or { at the start──▶ head ──name and "arguments":──▶ arguments ──balanced──▶ tail ──▶ text, head

Arguments go on as the model writes them. A head in another order is read when the whole object is there; what turns out
to be no call is content.
"""

import json
import re
import secrets

from crelle.server.chat_answer import ToolCall
from crelle.server.reasoning import overlap
from crelle.server.tools.formats import Format

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # special tokens in most vocabularies, and then not part of the text
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_decoder = json.JSONDecoder()


class ToolCallParser:
    """The calls of one answer."""

    def __init__(self, form: Format, names: set[str]) -> None:
        """names: of the functions; JSON that names none of them is content."""
        self._marked, self._names = form == "hermes", names
        self._held, self._state, self._count = "", "start", 0
        self._depth, self._string, self._escaped = 0, False, False
        self._content, self._calls = "", list[ToolCall]()

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """Return content and parts of calls that became certain."""
        self._held += text
        self._content, self._calls = "", []
        while self._step(final):
            pass
        return self._content, self._calls

    def _step(self, final: bool) -> bool:
        """Go on as far as one state leads; False: more text is needed."""
        before = self._state, len(self._held)
        {
            "start": self._start,
            "text": self._text,
            "head": self._head,
            "arguments": self._arguments,
            "tail": self._tail,
            "plain": self._plain,
        }[self._state](final)
        return (self._state, len(self._held)) != before

    def _start(self, final: bool) -> None:
        """Look whether the answer begins with a call that no mark announces."""
        bare = self._held.lstrip()
        for mark in () if self._marked else _MARKS:
            if bare.startswith(mark):
                bare = bare[len(mark) :].lstrip()
            elif bare and mark.startswith(bare) and not final:
                return
        if self._marked or (bare and bare[0] not in "{["):
            self._state = "text" if self._marked else "plain"
        elif bare:
            self._held, self._state = bare.removeprefix("[").lstrip() if bare[0] == "[" else bare, "head"

    def _text(self, final: bool) -> None:
        at = self._held.find(_OPEN)
        if at >= 0:
            self._say(self._held[:at].rstrip() if self._held[:at].strip() or self._count else "")
            self._held, self._state = self._held[at + len(_OPEN) :], "head"
            return
        keep = 0 if final else overlap(self._held, _OPEN)
        ready = self._held[: len(self._held) - keep]
        spaces = 0 if final else len(ready) - len(ready.rstrip())  # white space before a call is none of the content
        cut = len(ready) - spaces
        self._say(self._held[:cut])
        self._held = self._held[cut:]

    def _say(self, text: str) -> None:
        self._content += text if text.strip() or not self._count else ""

    def _head(self, final: bool) -> None:
        if found := _HEAD.match(self._held):
            if not self._marked and found[1] not in self._names:
                self._state = "plain"
                return
            self._begin(found[1])
            self._held, self._state = self._held[found.end() :], "arguments"
            self._depth, self._string, self._escaped = 0, False, False
            return
        bare = self._held.lstrip()
        try:
            value, end = _decoder.raw_decode(bare)
        except json.JSONDecodeError:
            if final or (bare and bare[0] != "{"):
                self._no_call()
            return
        name, given = (
            (value.get("name"), value.get("arguments", value.get("parameters", {})))
            if (isinstance(value, dict))
            else (None, None)
        )
        if not isinstance(name, str) or (not self._marked and name not in self._names):
            self._no_call()
            return
        self._begin(name)
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        self._calls.append(ToolCall(self._count - 1, None, None, written))
        self._held, self._state = bare[end:], "tail"

    def _no_call(self) -> None:
        self._held = (_OPEN if self._marked else "") + self._held
        self._state = "plain"

    def _begin(self, name: str) -> None:
        self._calls.append(ToolCall(self._count, f"call_{secrets.token_hex(12)}", name, ""))
        self._count += 1

    def _arguments(self, final: bool) -> None:
        end = len(self._held)
        for i, c in enumerate(self._held):
            if self._string:
                self._string = self._escaped or c != '"'
                self._escaped = c == "\\" and not self._escaped
            elif c == '"':
                self._string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    end, self._state = i + 1, "tail"
                    break
        if self._held[:end]:
            self._calls.append(ToolCall(self._count - 1, None, None, self._held[:end]))
        self._held = self._held[end:]

    def _tail(self, final: bool) -> None:
        if self._marked:
            at = self._held.find(_CLOSE)
            if at >= 0:
                self._held, self._state = self._held[at + len(_CLOSE) :], "text"
            elif final:
                self._held = ""
            return
        self._held = self._held.lstrip(" \n\t}],;")
        if self._held:
            self._state = "head" if self._held[0] == "{" else "plain"

    def _plain(self, final: bool) -> None:
        self._say(self._held)
        self._held = ""
