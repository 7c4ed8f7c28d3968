"""Sentences for people, in place of msgspec's own, and what msgspec alone would let through or refuse."""

from typing import Any

import pytest

from crelle.server.errors import ApiError
from crelle.server.requests import RequestParser
from crelle.server.schema.schemas import ModelInfo
from crelle.server.schema.strict_json import parse

PARSER = RequestParser(ModelInfo("tiny", 40_000, 259, (2, 3, 4), 500, 8, 3, 4))
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"n": 0}, "n", "n must be at least 1, not 0"),
        ({"n": 4.0}, "n", "n must be at most 3, not 4.0"),
        ({"n": 1e300}, "n", "n must be at most 3, not 1e+300"),
        ({"n": 1.5}, "n", "n must be an integer or null, not 1.5"),
        ({"seed": 2**63}, "seed", "seed must be at most 9223372036854775807, not 9223372036854775808"),
        ({"top_p": 0}, "top_p", "top_p must be above 0, not 0"),
        ({"stop": {}}, "stop", "stop must be a string or an array or null, not an object"),
        ({"stop": ["a"] * 17}, "stop", "stop has 17 items, but at most 16 are allowed"),
        ({"stop": "x" * 257}, "stop", "stop has 257 characters, but at most 256 are allowed"),
        (
            {"logit_bias": {"03": 1}},
            "logit_bias",
            'logit_bias must have token ids below 259 as names, not "03"',
        ),
        ({"precision": 5}, "precision", "precision must be one of 2, 3, 4, null, not 5"),
        (
            {"tool_choice": 1},
            "tool_choice",
            'tool_choice must be "none", "auto", "required" or an object that names a function, not 1',
        ),
        ({"model": 1}, "model", 'model must be one of "tiny", null, not 1'),
        ({"messages": []}, "messages", "messages has 0 items, but needs at least 1"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages[0].role",
            'messages[0].role must be one of "assistant", "developer", "system", "tool", "user", not "robot"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
            'messages[0].content[0].type must be one of "text", not "image_url"',
        ),
        (
            {"stream_options": {"usage": True}},
            "stream_options",
            'stream_options has an unknown parameter "usage"',
        ),
        (
            {"x` - at `$.foo": 1},
            None,
            'the body has an unknown parameter "x` - at `$.foo"',
        ),
    ],
)
def test_errors_name_the_parameter_its_bound_and_its_value(more: dict[str, Any], param: str | None, says: str) -> None:
    with pytest.raises(ApiError) as found:
        PARSER.chat({**CHAT, **more})
    assert (found.value.message, found.value.param, found.value.code) == (says, param, "invalid_value")


def test_3_0_is_an_integer_wherever_one_may_stand() -> None:
    asked = PARSER.completion({"prompt": [3.0, 4], "n": 2.0, "seed": 1e3, "precision": 3.0, "logprobs": 0.0})
    assert (asked.prompts, asked.n, asked.sampling.seed, asked.bits, asked.logprobs) == ([[3, 4]], 2, 1000, 3, 0)
    assert {type(i) for i in asked.prompts[0]} == {int}


@pytest.mark.parametrize(
    ("place", "value"), [(0, -1), (20_000, 259), (39_998, 1.5), (39_998, "1"), (17, None), (3, True)]
)
def test_one_wrong_id_among_many_is_found(place: int, value: Any) -> None:
    ids: list[Any] = [7] * 39_999
    assert PARSER.completion({"prompt": ids}).prompts == [ids]
    ids[place] = value
    where = "prompt" if place == 0 and not isinstance(value, int) else f"prompt[{place}]"
    for prompt, param in ((ids, where), ([[1], ids], "prompt[1]" + f"[{place}]")):
        with pytest.raises(ApiError) as found:
            PARSER.completion({"prompt": prompt})
        assert found.value.param == param


def test_null_is_a_parameters_default() -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "n", "stream", "stop", "seed", "max_tokens", "model", "echo"))
    assert PARSER.completion({"prompt": "a", **nothing}) == PARSER.completion({"prompt": "a"})
    assert PARSER.chat({**CHAT, "max_tokens": 5, "max_completion_tokens": 3}).max_tokens == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"prompt": "\ud800"}', "prompt"),
        (rb'{"prompt": [1, 2, "\uDFFF"]}', "prompt[2]"),
        (rb'{"messages": [{"content": "\ud83d\ude42 \ud83d"}]}', "messages[0].content"),
        (rb'{"\ud800": 1}', None),
    ],
)
def test_half_of_a_surrogate_pair_is_found_where_it_stands(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError, match="lone surrogate") as found:
        parse(body)
    assert found.value.param == param
    assert parse(rb'["\ud83d\ude42", "\\ud800"]') == ["🙂", "\\ud800"]
