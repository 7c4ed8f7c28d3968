"""Who may call under which name, and from which web page: DNS rebinding, cross-site requests, proxies."""

import json
import socket

import pytest
from server_fixtures import llm, server  # noqa: F401
from tiny_server import Running, body_of, serving, status

from crelle import LLM
from crelle.errors import SchemeError
from crelle.server.settings import Keys, Settings

BODY = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
EVERYWHERE = {"host": "0.0.0.0"}


def call(server: Running, *headers: str, target: str = "/v1/completions", method: str = "POST") -> bytes:
    """A request with exactly these headers, and what a body needs."""
    lines = [f"{method} {target} HTTP/1.1", *headers, "Connection: close"]
    body = BODY if method == "POST" else b""
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return server.raw(("\r\n".join(lines) + "\r\n\r\n").encode() + body)


# A loopback address ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST", "Localhost.", "a.b.localhost:1", "127.0.0.1", "127.0.0.1:8000"),
        *("127.255.0.9:80", "[::1]", "[::1]:8000", "127.0.0.1.:8000", "localhost:"),
    ],
)
def test_loopback_names_are_answered(server: Running, host: str) -> None:
    assert status(call(server, f"Host: {host}")) == 200
    assert status(call(server, f"Host: {host}", target="/", method="GET")) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"),
        *("192.168.1.1", "0.0.0.0:8000", "[::2]", "[::ffff:8.8.8.8]:8000", "128.0.0.1", "xn--lcalhost-54a", "local"),
    ],
)
@pytest.mark.parametrize("keys", [Keys(), Keys.of("sesame")], ids=["open", "keys"])
def test_other_names_are_refused_on_a_loopback_address(llm: LLM, keys: Keys, host: str) -> None:
    """A page whose name was pointed to 127.0.0.1: its browser sends no Origin with GET, and the page's with POST."""
    with serving(llm, keys=keys) as server:
        key = "Authorization: Bearer sesame"
        for headers in ((), (f"Origin: http://{host}",), ("Sec-Fetch-Site: same-origin",)):
            answer = call(server, f"Host: {host}", key, *headers)
            assert (status(answer), body_of(answer)["error"]["code"]) == (403, "host_not_allowed")
            for page in ("/", "/metrics", "/v1/status", "/openapi.json", "/health", "/no-such-page"):
                assert status(call(server, f"Host: {host}", key, *headers, target=page, method="GET")) == 403
        assert "--allow-host" in body_of(answer)["error"]["message"]
        assert not server.engine.stats.tokens_sampled


def test_a_wrong_host_is_refused_before_the_body_is_read(server: Running) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Type: application/json\r\n"
    with server.connect() as sock:
        sock.sendall((head + "Content-Length: 1000000\r\n\r\n").encode())
        assert status(sock.recv(65536)) == 403


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Host: localhost", "Host: evil.example"),
        ("Host: evil.example", "Host: localhost"),
        ("Host: localhost", "Host: localhost"),
        ("Host:",),
        ("Host: localhost, evil.example",),
        ("Host: localhost/evil.example",),
        ("Host: evil.example@localhost",),
        ("Host: localhost evil.example",),
        ("Host: [::1",),
        ("Host: localhost:80a",),
    ],
)
def test_one_host_header_is_needed(server: Running, headers: tuple[str, ...]) -> None:
    assert status(call(server, *headers, target="/health", method="GET")) == 400


