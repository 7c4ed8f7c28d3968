"""JSON as RFC 8259 has it: what is read, in one go and in pieces, and what is written."""

import json
import re
import threading
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fixtures import llm, want  # noqa: F401
from tiny_server import GREEDY, Running, ask, body_of, post, read_all, serving, status, still_serves

import crelle.server
from crelle import LLM, Sampling
from crelle.engine.requests.output import OutputState, TokenLogprob
from crelle.engine.scheduler import Step
from crelle.errors import NumericsError
from crelle.server.errors import ApiError
from crelle.server.requests import GenerationRequest
from crelle.server.responses import ResponseBuilder
from crelle.server.schema.response_schemas import PromptLogprob
from crelle.server.schema.strict_json import _LARGE, _Pieces, dumps, dumps_log, encode, encode_large, parse
from crelle.server.token_text import TokenTexts


def strictly(body: bytes) -> Any:
    """Read an answer; NaN and Infinity are no JSON."""

    def no(name: str) -> None:
        raise AssertionError(f"{name} in {body[:200]!r}")

    return json.loads(body, parse_constant=no)


# Reading --------------------------------------------------------------------------------------------------------------

PADDING = " " * _LARGE
ODD = [
    '{"a": NaN}',
    '{"a": -Infinity}',
    "[Infinity]",
    '{"a": 1e999}',
    "[1, 2, -1e999]",
    '{"a": 1, "a": 2}',
    '{"b": {"a": 1, "c": 2, "a": 1}}',
    "[" * 100_000,
    '{"a":' * 100_000,
    "[1, 2,]",
    "[,1]",
    "[1,,2]",
    '{"a": 1,}',
    '{"a" 1}',
    "{1: 2}",
    "[1 2]",
    "[01]",
    "[1.]",
    "[--1]",
    "[+1]",
    "[1e]",
    '"\t"',
    '"abc',
    '["abc]',
    "tru",
    "[1, tru]",
    "[1",
    "1]",
    "{}{}",
    "9" * 5000,
    "[" + "9" * 5000 + "]",
    "[1, 2, " + "9" * 5000 + ", 3]",
    "\ufeff{}",
    "'a'",
    "[1] // done",
    "",
]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
def test_what_is_not_json_is_refused_with_a_sentence(text: str, padding: str) -> None:
    with pytest.raises(ApiError) as found:
        parse((text + padding).encode())
    assert (found.value.status, found.value.code) == (400, "invalid_json")
    assert found.value.message.startswith("the body is ")
    assert len(found.value.message) < 200


def test_a_name_that_stands_twice_is_refused() -> None:
    """A proxy that checks a body might take the first, and we the last."""
    for padding in ("", PADDING):
        with pytest.raises(ApiError, match='"n" occurs twice'):
            parse(('{"prompt": "a", "n": 1, "n": 64}' + padding).encode())


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=5), inner, max_size=6),
    max_leaves=60,
)


@settings(max_examples=150, deadline=None)
@given(values, st.sampled_from([None, 1, 3]), st.booleans())
def test_pieces_are_read_as_python_reads_the_whole(value: Any, indent: int | None, escaped: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    assert repr(_Pieces(text).document()) == repr(json.loads(text))


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from('[]{},:"\\ \n-+.0123456789eEtruefalsn'), max_size=40))
def test_pieces_refuse_what_python_refuses(text: str) -> None:
    """Python takes numbers that overflow and names that stand twice."""
    try:
        want: Any = json.loads(text)
    except (ValueError, RecursionError):
        want = ApiError
    said = ""
    try:
        found = parse((text + PADDING).encode())
    except ApiError as e:
        found, said = ApiError, e.message
    assert repr(found) == repr(want) or "twice" in said or "too large" in said


def test_long_runs_of_numbers_are_read_in_pieces() -> None:
    """Cut anywhere: within numbers, between them, with other values among them."""
    for gap in ("", " ", "\n\t "):
        for value in (
            list(range(40_000)),
            [1.5e-3, -2, 0] * 10_000,
            [[i] * 5_000 for i in (7, 12_345_678, -1)],
            [*range(20_000), "a", *range(20_000), None, [1, [2, 3]], {"a": [4]}, *range(9_000)],
        ):
            text = json.dumps({"prompt": value}, separators=("," + gap, ":" + gap))
            assert parse(text.encode()) == {"prompt": value}


