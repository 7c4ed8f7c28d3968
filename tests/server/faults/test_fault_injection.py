"""An exception, and what is none of Python's own, at every place that a request passes: an answer, and nothing is left.

tests/engine does the same inside the engine.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from server_fixtures import llm, want  # noqa: F401
from tiny_server import GREEDY, Running, ask, post, read_all, serving, status, still_serves

from crelle import LLM
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.server.event_queue import EventBridge, EventQueue
from crelle.server.generation import Generation
from crelle.server.requests import RequestParser
from crelle.server.responses import ResponseBuilder
from crelle.server.state import State

SECRET = "at /secret/path"


class Panic(BaseException):
    """What pyo3 raises where Rust panics: no Exception."""


ERRORS = [RuntimeError, Panic, SystemExit, KeyboardInterrupt, MemoryError, StopIteration]
LONG = {"prompt": ["Hello, " * 75] * 9}  # are tokenized and submitted beside the loop
LARGE = {"prompt": [[1] * 2000] * 10}  # is parsed there
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with serving(llm, patience=0.2) as found:
        yield found


Break = Callable[..., None]


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Let a method raise, from its nth call on (after `begun`, a method whose calls may count first), so many times."""

    def install(
        where: type,
        name: str,
        error: type[BaseException],
        first: int = 0,
        times: int = 1,
        begun: tuple[type, str] | None = None,
    ) -> None:
        right, calls, counts = getattr(where, name), [0], [begun is None]

        def broken(*args: Any, **options: Any) -> Any:
            calls[0] += counts[0]
            if first < calls[0] <= first + times:
                raise error(SECRET)
            return right(*args, **options)

        monkeypatch.setattr(where, name, broken)
        if begun is not None:
            before = getattr(*begun)

            def noted(*args: Any, **options: Any) -> Any:
                counts[0] = True
                return before(*args, **options)

            monkeypatch.setattr(*begun, noted)

    return install


def call(server: Running, path: str, **body: Any) -> bytes:
    with server.connect() as sock:
        sock.sendall(post(path, json.dumps(body).encode()))
        return read_all(sock)


def fails_once(server: Running, want: str, path: str = "/v1/completions", **body: Any) -> None:
    """The request is answered with 500 and a sentence; the next one and everything else is as before."""
    before = len(server.log)
    answer = call(server, path, **body)
    assert status(answer) == 500, answer
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "internal error in this request (req-" in error["message"]
    assert b"secret" not in answer
    assert b"Traceback" not in answer
    still_serves(server, want)
    assert SECRET in server.log[before:]
    assert server.state.service.error is None


@pytest.mark.parametrize("error", [RuntimeError, Panic, StopIteration])
@pytest.mark.parametrize("body", [GREEDY, LONG, LARGE], ids=["in the loop", "beside it", "large"])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (RequestParser, "completion"),
        (RequestParser, "_check"),
        (State, "require_ready"),
        (AsyncEngine, "submit"),
        (EventBridge, "callback"),
        (EventQueue, "add"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
@pytest.mark.sample(3)
def test_faults_before_a_request_runs(
    server: Running, want: str, breaks: Break, where: type, name: str, body: dict[str, Any], error: type[BaseException]
) -> None:
    breaks(where, name, error)
    fails_once(server, want, **{**GREEDY, **body})


@pytest.mark.parametrize("error", ERRORS)
def test_faults_in_the_tokenizer(server: Running, want: str, breaks: Break, error: type[BaseException]) -> None:
    for path, body in (
        ("/v1/completions", GREEDY),
        ("/v1/completions", {**GREEDY, **LONG}),
        ("/v1/completions", {**GREEDY, "stream": True}),
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a" * 5000}),
    ):
        breaks(Tokenizer, "encode", error)
        fails_once(server, want, path, **body)
    for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", {"messages": CHAT["messages"]})):
        breaks(Tokenizer, "encode_chat", error)
        fails_once(server, want, path, **body)


@pytest.mark.parametrize("error", ERRORS)
def test_faults_in_the_second_of_several_prompts_end_the_first(
    server: Running, want: str, breaks: Break, error: type[BaseException]
) -> None:
    breaks(AsyncEngine, "submit", error, first=1)
    fails_once(server, want, **{**GREEDY, "prompt": ["a", "b", "c"], "max_tokens": 1500, "ignore_eos": True})


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("where", "name"), [(EventBridge, "_send"), (EventQueue, "put")], ids=["engine's thread", "loop"]
)
@pytest.mark.parametrize("first", [0, 3])
def test_faults_in_the_callback_for_events(
    server: Running, want: str, breaks: Break, where: type, name: str, first: int, error: type[BaseException]
) -> None:
    """In the engine's thread and in the loop; of the first event, and of a later one."""
    breaks(where, name, error, first=first)
    fails_once(server, want, **GREEDY)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("where", "name"), [(ResponseBuilder, "whole"), (Generation, "take"), (ResponseBuilder, "_logprobs")]
)
def test_faults_while_an_answer_is_built(
    server: Running, want: str, breaks: Break, where: type, name: str, error: type[BaseException]
) -> None:
    for n in (1, 8):  # in the loop, and beside it
        breaks(where, name, error)
        fails_once(server, want, **{**GREEDY, "logprobs": 20, "n": n})


