r"""How models write tool calls, and the grammars that calls must match.

    hermes    <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>           Qwen, Hermes, SmolLM3
    llama     {"name": …, "parameters": {…}}                                     Llama 3: one call
    mistral   [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]                    Mistral

The chat template shows which. A template that knows no tools gets them as a system message, in the form of hermes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crelle.engine.sampling.grammar import SPACE, GrammarSpec
from crelle.engine.tokenization.tokenizer import Message, Tokenizer
from crelle.server.schema.strict_json import dumps, encode

Format = Literal["hermes", "llama", "mistral"]
_INSTRUCTIONS = """\
You may call functions to answer. They are given as JSON within <tools></tools>:
<tools>
{tools}
</tools>
For each call, write one JSON object with the function's name and its arguments:
<tool_call>
{{"name": "…", "arguments": {{…}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and what may be done with them."""

    tools: tuple[dict[str, Any], ...]  # as OpenAI writes them
    choice: str = "auto"  # auto or required
    named: str | None = None  # the one function that must be called
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice == "required" or self.named is not None

    @property
    def functions(self) -> list[dict[str, Any]]:
        found = [tool["function"] for tool in self.tools]
        return [f for f in found if self.named in (None, f["name"])]


def format_of(tokenizer: Tokenizer) -> Format:
    """Return how a model writes calls."""
    source = tokenizer.template or ""
    if "tools" not in source or "<tool_call>" in source:
        return "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    return "llama" if '"parameters"' in source or "<|python_tag|>" in source else "hermes"


def with_tools(messages: list[Message], tools: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[Message]:
    """Return a conversation for the template: with the tools in it, where the template knows none."""
    if "tools" in (tokenizer.template or ""):
        return messages
    text = _INSTRUCTIONS.format(tools="\n".join(encode(tool).decode() for tool in tools)) if tools else ""
    found = [_written(m) for m in messages]
    if text and found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{text}"}, *found[1:]]
    return [{"role": "system", "content": text}, *found] if text else found


def _written(message: Message) -> Message:
    """Write calls and results as text, for a template that knows only text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        "<tool_call>\n" + encode(call["function"]).decode() + "\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    text = "\n".join(filter(None, [message["content"], *calls]))
    return {"role": message["role"], "content": text}


def tool_grammar(use: ToolUse, form: Format, thinks: bool | None) -> GrammarSpec | None:
    """Return what an answer must match: calls where they are forced, and calls of strict functions in any case."""
    functions = use.functions
    if use.forced:
        rules = [_calls(form, use.parallel and use.named is None), *_functions(functions, form)]
        return GrammarSpec("lark", "\n".join([*reasoning(thinks), *rules]))
    if form != "hermes" or not any(f.get("strict") for f in functions):
        return None
    trigger = ["start: called* TEXT", "called: trigger body ending", 'trigger[lazy]: TEXT "<tool_call>\\n"']
    rules = ['ending: "\\n</tool_call>"', "TEXT: /(.|\\n)*/", *_functions(functions, form)]
    return GrammarSpec("lark", "\n".join([*trigger, *rules]))


def json_grammar(schema: str | dict[str, Any], thinks: bool | None) -> GrammarSpec:
    """Return the grammar of JSON that matches a schema, after the reasoning, where there is any."""
    if thinks is None:
        return GrammarSpec("json_schema", schema if isinstance(schema, str) else dumps(schema))
    text = schema if isinstance(schema, str) else dumps(schema)
    return GrammarSpec("lark", "\n".join([*reasoning(thinks), f"answer: %json {text}"]))


def reasoning(thinks: bool | None) -> list[str]:
    """Return the rules up to `answer`: a thinking model may think first."""
    if thinks is None:
        return ["start: answer"]
    begins = "thought" if thinks else '("<think>" thought)?'
    return [f"start: SPACE {begins} SPACE answer", "thought[lazy]: /(.|\\n)*<\\/think>/", "SPACE: /[ \\n]{0,4}/"]


def _calls(form: Format, several: bool) -> str:
    if form == "hermes":
        call = '"<tool_call>\\n" body "\\n</tool_call>"'
        return f'answer: call ("\\n" call)*\ncall: {call}' if several else f"answer: {call}"
    if form == "mistral":
        return 'answer: "[" body (", " body)* "]"' if several else 'answer: "[" body "]"'
    return "answer: body"


def _functions(functions: Sequence[dict[str, Any]], form: Format) -> list[str]:
    """Return the rules of a call's JSON."""
    names = " | ".join(f"f{i}" for i in range(len(functions)))
    key = "parameters" if form == "llama" else "arguments"
    rules = [f"body: {names}"]
    for i, f in enumerate(functions):
        head = dumps(f'{{"name": "{f["name"]}", "{key}": ')
        schema = {"type": "object", **(f.get("parameters") or {}), "x-guidance": {"whitespace_pattern": SPACE}}
        rules.append(f'f{i}: {head} %json {dumps(schema)} "}}"')
    return rules