def test_error_positions_in_pieces_are_those_of_the_whole() -> None:
    text = json.dumps({"a": [1] * 30_000})[:-2] + ", x]}"
    with pytest.raises(ApiError, match=f"Expecting value at character {text.index('x')}"):
        parse(text.encode())


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [dumps, encode, encode_large])
@pytest.mark.parametrize("value", [nan, inf, {"a": [1, -inf]}, [[nan]], [0.0] * 500 + [nan]])
def test_values_that_json_does_not_have_are_not_written(write: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(value)


@settings(max_examples=100, deadline=None)
@given(values)
def test_large_values_are_written_as_small_ones(value: Any) -> None:
    assert encode_large(value) == encode(value)
    assert repr(json.loads(encode(value))) == repr(value)


def test_prompt_logprobs_of_long_prompts_are_written() -> None:
    """Longer than a slice; the first token has none."""
    value = [None, *({"7": PromptLogprob(-0.5, i, "a")} for i in range(1, 1000))]
    assert encode_large(value) == msgspec.json.encode(value)


def test_names_that_are_not_unicode_can_be_written() -> None:
    assert json.loads(encode({"model": "caf\udce9"})) == {"model": "caf\udce9"}


def test_the_log_loses_no_line() -> None:
    assert strictly(dumps_log({"seconds": nan, "more": [inf, {"a": Path("x")}]}).encode()) == {
        "seconds": "nan",
        "more": ["inf", {"a": "x"}],
    }


def test_everything_in_the_server_writes_json_through_one_file() -> None:
    folder = Path(crelle.server.__file__).parent
    for file in folder.rglob("*.py"):
        text = file.read_text()
        assert file.name == "strict_json.py" or not re.search(r"json\.dumps|json_response|from json import", text), (
            file.name
        )


def test_tokens_of_probability_0_have_a_logprob_that_json_has(llm: LLM) -> None:
    """OpenAI writes -9999."""
    found = [TokenLogprob(33, -0.5, ((33, -0.5), (34, -inf)))]
    for chat in (False, True):
        asked = GenerationRequest(
            chat=chat, prompts=["a"], sampling=Sampling(), max_tokens=1, n=1, bits=None, logprobs=2, ignore_end=False,
            stream=False, usage=False,
        )  # fmt: skip
        written = strictly(encode(ResponseBuilder(asked, 1, "tiny", TokenTexts(llm.tokenizer))._logprobs(found, 0)))
        assert -9999.0 in (
            written["content"][0]["top_logprobs"][1].values() if chat else written["top_logprobs"][0].values()
        )


# Logits that are not finite -------------------------------------------------------------------------------------------


def stream(server: Running, begun: threading.Event | None = None) -> bytes:
    with server.connect() as sock:
        sock.sendall(post("/v1/completions", json.dumps({**GREEDY, "stream": True}).encode()))
        first = sock.recv(1)
        if begun is not None:
            begun.set()
        return first + read_all(sock)


def test_logits_that_are_not_finite_are_an_error_and_not_an_answer(
    llm: LLM, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(llm) as server:
        take, at, begun = OutputState.take, [0], threading.Event()

        def broken(self: OutputState, token: int, logits: Any, position: int) -> int:
            if len(self.tokens) == at[0]:
                assert at[0] == 0 or begun.wait(30)  # else the fault may come before the headers are sent
                raise NumericsError("the model's logits are not finite (NaN) at token 7 of /secret/path")
            return take(self, token, logits, position)

        monkeypatch.setattr(OutputState, "take", broken)
        answer = server.raw(post("/v1/completions", json.dumps(GREEDY).encode()))
        error = strictly(answer.split(b"\r\n\r\n", 1)[1])["error"]
        assert (status(answer), error["type"], error["code"]) == (500, "server_error", "non_finite_logits")
        assert "produced NaN or infinity" in error["message"]
        assert "secret" not in error["message"]
        assert b"x-should-retry: false" in answer
        assert status(stream(server)) == 500, "it had not begun"
        at[0] = 3
        said = stream(server, begun)
        assert status(said) == 200
        assert b'"code":"non_finite_logits"' in said
        assert b"[DONE]" not in said
        assert server.log.count("NumericsError") == 3
        monkeypatch.undo()
        still_serves(server, want)


@pytest.mark.parametrize("more", [{"logprobs": 2}, {"logprobs": 2, "stream": True}], ids=["whole", "stream"])
def test_nan_from_the_model_is_never_in_an_answer(llm: LLM, want: str, more: dict[str, Any]) -> None:
    with serving(llm) as server:
        compute = server.engine.runner.run

        def run(step: Step) -> torch.Tensor:
            return compute(step) * nan

        server.engine.runner.run = run  # type: ignore[method-assign]
        answer = server.raw(post("/v1/completions", json.dumps({**GREEDY, **more}).encode()))
        assert status(answer) == 500
        assert strictly(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] in ("non_finite_logits", "internal_error")
        server.engine.runner.run = compute  # type: ignore[method-assign]
        still_serves(server, want)


def test_every_page_is_strict_json(llm: LLM) -> None:
    with serving(llm) as server:
        assert ask(server)[0] == 200
        for page in ("/v1/models", "/v1/status", "/openapi.json", "/health", "/no-such-page"):
            strictly(server.get(page).split(b"\r\n\r\n", 1)[1])
        assert body_of(server.get("/health")) == {"status": "ok"}
    for line in server.log.splitlines():
        strictly(line.encode())
