"""Small requests do not wait behind large ones, whoever sent those."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from server_fixtures import llm, want  # noqa: F401
from test_server_faults import wait_for
from tiny_server import GREEDY, Running, body_of, post, read_all, serving, status

from crelle import LLM
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.server.http.bodies import LARGE

MANY = 16
MESSAGES = [{"role": "user", "content": "Hello"}]
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    "tokens of a chat": ("/tokenize", {"messages": MESSAGES}),
    "a text that is tokenized in a thread": ("/tokenize", {"prompt": "Hello, " * 1000}),
    "sequences that are submitted in a thread": ("/v1/completions", {**GREEDY, "prompt": ["Hello"] * 9}),
}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with serving(llm, max_prompt=1 << 20) as found:
        yield found


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sample(2)
def test_small_requests_are_answered_while_large_ones_wait(
    server: Running, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first large text is not done before the small request has its answer; before, that one waited for all."""
    entered, gate, done = threading.Event(), threading.Event(), list[int]()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, bos: bool = True) -> list[int]:
        if len(text) > LARGE:
            entered.set()
            assert gate.wait(60)
            done.append(len(text))
        return encode(self, text, bos)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = {"prompt": "a" * (2 * LARGE), "add_special_tokens": False}
    large = post("/tokenize", json.dumps(body).encode())
    with ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(MANY)]
        stack.callback(gate.set)
        for sock in socks:
            sock.sendall(large)
        assert entered.wait(20)
        wait_for(server.state.bodies._room.locked)  # all of them are there
        path, body = SMALL[name]
        answer = server.raw(post(path, json.dumps(body).encode()))
        assert status(answer) == 200, answer
        assert done == []
        gate.set()
        answers = [read_all(sock) for sock in socks]
    assert [status(answer) for answer in answers] == [200] * MANY
    assert {body_of(answer)["count"] for answer in answers} == {2 * LARGE}
    readers = [thread.name for thread in threading.enumerate() if "reader" in thread.name]
    assert len(readers) <= 2, readers
    server.assert_empty()
