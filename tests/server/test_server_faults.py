"""Whatever clients, networks and the engine do: right status codes, others are served, every page comes back."""

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_server import Running, nested_llm, post, read_all, serving, slow_down, status

from crelle import LLM, Sampling
from crelle.engine.scheduler import Step
from crelle.errors import SchemeError
from crelle.server.settings import Settings

GREEDY = {"prompt": "Hello", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return nested_llm()


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with serving(llm, max_body=20_000, body_timeout=1.0) as found:
        yield found


@pytest.fixture(scope="module")
def want() -> str:
    return nested_llm("alone").generate("Hello", Sampling(max_tokens=12)).text


def ask(server: Running, **more: Any) -> tuple[int, dict[str, Any]]:
    """Complete a prompt over a fresh connection."""
    answer = server.raw(post("/v1/completions", json.dumps({**GREEDY, **more}).encode()))
    return status(answer), json.loads(answer.split(b"\r\n\r\n", 1)[1])


def still_serves(server: Running, want: str) -> None:
    code, body = ask(server)
    assert (code, body["choices"][0]["text"]) == (200, want)
    server.assert_empty()


def stream(server: Running, tokens: int, **socket_options: Any) -> socket.socket:
    """Begin a stream and read its first part."""
    sock = server.connect(**socket_options)
    body = {**GREEDY, "max_tokens": tokens, "stream": True}
    sock.sendall(post("/v1/completions", json.dumps(body).encode()))
    assert sock.recv(1).startswith(b"H")
    return sock


def reset(sock: socket.socket) -> None:
    """Hang up without a goodbye."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def wait_for(condition: Any, seconds: float = 20) -> None:
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
        assert server.engine.stats.tokens_drawn < 8 * 1500, "they were ended, not finished"
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
        assert server.engine.stats.tokens_drawn < 3000
        still_serves(server, want)


def test_slow_readers_lose_their_stream_and_hold_up_nobody(llm: LLM, want: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    with serving(llm, sock=listener, backlog=100) as server:
        idle = stream(server, 2000, SO_RCVBUF=4096)  # takes one byte and then nothing
        begun = time.monotonic()
        code, body = ask(server)
        assert (code, body["choices"][0]["text"]) == (200, want)
        assert time.monotonic() - begun < 10
        server.assert_empty()
        assert server.state.metrics.slow_readers == 1
        assert server.engine.stats.tokens_drawn < 2000
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


def test_quiet_streams_send_comments_that_proxies_can_see(llm: LLM) -> None:
    with serving(llm, patience=0.1) as server:
        slow_down(server.engine, 0.5)
        with stream(server, 2) as sock:
            said = read_all(sock)
        assert b": working\n\n" in said
        assert said.count(b"data: ") == 4, "two pieces, the end, [DONE]"


# Bytes that are wrong -------------------------------------------------------------------------------------------------


def test_half_sent_bodies_and_headers(server: Running, want: str) -> None:
    whole = post("/v1/completions", json.dumps(GREEDY).encode())
    with server.connect() as quits, server.connect() as stays, server.connect() as headers:
        quits.sendall(whole[:-10])
        stays.sendall(whole[:-10])
        headers.sendall(whole[:40])
        reset(quits)
        still_serves(server, want)
        answer = read_all(stays)
    assert status(answer) == 408
    assert b"did not arrive within 1 s" in answer
    still_serves(server, want)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_bodies_of_100_megabytes_are_refused_before_they_are_read(server: Running, want: str, announced: bool) -> None:
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += ["Content-Length: 100000000" if announced else "Transfer-Encoding: chunked"]
    part = b"x" * 65536
    frame = part if announced else b"10000\r\n" + part + b"\r\n"
    with server.connect() as sock:
        sock.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
        sent, answer = 0, b""
        try:
            while sent < 100_000_000 and not answer:
                sock.sendall(frame)
                sent += len(part)
                sock.setblocking(False)
                try:
                    answer = sock.recv(65536)
                except BlockingIOError:
                    pass
                finally:
                    sock.settimeout(20)
        except ConnectionError:
            answer = answer or read_all(sock)
    assert status(answer) == 413
    assert sent < 10_000_000
    assert b"larger than 20000 bytes" in answer
    still_serves(server, want)


def test_an_announced_body_that_is_too_large_is_not_waited_for(server: Running) -> None:
    head = post("/v1/completions", b"").replace(b"Content-Length: 0", b"Content-Length: 20001")
    begun = time.monotonic()
    with server.connect() as sock:
        sock.sendall(head)
        assert status(sock.recv(65536)) == 413
    assert time.monotonic() - begun < 0.9, "a body that may come is given a second here"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"null", "the body must be an object, not null"),
        (b"[]", "must be an object, not an array"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature must be at most 2"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "stop": "\\udfff"}', "half of a surrogate pair"),
        (b'{"prompt": {"a": 1}}', "prompt must be a string or an array"),
        (b'{"prompt": [1, "a"]}', "prompt[1] must be an integer"),
        (b'{"prompt": ["a", 1]}', "prompt[1] must be a string"),
        (b'{"prompt": "a", "n": true}', "n must be an integer or null, not true"),
        (b'{"prompt": "a", "n": 1.5}', "n must be an integer"),
        (b'{"prompt": "a", "echo": 0}', "echo must be one of false, null, not 0"),
        (b'{"prompt": "a", "presence_penalty": false}', "presence_penalty must be one of 0, null, not false"),
        (b'{"prompt": "a", "stream": "yes"}', "stream must be true or false or null"),
        (b'{"prompt": "a", "stream_options": {"x": 1}}', "stream_options has an unknown parameter"),
    ],
)
def test_malformed_bodies_are_told_what_is_wrong(server: Running, body: bytes, says: str) -> None:
    answer = server.raw(post("/v1/completions", body))
    assert status(answer) == 400
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert says in error["message"]
    assert len(error["message"]) < 300
    assert error["type"] == "invalid_request_error"
    server.assert_empty()


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, 400),  # someone speaks TLS
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-Flood: 1\r\n" * 5000 + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n", 400),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 404),
        (b"GET /%00%ff HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 404),
        (b"BREW /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 400),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 405),
        (post("/v1/completions", b"{}").replace(b"application/json", b"text/plain"), 415),
        (post("/v1/completions", b"{}", "Content-Encoding: gzip"), 415),
        (post("/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (post("/v1/completions", b"{}").replace(b"Content-Length: 2", b"Content-Length: -2"), 400),
        (post("/v1/completions", b"{}", "Origin: https://evil.example"), 403),
        (post("/v1/completions", b"{}", "Origin: http://127.0.0.1.evil.example"), 403),
        (post("/v1/completions", b"{}", "Origin: http://localhost:1"), 400),
    ],
)
def test_requests_that_are_hardly_http(server: Running, want: str, request_bytes: bytes, code: int) -> None:
    answer = server.raw(request_bytes)
    assert status(answer) == code
    assert b"Traceback" not in answer
    assert b"site-packages" not in answer
    still_serves(server, want)


def malformed(rng: random.Random) -> bytes:
    """A request that is nearly right: bytes changed, dropped or doubled, or values swapped for others."""
    odd: list[Any] = [None, True, -1, 0, 1e308, 2**70, "", "x" * 300, [], {}, [[]], [None], {"a": {}}, "\x00", "é€𝄞"]
    body = dict(rng.choice([GREEDY, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}]))
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    body["max_tokens"] = 2
    names = ["stop", "n", "seed", "logprobs", "temperature", "prompt", "messages", "stream", "model", "nonsense"]
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(names)] = rng.choice(odd)
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at]
            case _:
                data[at:at] = data[at : at + 5]
    return post(path, bytes(data), close=False)


def _send_malformed(server: Running, count: int) -> None:
    rng, sock, seen = random.Random(1), server.connect(), dict[int, int]()
    for _ in range(count):
        sock.sendall(malformed(rng))
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(65536)
        head, _, rest = answer.partition(b"\r\n\r\n")
        code = status(head)
        seen[code] = seen.get(code, 0) + 1
        assert code in (200, 400, 404), answer
        lines = head.lower().split(b"\r\n")
        length = next((int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length")), None)
        if length is None:  # a stream: read to its end and begin anew
            sock.close()
            sock = server.connect()
            continue
        while len(rest) < length:
            rest += sock.recv(65536)
        if code != 200:
            assert json.loads(rest)["error"]["message"]
    sock.close()
    assert seen[400] > count / 2


def test_hundreds_of_malformed_requests(server: Running, want: str) -> None:
    _send_malformed(server, 400)
    still_serves(server, want)


@pytest.mark.slow
def test_ten_thousand_malformed_requests(server: Running, want: str) -> None:
    _send_malformed(server, 10_000)
    still_serves(server, want)


# Faults of ours -------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_middle_of_a_step_touches_nobody_else(llm: LLM, want: str) -> None:
    """Those in the step get an error, those of another precision and those who come later do not."""
    with serving(llm) as server:
        compute, secret = server.engine.runner.run, "the device fell off the bus at /secret/path"

        def run(step: Step) -> torch.Tensor:
            time.sleep(0.01)
            if step.precision == 2 and any(len(s.new) == 5 for s in step.draws):
                raise RuntimeError(secret)
            return compute(step)

        server.engine.runner.run = run  # type: ignore[method-assign]
        found: dict[str, Any] = {}

        def whole(name: str, **more: Any) -> None:
            found[name] = ask(server, **more)

        def streamed() -> None:
            with server.connect() as sock:
                body = {**GREEDY, "precision": 2, "stream": True}
                sock.sendall(post("/v1/completions", json.dumps(body).encode()))
                found["stream"] = read_all(sock)

        work = [
            threading.Thread(target=whole, args=("bad",), kwargs={"precision": 2}),
            threading.Thread(target=whole, args=("good",)),
            threading.Thread(target=streamed),
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join(30)
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
        page = server.raw(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").decode()
        assert 'crelle_requests_total{path="/v1/completions",status="500"} 2' in page


def test_a_handler_that_fails_says_so_without_a_traceback(llm: LLM, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    with serving(llm) as server:
        monkeypatch.setattr(server.state.asks, "completion", broken)
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

        get = b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
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
        wait_for(lambda: '"engine died", "fault": "ZeroDivisionError: a mistake of ours"' in server.log)


# Many -----------------------------------------------------------------------------------------------------------------


def test_all_of_it_at_once(llm: LLM, want: str) -> None:
    """Clients who read, leave, send nonsense or ask for another precision, while steps fail now and then."""
    with serving(llm, engine={"pages": 60, "max_batch": 6, "queue_limit": 12}, backlog=50) as server:
        compute, rng = server.engine.runner.run, random.Random(0)
        right, wrong, counted = threading.Lock(), list[str](), dict[int, int]()

        def run(step: Step) -> torch.Tensor:
            if step.precision == 3 and rng.random() < 0.05:
                raise RuntimeError("now and then")
            return compute(step)

        def client(seed: int) -> None:
            mine, end = random.Random(seed), time.monotonic() + 2.5
            while time.monotonic() < end:
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
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
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
        assert "had not begun" in by_code[503]["error"]["message"]
        sock.close()
    server.assert_empty()


def _text(answer: bytes) -> str:
    """The text of a stream of one choice."""
    events = [part.split(b"data: ", 1)[1] for part in answer.split(b"\n\n") if b"data: {" in part]
    return "".join(json.loads(event.split(b"\r\n")[0])["choices"][0]["text"] for event in events)


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"port": 70000}, {"timeout": 0}, {"grace": -1}, {"backlog": 0}, {"origins": ("example.org",)}):
        with pytest.raises(SchemeError, match=r"must be|looks like"):
            Settings(**wrong)
