"""Lines of docs/guide/threat-model.md that no other test shows."""

import hmac
import json
import time

import pytest
from tiny_server import GREEDY, Running, ask, body_of, nested_llm, post, read_all, serving, status

from crelle import LLM
from crelle.server import app
from crelle.server.http import bodies
from crelle.server.settings import Keys


@pytest.fixture(scope="module")
def llm() -> LLM:
    return nested_llm()


def test_without_a_key_no_body_is_read(llm: LLM) -> None:
    with serving(llm, keys=Keys.of("sesame")) as server, server.connect() as sock:
        sock.sendall(post("/v1/completions", b"").replace(b"Content-Length: 0", b"Content-Length: 1000000"))
        assert status(sock.recv(65536)) == 401, "at once, though nothing of the body was sent"


def test_guessing_keys_is_neither_rewarded_nor_slowed_down(llm: LLM) -> None:
    with serving(llm, keys=Keys.of("sesame")) as server:
        for guess in ("", "Sesame", "sesam", "sesame2", "*", "sesame,", "'"):
            assert status(server.get("/v1/models", f"Authorization: Bearer {guess}")) == 401
        assert status(server.get("/v1/models", "Authorization: Bearer sesame")) == 200
        for place in ("/v1/models?api_key=sesame", "/v1/models?key=sesame"):
            assert status(server.get(place)) == 401, "keys do not stand in addresses, which are logged"
        assert "sesame" not in server.log


def test_a_guess_is_compared_with_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compare, calls = hmac.compare_digest, [0]

    def counted(a: bytes, b: bytes) -> bool:
        calls[0] += 1
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys = Keys.of("one", "two", "three")
    for guess in ("one", "two", "three", "four", ""):
        calls[0] = 0
        keys.find(guess)
        assert calls[0] == 3


def test_silent_and_half_sent_connections_are_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_IDLE", 0.5)
    with serving(llm) as server, server.connect() as silent, server.connect() as half, server.connect() as idle:
        half.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(idle.recv(65536)) == 200
        for sock in (silent, half, idle):
            sock.settimeout(60)
            assert sock.recv(65536) == b""


# Large bodies ---------------------------------------------------------------------------------------------------------

BODY = json.dumps({**GREEDY, "stop": ["x"], "user": None}).encode().replace(b"null", b" " * (1 << 16) + b"null")


def half_sent(server: Running) -> bytes:
    return post("/v1/completions", BODY)[:-1000]


def test_large_bodies_wait_until_there_is_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time here, 16 otherwise. Small ones do not wait."""
    monkeypatch.setattr(bodies, "_AT_ONCE", 1)
    with serving(llm, body_timeout=600) as server, server.connect() as slow, server.connect() as next_one:
        slow.sendall(half_sent(server))
        time.sleep(0.5)
        next_one.sendall(post("/v1/completions", BODY))
        for _ in range(3):
            assert ask(server)[0] == 200, "small ones pass"
        next_one.setblocking(False)
        with pytest.raises(BlockingIOError):
            next_one.recv(1)
        next_one.settimeout(240)
        slow.sendall(post("/v1/completions", BODY)[-1000:])
        assert status(read_all(slow)) == 200
        assert status(read_all(next_one)) == 200, "the large one went on after the slow one"
        server.assert_empty()


def test_a_large_body_that_is_cut_makes_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_AT_ONCE", 1)
    with serving(llm, body_timeout=1.5) as server, server.connect() as slow, server.connect() as next_one:
        slow.sendall(half_sent(server))
        time.sleep(0.5)
        next_one.sendall(post("/v1/completions", BODY))
        assert status(read_all(slow)) == 408
        assert status(read_all(next_one)) == 200
        server.assert_empty()


def test_large_bodies_do_not_wait_for_ever(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_AT_ONCE", 1)
    with (
        serving(llm, body_timeout=1.0) as server,
        server.connect() as first,
        server.connect() as second,
        server.connect() as third,
    ):
        first.sendall(half_sent(server))
        time.sleep(0.4)
        second.sendall(half_sent(server))  # has its turn when the first is cut
        time.sleep(0.2)
        third.sendall(post("/v1/completions", BODY))
        answer = read_all(third)
        assert (status(answer), body_of(answer)["error"]["code"]) == (429, "too_many_bodies")
        assert b"Retry-After: 5" in answer
        assert status(read_all(second)) == 408
        server.assert_empty()


# What a prompt can do -------------------------------------------------------------------------------------------------


def tokens(server: Running, content: str) -> list[int]:
    body = {"messages": [{"role": "user", "content": content}]}
    return list(body_of(server.raw(post("/tokenize", json.dumps(body).encode())))["tokens"])


def test_messages_are_not_templates(llm: LLM) -> None:
    with serving(llm) as server:
        for content in ("{{ 7 * 7 }}", "{% for x in y %}", "{{ cycler.__init__.__globals__ }}"):
            plain = llm.tokenizer.encode(content, bos=False)
            found = tokens(server, content)
            assert any(found[i : i + len(plain)] == plain for i in range(len(found)))


def test_special_tokens_in_messages_are_read_as_such(llm: LLM) -> None:
    with serving(llm) as server:
        assert tokens(server, "a<|end|>").count(258) == tokens(server, "a").count(258) + 1
