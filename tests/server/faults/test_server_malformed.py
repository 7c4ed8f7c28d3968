"""Bytes that are wrong: a status code and a sentence for each, and the next client is served."""

import json
import random

import pytest
from server_fixtures import limited_server as server  # noqa: F401
from server_fixtures import llm, want  # noqa: F401
from tiny_server import GREEDY, Running, malformed, post, read_all, reset, serving, status, still_serves

from crelle import LLM


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
                    sock.settimeout(240)
        except ConnectionError:
            answer = answer or read_all(sock)
    assert status(answer) == 413
    assert sent < 10_000_000
    assert b"larger than 20000 bytes" in answer
    still_serves(server, want)


def test_an_announced_body_that_is_too_large_is_not_waited_for(llm: LLM) -> None:
    """A body that may come is given more time here than the socket waits for an answer."""
    head = post("/v1/completions", b"").replace(b"Content-Length: 0", b"Content-Length: 20001")
    with serving(llm, max_body=20_000, body_timeout=600) as server, server.connect() as sock:
        sock.sendall(head)
        assert status(sock.recv(65536)) == 413


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"null", "the body must be an object, not null"),
        (b"[]", "must be an object, not an array"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "temperature": 1e999}', "1e999 is too large for a number"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "a", "stop": "\\udfff"}', "lone surrogate"),
        (b'{"prompt": {"a": 1}}', "prompt must be a string or an array"),
        (b'{"prompt": [1, "a"]}', "prompt[1] must be an integer"),
        (b'{"prompt": ["a", 1]}', "prompt[1] must be a string"),
        (b'{"prompt": "a", "n": true}', "n must be an integer or null, not true"),
        (b'{"prompt": "a", "n": 1.5}', "n must be an integer"),
        (b'{"prompt": "a", "echo": 0}', "echo must be true or false or null, not 0"),
        (b'{"prompt": "a", "presence_penalty": false}', "presence_penalty must be a number or null, not false"),
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
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Flood: 1\r\n" * 5000 + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n", 400),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"GET /%00%ff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
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
