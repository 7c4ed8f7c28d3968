"""One answer of a chat, as it grows: reasoning, content and tool calls."""

from dataclasses import dataclass, field
from typing import Protocol

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.server.reasoning import ReasoningSplitter

_TAIL = 8  # tokens of a prompt that may open the reasoning


@dataclass(slots=True)
class ToolCall:
    """A call, or in a stream the next part of one: then id and name come with its first part only."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parts:
    """What became certain with a piece of text."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ToolParser(Protocol):
    """Finds tool calls in an answer."""

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """Return content and parts of calls that became certain."""
        ...


class ChatAnswer:
    """Collects the parts of one answer."""

    def __init__(self, thinks: bool | None = None, tools: ToolParser | None = None) -> None:
        """thinks: whether the prompt ends within reasoning; None: the model's template has no mark for it."""
        self._splitter = None if thinks is None else ReasoningSplitter(thinks)
        self._tools = tools
        self.reasoning, self.content, self.reasoning_tokens = "", "", 0
        self.calls: list[ToolCall] = []

    def push(self, text: str, *, token: bool = False, final: bool = False) -> Parts:
        """Take a piece of text and whether a token came with it; return what became certain."""
        thought, content = ("", text) if self._splitter is None else self._splitter.push(text, final=final)
        self.reasoning_tokens += token and self._splitter is not None and self._splitter.reasoning
        calls = list[ToolCall]()
        if self._tools is not None:
            content, calls = self._tools.push(content, final=final)
        self.reasoning += thought
        self.content += content
        for call in calls:
            if call.index == len(self.calls):
                self.calls.append(ToolCall(call.index, call.id, call.name, ""))
            self.calls[call.index].arguments += call.arguments
        return Parts(thought, content, calls)


def thinks(tokenizer: Tokenizer, prompt: list[int]) -> bool | None:
    """Whether an answer to this prompt begins with reasoning; None: the model's template has no mark for it."""
    if not tokenizer.thinks:
        return None
    return tokenizer.decode(prompt[-_TAIL:], special=True).rstrip().endswith("<think>")