@pytest.mark.parametrize("error", ERRORS)
def test_faults_before_a_stream_has_begun_have_their_status(
    server: Running, want: str, breaks: Break, error: type[BaseException]
) -> None:
    for where, name in (
        (Generation, "take"),
        (ResponseBuilder, "chunk"),
        (ResponseBuilder, "opening"),
        (web.StreamResponse, "prepare"),
    ):
        breaks(where, name, error)
        fails_once(server, want, **GREEDY, stream=True)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("where", "name", "first"),
    [
        (Generation, "take", 0),
        (ResponseBuilder, "chunk", 0),
        (ResponseBuilder, "closing", 0),
        (web.StreamResponse, "write", 0),
        (web.StreamResponse, "write", 3),
        (web.StreamResponse, "write_eof", 0),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
@pytest.mark.sample(3)
def test_faults_in_a_stream_that_has_begun_are_events(
    server: Running, want: str, breaks: Break, where: type, name: str, first: int, error: type[BaseException]
) -> None:
    breaks(where, name, error, first=first, begun=(web.StreamResponse, "prepare"))
    answer = call(server, "/v1/completions", **{**GREEDY, "max_tokens": 400, "ignore_eos": True}, stream=True)
    assert status(answer) == 200
    assert b'data: {"error":{"message":"internal error in this request (req-' in answer
    assert b"secret" not in answer
    assert answer.endswith(b"0\r\n\r\n"), "it was ended properly"
    assert name == "write_eof" or b"[DONE]" not in answer
    still_serves(server, want)
    assert server.state.service.error is None


@pytest.mark.parametrize("error", [*ERRORS, ConnectionResetError])
def test_streams_that_cannot_be_written_are_hung_up(
    server: Running, want: str, breaks: Break, error: type[BaseException]
) -> None:
    breaks(web.StreamResponse, "write", error, first=2, times=100)
    body = {**GREEDY, "max_tokens": 400, "ignore_eos": True}  # too many tokens to be written all at once
    assert b"[DONE]" not in call(server, "/v1/completions", **body, stream=True)
    server.assert_empty()
    breaks(web.StreamResponse, "write", error, times=0)
    still_serves(server, want)


def test_last_events_that_get_lost_do_not_leave_a_client_waiting(
    server: Running, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is raised, nothing comes: the server looks after its requests now and then."""
    monkeypatch.setattr(EventQueue, "put", lambda *_: None)
    answer = call(server, "/v1/completions", **GREEDY)
    assert status(answer) == 500
    assert "the last event was lost" in server.log
    monkeypatch.undo()
    still_serves(server, want)


def test_requests_of_an_engine_that_breaks_are_answered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the engine does not get to say so: it died (503), or its last event is lost (500)."""
    with serving(llm, patience=0.2) as server:
        monkeypatch.setattr(EventQueue, "put", lambda *_: None)
        server.engine.scheduler.schedule = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        code, body = ask(server)
        assert (code, body["error"]["code"]) in ((503, "unavailable"), (500, "internal_error"))
        assert not server.state.generations
