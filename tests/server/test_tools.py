"""Tools and structured answers: how calls are found in a text, and the openai client's own ways to ask for them."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict
from tiny_server import Running, nested_llm, serving

from crelle.server.answers.chat_answer import ToolCall
from crelle.server.answers.tool_formats import Format, ToolUse, tool_grammar, with_tools
from crelle.server.answers.tool_parser import ToolCallParser

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Apply an operator to two numbers",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "operator": {"enum": ["+", "-", "*"]},
                "b": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["a", "operator", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
USER: Any = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(nested_llm()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


# Calls in a text ------------------------------------------------------------------------------------------------------

HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": "}</tool_call>\\""}}\n</tool_call>'
PARSED: list[tuple[Format, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Hello", "Hello", []),
    ("hermes", HERMES, "", [("f", '{"x": "}</tool_call>\\""}')]),
    ("hermes", f"I look.\n{HERMES}\n{HERMES}\n", "I look.", [("f", '{"x": "}</tool_call>\\""}')] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "g"}</tool_call>', "", [("g", '{"a": [1, {}]}')]),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"a": 1', "", [("g", '{"a": 1')]),
    ("hermes", "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ("hermes", "a <tool", "a <tool", []),
    ("hermes", "two\n\nlines ", "two\n\nlines ", []),
    ("llama", '{"name": "f", "parameters": {"a": "b"}}', "", [("f", '{"a": "b"}')]),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    ("llama", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("llama", '{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
    ("llama", 'Use {"name": "f"}', 'Use {"name": "f"}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        "mistral",
        ' [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": []}}]',
        "",
        [("f", "{}"), ("g", '{"b": []}')],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), PARSED)
def test_calls_are_found_however_the_text_comes(
    form: Format, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 5, 11, 1000):
        parser, said, found = ToolCallParser(form, {"f", "g"}), "", list[ToolCall]()
        for i in range(0, len(text) + size, size):
            more, parts = parser.push(text[i : i + size], final=i >= len(text))
            said += more
            for part in parts:
                if part.index == len(found):
                    assert part.id is not None
                    found.append(ToolCall(part.index, part.id, part.name, ""))
                else:
                    assert part.id is None
                found[part.index].arguments += part.arguments
        assert (said, [(c.name, c.arguments) for c in found]) == (content, calls)
        assert len({c.id for c in found}) == len(found)


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.sample(2)
def test_what_the_grammar_allows_the_parser_reads(form: Format, parallel: bool) -> None:
    """The grammar's own sentences: a walk through it by the random model's tokens."""
    from crelle import Sampling
    from crelle.engine.engine import Engine

    use = ToolUse((CALCULATOR, CLOCK), "required", parallel=parallel)
    grammar = tool_grammar(use, form, None)
    engine = Engine(nested_llm(), pages=400)
    handles = [
        engine.add("Hi", Sampling(max_tokens=600, temperature=1.0, seed=seed), grammar=grammar) for seed in range(12)
    ]
    engine.run()
    finished = [h.outputs[0].completion for h in handles if h.outputs[0].completion.finish_reason == "stop"]
    assert finished
    for completion in finished:
        parser = ToolCallParser(form, {"calculate", "clock"})
        content, parts = parser.push(completion.text, final=True)
        assert content == ""
        calls = [p for p in parts if p.name]
        assert len(calls) >= 1 if parallel and form != "llama" else len(calls) == 1
        assert all(
            isinstance(json.loads("".join(p.arguments for p in parts if p.index == c.index)), dict) for c in calls
        )


def test_a_template_without_tools_gets_them_as_text(server: Running) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]},
        {"role": "tool", "content": "noon", "tool_call_id": "x"},
    ]
    written = with_tools(messages, (CLOCK,), server.llm.tokenizer)
    assert [m["role"] for m in written] == ["system", "user", "assistant", "user"]
    assert '"clock"' in written[0]["content"]
    assert written[2]["content"] == '<tool_call>\n{"name":"clock","arguments":{}}\n</tool_call>'
    assert "noon" in written[3]["content"]


# The client -----------------------------------------------------------------------------------------------------------


def test_agent_loop_with_required_calls(client: OpenAI, server: Running) -> None:
    """Ten steps: each answer is a call, whose result goes back."""
    messages = list(USER)
    for step in range(10):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, tools=[CALCULATOR], tool_choice="required", parallel_tool_calls=False,
            max_tokens=400, temperature=1, seed=step,
        )  # fmt: skip
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        given = json.loads(call.function.arguments)
        assert given.keys() == {"a", "operator", "b"}
        result = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[given["operator"]](given["a"], given["b"])
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
        messages = [*USER, *messages[1:][-4:]]  # the context is short
    server.assert_empty()


def test_streamed_calls_are_the_whole_ones(client: OpenAI) -> None:
    options: Any = {
        "model": "tiny", "messages": USER, "tools": [CALCULATOR, CLOCK], "tool_choice": "required",
        "max_tokens": 500, "temperature": 1, "seed": 5, "n": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    calls: list[list[dict[str, Any]]] = [[], [], []]
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
            assert not choice.delta.content
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls[choice.index]):
                    assert part.id
                    assert part.type == "function"
                    calls[choice.index].append({"name": part.function.name, "arguments": ""})
                calls[choice.index][part.index]["arguments"] += part.function.arguments
    assert [ends[i] for i in range(3)] == [c.finish_reason for c in whole.choices]
    want = [
        [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls or []]
        for choice in whole.choices
    ]
    assert calls == want
    assert any(want)


def test_a_named_function_is_called_and_none_is_not(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": USER, "tools": [CALCULATOR, CLOCK], "max_tokens": 300, "seed": 1}
    named: Any = {"type": "function", "function": {"name": "clock"}}
    found = client.chat.completions.create(**options, tool_choice=named).choices[0]
    assert found.finish_reason in ("stop", "length")
    assert [c.function.name for c in found.message.tool_calls or []] == ["clock"]
    plain = client.chat.completions.create(**{**options, "max_tokens": 5}, tool_choice="none").choices[0]
    assert plain.message.tool_calls is None


class Event(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["meeting", "party"]
    day: int
    public: bool


def test_structured_outputs_of_the_client(client: OpenAI) -> None:
    found = client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Event, max_tokens=400, temperature=0.5, seed=2
    )
    assert found.choices[0].finish_reason == "stop"
    assert isinstance(found.choices[0].message.parsed, Event)
    tool = openai.pydantic_function_tool(Event)
    called = client.chat.completions.parse(
        model="tiny", messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Event)
    with client.chat.completions.stream(
        model="tiny", messages=USER, response_format=Event, max_tokens=400, temperature=0.5, seed=2
    ) as stream:
        assert stream.get_final_completion().choices[0].message.content == found.choices[0].message.content


@pytest.mark.parametrize(
    ("form", "want"),
    [
        ({"guided_choice": ["red", "green"]}, ["red", "green"]),
        ({"structured_outputs": {"choice": ["red", "green"]}}, ["red", "green"]),
        ({"guided_regex": "a{3}|b{3}"}, ["aaa", "bbb"]),
        ({"structured_outputs": {"regex": "a{3}|b{3}"}}, ["aaa", "bbb"]),
        ({"guided_grammar": 'root ::= "x" | "yy"'}, ["x", "yy"]),
        ({"guided_json": {"enum": ["p", 7]}}, ['"p"', "7"]),
        ({"guided_json": '{"const": null}'}, ["null"]),
    ],
    ids=str,
)
def test_vllms_spellings(client: OpenAI, form: dict[str, Any], want: list[str]) -> None:
    for create in (
        lambda: client.completions.create(model="tiny", prompt="Hi", max_tokens=30, n=4, extra_body=form).choices,
        lambda: client.chat.completions.create(model="tiny", messages=USER, max_tokens=30, extra_body=form).choices,
    ):
        texts = {(c.message.content if hasattr(c, "message") else c.text).strip() for c in create()}
        assert texts <= set(want)
    found = client.chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_object"}, max_tokens=1, temperature=0
    )
    assert (found.choices[0].message.content or "{").startswith("{")


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"extra_body": {"guided_json": {"type": "strin"}}}, "guided_json", "the JSON schema is invalid"),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex", "the regular expression is invalid"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_choice", "both set the form"),
        ({"extra_body": {"structured_outputs": {"grammar": "root ::= x"}}}, "structured_outputs.grammar", "Rule 'x'"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "two functions of the name 'clock'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}],
                "tool_choice": "required",
            },
            "tools",
            "invalid",
        ),
    ],
    ids=str,
)
def test_bad_forms_and_tools_are_refused(client: OpenAI, options: Any, param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as found:
        client.chat.completions.create(model="tiny", messages=USER, max_tokens=5, **options)
    assert found.value.param == param


# The Responses API ----------------------------------------------------------------------------------------------------

FLAT: Any = {"type": "function", **CALCULATOR["function"]}


def test_responses_are_the_answers_of_a_chat(client: OpenAI) -> None:
    options: Any = {"temperature": 0, "max_output_tokens": 12}
    found = client.responses.create(model="tiny", input="Hello", instructions="Be brief.", **options)
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    want = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    assert found.output_text == want.choices[0].message.content
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.usage is not None
    assert want.usage is not None
    assert found.usage.total_tokens == want.usage.total_tokens
    events = list(
        client.responses.create(model="tiny", input="Hello", instructions="Be brief.", **options, stream=True)
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == found.output_text
    assert events[-1].response.output_text == found.output_text


def test_responses_call_functions_and_take_results(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "tools": [FLAT], "parallel_tool_calls": False, "max_output_tokens": 300}
    first = client.responses.create(input="What is 2 + 2?", tool_choice="required", **options)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"a", "operator", "b"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    history: Any = [{"role": "user", "content": "What is 2 + 2?"}, call, result]
    again = client.responses.create(input=history, tool_choice="none", **{**options, "max_output_tokens": 5})
    assert again.output_text
    with client.responses.stream(input="What is 2 + 2?", tool_choice="required", **options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output[0].type == "function_call"


def test_responses_keep_to_a_schema_and_store_nothing(client: OpenAI) -> None:
    found = client.responses.parse(model="tiny", input="An event", text_format=Event, max_output_tokens=300)
    assert isinstance(found.output_parsed, Event)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
    bad: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="the JSON schema is invalid"):
        client.responses.create(model="tiny", input="Hi", text=bad)