def test_absolute_targets_and_forwarded_hosts_do_not_get_around_it(server: Running) -> None:
    def get(target: str, *headers: str) -> int:
        return status(call(server, *headers, target=target, method="GET"))

    assert get("http://localhost/health", "Host: localhost") == 200
    assert get("http://evil.example/health", "Host: localhost") == 403
    assert get("http://localhost/health", "Host: evil.example") == 403
    assert get("http://localhost@evil.example/health", "Host: localhost") in (400, 403)
    for name in ("X-Forwarded-Host", "X-Host", "X-Original-Host", "X-Forwarded-Server"):
        assert get("/health", "Host: evil.example", f"{name}: localhost") == 403
    assert get("/health", "Host: evil.example", "Forwarded: host=localhost") == 403
    assert (
        status(server.raw(b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")) >= 400
    )


def test_an_upgrade_is_not_done(server: Running) -> None:
    headers = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
    lines = ["GET /health HTTP/1.1", "Host: localhost", "Connection: Upgrade", *headers, "\r\n"]
    with server.connect() as sock:
        sock.sendall("\r\n".join(lines).encode())
        assert status(sock.recv(65536)) == 200


# A proxy --------------------------------------------------------------------------------------------------------------


def test_a_proxys_name_is_let_in_by_option(llm: LLM) -> None:
    with serving(llm, hosts=("LLM.example.org.",)) as server:
        for host in ("llm.example.org", "LLM.example.org:443", "localhost"):
            assert status(call(server, f"Host: {host}")) == 200
        own = ("Host: llm.example.org", "Origin: https://llm.example.org")
        assert status(call(server, *own)) == 200, "the playground behind it"
        assert status(call(server, "Host: llm.example.org:443", "Origin: https://llm.example.org")) == 200
        for origin in ("https://llm.example.org:444", "https://example.org", "https://a.llm.example.org", "null"):
            assert status(call(server, "Host: llm.example.org", f"Origin: {origin}")) == 403
        assert status(call(server, "Host: other.example.org")) == 403


@pytest.mark.parametrize("host", ["https://a.example", "a.example:80", "*", "", "a b", "a/b", ".", "a..b"])
def test_hosts_to_allow_are_names(host: str) -> None:
    with pytest.raises(SchemeError, match="an allowed host must look like"):
        Settings(hosts=(host,))


# An address that others can reach -------------------------------------------------------------------------------------


def test_without_keys_a_web_page_must_be_listed_or_ours(llm: LLM) -> None:
    options = {**EVERYWHERE, "origins": ("https://good.example",), "hosts": ("gpu.example",)}
    with serving(llm, **options) as server:
        for host in ("gpu", "gpu.example:8000", "10.0.0.7:8000", "anything.example"):
            assert status(call(server, f"Host: {host}")) == 200, "programs send no Origin"
        for name in ("10.0.0.7:8000", "[fe80::7]:8000", "gpu.example:8000", "localhost:8000", "127.0.0.1:8000"):
            assert status(call(server, f"Host: {name}", f"Origin: http://{name}")) == 200, "a name of ours"
        assert status(call(server, "Host: gpu", "Origin: https://good.example")) == 200
        for name in ("evil.example", "evil.example:8000", "gpu", "10.0.0.7.evil.example"):
            answer = call(server, f"Host: {name}", f"Origin: http://{name}")
            assert (status(answer), body_of(answer)["error"]["code"]) == (403, "origin_not_allowed")
        for origin in (
            "http://10.0.0.8:8000",
            "http://10.0.0.7:9000",
            "http://localhost",
            "null",
            "file://",
            "http://[",
        ):
            assert status(call(server, "Host: 10.0.0.7:8000", f"Origin: {origin}")) == 403, origin


def test_with_keys_the_key_decides(llm: LLM) -> None:
    with serving(llm, **EVERYWHERE, keys=Keys.of("sesame")) as server:
        key = "Authorization: Bearer sesame"
        own = ("Host: gpu.example", "Origin: http://gpu.example")
        assert status(call(server, *own)) == 401
        assert status(call(server, *own, key)) == 200
        assert status(call(server, "Host: gpu.example", "Origin: http://evil.example", key)) == 403


# What browsers say ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, EVERYWHERE], ids=["loopback", "everywhere"])
def test_requests_that_browsers_call_foreign_are_refused(llm: LLM, options: dict[str, str]) -> None:
    with serving(llm, **options) as server:
        for site in ("cross-site", "same-site", "Cross-Site"):
            foreign = ("Host: localhost", f"Sec-Fetch-Site: {site}")
            assert status(call(server, *foreign)) == 403
            assert status(call(server, *foreign, "Sec-Fetch-Mode: no-cors", target="/metrics", method="GET")) == 403
            link = call(server, *foreign, "Sec-Fetch-Mode: navigate", target="/", method="GET")
            assert status(link) == 200, "a link on another page may lead to the playground"
            assert b"frame-ancestors 'none'" in link
            assert status(call(server, *foreign, "Sec-Fetch-Mode: navigate")) == 403, "a form may not post"
        for site in ("same-origin", "none"):
            assert status(call(server, "Host: localhost", f"Sec-Fetch-Site: {site}")) == 200
        assert status(call(server, "Host: localhost", "Origin: http://localhost", "Origin: http://evil.example")) == 403


def test_pages_of_the_public_web_are_let_in_by_name_only(llm: LLM) -> None:
    preflight = (
        "Host: localhost",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Private-Network: true",
    )
    with serving(llm, origins=("https://good.example", "*")) as server:
        answer = call(server, *preflight, "Origin: https://good.example", method="OPTIONS")
        assert status(answer) == 204
        assert b"Access-Control-Allow-Private-Network: true" in answer
        answer = call(server, *preflight, "Origin: https://any.example", method="OPTIONS")
        assert status(answer) == 204
        assert b"Private-Network" not in answer
        assert b"Access-Control-Allow-Credentials" not in answer
        assert b"Vary: Origin" in call(server, "Host: localhost")
    with serving(llm) as server:
        answer = call(server, *preflight, "Origin: https://good.example", method="OPTIONS")
        assert status(answer) == 403
        assert b"Access-Control" not in answer


def test_forms_of_other_pages_cannot_post(server: Running) -> None:
    """Browsers send these types across origins without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Type: {kind}"]
        lines += [f"Content-Length: {len(BODY)}", "Connection: close"]
        assert status(server.raw(("\r\n".join(lines) + "\r\n\r\n").encode() + BODY)) == 415


def test_the_address_that_was_bound_decides(llm: LLM) -> None:
    """A name that means this machine is a loopback address, too."""
    with serving(llm, host="localhost", sock=socket.create_server(("127.0.0.1", 0))) as server:
        assert status(call(server, "Host: evil.example")) == 403
