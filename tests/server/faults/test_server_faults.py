"""Whatever clients, networks and the engine do: right status codes, others are served, every page comes back."""

import json
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch
from server_fixtures import limited_server as server  # noqa: F401
from server_fixtures import llm, want  # noqa: F401
from tiny_server import (
    GREEDY,
    Running,
    ask,
    malformed,
    nested_llm,
    post,
    read_all,
    reset,
    serving,
    slow_down,
    status,
    still_serves,
)

from crelle import LLM, Sampling
from crelle.engine.requests.output import Event
from crelle.engine.scheduler import Step
from crelle.errors import SchemeError
from crelle.server.event_queue import EventQueue
from crelle.server.settings import Settings


def stream(server: Running, tokens: int, precision: int | None = None, **socket_options: Any) -> socket.socket:
    """Begin a stream and read its first byte, which is sent with the first token."""
    sock = server.connect(**socket_options)
    body = {**GREEDY, "max_tokens": tokens, "stream": True} | ({"precision": precision} if precision else {})
    sock.sendall(post("/v1/completions", json.dumps(body).encode()))
    assert sock.recv(1).startswith(b"H")
    return sock


def wait_for(condition: Any, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# Clients that go ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["reset", "close"])
def test_clients_that_vanish_in_mid_stream_free_their_pages(llm: LLM, want: str, leave: Any) -> None:
    with serving(llm) as server:
        slow_down(server.engine, 0.005)
        for sock in [stream(server, 1500) for _ in range(8)]:
            leave(sock)
        server.assert_empty()
        assert server.engine.stats.tokens_sampled < 8 * 1500, "they were ended, not finished"
        assert server.state.metrics.disconnects == 8
        still_serves(server, want)


def test_clients_that_vanish_while_they_wait_for_a_whole_answer(llm: LLM, want: str) -> None:
    with serving(llm, engine={"max_batch": 2}) as server:
        slow_down(server.engine, 0.005)
        socks = [server.connect() for _ in range(6)]
        for sock in socks:
            sock.sendall(post("/v1/completions", json.dumps({**GREEDY, "max_tokens": 1500}).encode()))
        wait_for(lambda: server.engine.stats.waiting + server.engine.stats.running == 6)
        for sock in socks:
            reset(sock)
        server.assert_empty()
        assert server.engine.stats.tokens_sampled < 3000
        still_serves(server, want)


def test_slow_readers_lose_their_stream_and_hold_up_nobody(llm: LLM, want: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    with serving(llm, sock=listener, backlog=100) as server:
        idle = stream(server, 2000, SO_RCVBUF=4096)  # takes one byte and then nothing
        code, body = ask(server)
        assert (code, body["choices"][0]["text"]) == (200, want)
        server.assert_empty()
        assert server.state.metrics.slow_readers == 1
        assert server.engine.stats.tokens_sampled < 2000
        assert b"[DONE]" not in read_all(idle)
        idle.close()
        still_serves(server, want)


def test_requests_end_when_their_time_is_over(llm: LLM, want: str) -> None:
    with serving(llm, timeout=0.5) as server:
        compute = server.engine.runner.run
        slow_down(server.engine, 0.05)
        code, body = ask(server, max_tokens=1000)
        assert (code, body["error"]["code"]) == (504, "timeout")
        assert "after 0.5 s" in body["error"]["message"]
        with stream(server, 1000) as sock:
            events = read_all(sock).split(b"\n\n")
        last = next(e for e in reversed(events) if b"data: " in e)
        assert b'"code":"timeout"' in last
        assert server.state.metrics.timeouts == 2
        server.assert_empty()
        server.engine.runner.run = compute  # type: ignore[method-assign]
        still_serves(server, want)


def test_a_last_event_that_is_late_is_not_taken_for_lost(llm: LLM) -> None:
    with serving(llm, patience=0.05) as server:
        post_office = server.state.bridge
        assert post_office is not None
        send = post_office._send

        def late(inbox: EventQueue, prompt: int, event: Event) -> None:
            time.sleep(0.4 if event.output else 0)  # the engine counts the sequence as finished meanwhile
            send(inbox, prompt, event)

        post_office._send = late  # type: ignore[method-assign]
        with stream(server, 2) as sock:
            said = read_all(sock)
        assert b"error" not in said
        assert b"[DONE]" in said


def test_quiet_streams_send_comments_that_proxies_can_see(llm: LLM) -> None:
    with serving(llm, patience=0.1) as server:
        slow_down(server.engine, 0.5)
        with stream(server, 2) as sock:
            said = read_all(sock)
        assert b": working\n\n" in said
        assert said.count(b"data: ") == 4, "two pieces, the end, [DONE]"


# Faults of ours -------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_middle_of_a_step_touches_nobody_else(llm: LLM, want: str) -> None:
    """Those in the step get an error, those of another precision and those who come later do not."""
    with serving(llm) as server:
        compute, secret = server.engine.runner.run, "the device fell off the bus at /secret/path"

        def run(step: Step) -> torch.Tensor:
            time.sleep(0.01)
            if step.precision == 2 and len(step.samples) == 2:
                raise RuntimeError(secret)
            return compute(step)

        server.engine.runner.run = run  # type: ignore[method-assign]
        found: dict[str, Any] = {}

        def whole(name: str, **more: Any) -> None:
            found[name] = ask(server, **more)

        work = [
            threading.Thread(target=whole, args=("bad",), kwargs={"precision": 2}),
            threading.Thread(target=whole, args=("good",)),
        ]
        with stream(server, 1500, precision=2) as sock:  # begun before the other comes, however slow the machine is
            for thread in work:
                thread.start()
            for thread in work:
                thread.join(30)
            found["stream"] = b"H" + read_all(sock)
        code, body = found["bad"]
        assert (code, body["error"]["type"], body["error"]["code"]) == (500, "server_error", "internal_error")
        assert found["good"][0] == 200
        assert found["good"][1]["choices"][0]["text"] == want
        assert status(found["stream"]) == 200, "it had begun"
        assert b'data: {"error":' in found["stream"]
        assert b"[DONE]" not in found["stream"]
        for said in (json.dumps(body), found["stream"].decode()):
            assert "secret" not in said
            assert "Traceback" not in said
        assert f"RuntimeError: {secret}" in server.log, "the log says what it was, in one line"
        still_serves(server, want)
        page = server.raw(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").decode()
        assert 'crelle_requests_total{path="/v1/completions",status="500"} 2' in page


def test_a_handler_that_fails_says_so_without_a_traceback(llm: LLM, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    with serving(llm) as server:
        monkeypatch.setattr(server.state.parser, "completion", broken)
        code, body = ask(server)
        assert (code, body["error"]["code"]) == (500, "internal_error")
        assert "mistake" not in json.dumps(body)
        assert "ZeroDivisionError: a mistake of ours" in server.log
        monkeypatch.undo()
        still_serves(server, want)


def test_a_dead_engine_is_neither_healthy_nor_ready(llm: LLM) -> None:
    with serving(llm) as server:

        def broken() -> Step:
            raise ZeroDivisionError("a mistake of ours")

        get = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert status(server.raw(get % b"/ready")) == status(server.raw(get % b"/health")) == 200
        server.engine.scheduler.schedule = broken  # type: ignore[method-assign]
        assert ask(server)[0] in (500, 503)
        wait_for(lambda: server.state.service.error is not None)
        for page in (b"/ready", b"/health"):
            answer = server.raw(get % page)
            assert status(answer) == 503
            assert b"mistake" not in answer
        code, body = ask(server)
        assert (code, body["error"]["code"]) == (503, "unavailable")
        assert not server.state.generations
        died = '"engine died", "reason": "a fault in the engine\'s own code", "fault": "ZeroDivisionError: a mistake'
        wait_for(lambda: died in server.log)


# Many -----------------------------------------------------------------------------------------------------------------


def test_all_of_it_at_once(llm: LLM, want: str) -> None:
    """Clients who read, leave, send nonsense or ask for another precision, while steps fail now and then."""
    with serving(llm, engine={"pages": 60, "max_batch": 6, "queue_limit": 12}, backlog=50) as server:
        compute, rng, failed = server.engine.runner.run, random.Random(0), False
        right, wrong, counted = threading.Lock(), list[str](), dict[int, int]()

        def run(step: Step) -> torch.Tensor:
            nonlocal failed
            failed = not failed and step.precision == 3 and rng.random() < 0.05  # several in a row end the engine
            if failed:
                raise RuntimeError("now and then")
            return compute(step)

        def client(seed: int) -> None:
            mine, end = random.Random(seed), time.monotonic() + 2.5
            while time.monotonic() < end or (counted.get(200, 0) <= 20 and time.monotonic() < end + 40):
                try:
                    if (what := mine.randrange(6)) == 0:
                        reset(stream(server, 200))
                        continue
                    if what == 1:
                        server.raw(malformed(mine).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
                        continue
                    bits = mine.choice([None, 3])
                    code, body = ask(server, precision=bits, n=mine.randint(1, 3))
                except (ConnectionError, AssertionError) as e:
                    wrong.append(repr(e))
                    continue
                with right:
                    counted[code] = counted.get(code, 0) + 1
                texts = {choice["text"] for choice in body.get("choices", [])}
                if code not in (200, 429, 500) or (code == 500 and bits is None):
                    wrong.append(f"{code} {body}")
                if code == 200 and bits is None and texts != {want}:
                    wrong.append(f"{texts}")

        server.engine.runner.run = run  # type: ignore[method-assign]
        threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert counted[200] > 20
        still_serves(server, want)


def _open_connections(server: Running, want: str, count: int) -> None:
    socks = [server.connect() for _ in range(count)]
    still_serves(server, want)
    for sock in socks[:: count // 50]:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for sock in socks[:: count // 50]:
        assert status(sock.recv(65536)) == 200
    for sock in socks:
        sock.close()
    still_serves(server, want)


def test_a_hundred_open_connections(server: Running, want: str) -> None:
    _open_connections(server, want, 100)


@pytest.mark.slow
def test_a_thousand_open_connections(server: Running, want: str) -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("the system does not give a process enough open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _open_connections(server, want, 1000)


# Shutting down --------------------------------------------------------------------------------------------------------


def test_shutdown_finishes_what_runs(llm: LLM, want: str) -> None:
    with serving(llm, grace=20) as server:
        slow_down(server.engine, 0.05)
        with stream(server, 12) as sock:
            server.stop()
            wait_for(lambda: server.state.closing)
            with pytest.raises(ConnectionError):
                ask(server)
            text = _text(read_all(sock))
        assert text == want


def test_shutdown_returns_what_there_is_when_the_grace_is_over(llm: LLM) -> None:
    whole = nested_llm("alone").generate("Hello", Sampling(max_tokens=400)).text
    with serving(llm, grace=0.3, engine={"max_batch": 2}) as server:
        slow_down(server.engine, 0.02)
        answers: list[tuple[int, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(ask(server, max_tokens=400)))
        thread.start()
        sock = stream(server, 400)
        wait_for(lambda: server.engine.stats.running == 2)
        behind = threading.Thread(target=lambda: answers.append(ask(server, max_tokens=400)))
        behind.start()
        wait_for(lambda: server.engine.stats.waiting == 1)
        server.stop()
        said = read_all(sock)
        thread.join(20)
        behind.join(20)
        assert b'"finish_reason":"length","cut":"shutdown"' in said
        assert b"[DONE]" in said
        assert 0 < len(_text(said)) < len(whole)
        assert whole.startswith(_text(said))
        by_code = dict(answers)
        assert by_code[200]["choices"][0]["cut"] == "shutdown"
        assert whole.startswith(by_code[200]["choices"][0]["text"])
        assert "did not start" in by_code[503]["error"]["message"]
        sock.close()
    server.assert_empty()


def _text(answer: bytes) -> str:
    """The text of a stream of one choice."""
    events = [part.split(b"data: ", 1)[1] for part in answer.split(b"\n\n") if b"data: {" in part]
    return "".join(json.loads(event.split(b"\r\n")[0])["choices"][0]["text"] for event in events)


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"port": 70000}, {"timeout": 0}, {"grace": -1}, {"backlog": 0}, {"origins": ("example.org",)}):
        with pytest.raises(SchemeError, match=r"must (be|look|have)"):
            Settings(**wrong)
