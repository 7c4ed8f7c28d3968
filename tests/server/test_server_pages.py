"""The pages beside completions: models, tokenize, status, metrics, health; keys, origins, logs."""

import base64
import hashlib
import json
import re
import time
from pathlib import Path

import pytest
from server_fixtures import llm, server  # noqa: F401
from tiny_server import CONTEXT, Running, body_of, post, serving, slow_down, status

from crelle import LLM
from crelle.errors import FormatError, SchemeError
from crelle.server import handlers
from crelle.server.metrics import Rate, histogram, quantiles
from crelle.server.responses import TextOffset
from crelle.server.settings import Keys, is_loopback
from crelle.server.token_text import TokenTexts

SECRET = "a-secret-in-the-prompt"


def complete(server: Running, *headers: str, **body: object) -> bytes:
    given = {"prompt": SECRET, "max_tokens": 3, "temperature": 0, **body}
    return server.raw(post("/v1/completions", json.dumps(given).encode(), *headers))


def numbers(server: Running) -> dict[str, float]:
    """The metrics page, read as Prometheus reads it."""
    page = server.get("/metrics").split(b"\r\n\r\n", 1)[1].decode()
    found, kinds = {}, {}
    for line in page.splitlines():
        if line.startswith("# TYPE"):
            kinds[line.split()[2]] = line.split()[3]
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert re.fullmatch(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})?', name), line
            base = re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name)
            assert base in kinds or name.split("{")[0] in kinds, "every number has a type"
            found[name] = float(value)
    return found


def test_tokenize_is_the_tokenizer(server: Running, llm: LLM) -> None:
    def tokens(body: object) -> list[int]:
        answer = body_of(server.raw(post("/tokenize", json.dumps(body).encode())))
        assert answer["count"] == len(answer["tokens"])
        assert answer["context"] == CONTEXT
        return list(answer["tokens"])

    assert tokens({"prompt": "Café"}) == llm.tokenizer.encode("Café")
    assert tokens({"prompt": "Café", "add_special_tokens": False}) == llm.tokenizer.encode("Café", bos=False)
    assert tokens({"prompt": "x" * 10_000}) == llm.tokenizer.encode("x" * 10_000)
    messages = [{"role": "user", "content": "Hello"}]
    assert tokens({"messages": messages}) == llm.tokenizer.encode_chat(messages)
    answer = server.raw(post("/tokenize", b'{"prompt": 3}'))
    assert (status(answer), body_of(answer)["error"]["param"]) == (400, "prompt")
    answer = server.raw(post("/tokenize", b"{}"))
    assert "an object with prompt or an object with messages" in body_of(answer)["error"]["message"]


def test_status_says_whether_the_model_can_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as server:
        assert body_of(server.get("/v1/status"))["chat"] is True
        monkeypatch.setattr(llm.tokenizer, "_template_source", None)
        assert body_of(server.get("/v1/status"))["chat"] is False


def test_status_has_exactly_what_the_playground_reads(llm: LLM) -> None:
    with serving(llm, engine={"kv": 4}) as server:
        slow_down(server.engine, 0.01)
        with server.connect() as sock:
            body = {"prompt": "Hello", "max_tokens": 1500, "temperature": 0, "stream": True}
            sock.sendall(post("/v1/completions", json.dumps(body).encode()))
            sock.recv(1)
            time.sleep(1.2)
            found = body_of(server.get("/v1/status"))
        kinds = {name: type(value) for name, value in found.items()}
        assert kinds == {
            "model": str,
            "precisions": list,
            "kv": str,
            "pages": int,
            "pages_used": int,
            "page_tokens": int,
            "chat": bool,
            "running": int,
            "waiting": int,
            "tokens_per_second": float,
        }
        assert (found["model"], found["precisions"], found["kv"]) == ("tiny", [2, 3, 4], "kv4")
        assert (found["running"], found["waiting"], found["pages"]) == (1, 0, 600)
        assert found["pages_used"] > 0
        assert 5 < found["tokens_per_second"] < 110
        server.assert_empty()


def test_metrics_count(llm: LLM) -> None:
    with serving(llm) as server:
        for _ in range(3):
            assert status(complete(server, temperature=0)) == 200
        assert status(complete(server, n=0)) == 400
        assert status(server.get("/no-such-page")) == 404
        server.assert_empty()
        found = numbers(server)
        assert found['crelle_requests_total{path="/v1/completions",status="200"}'] == 3
        assert found['crelle_requests_total{path="/v1/completions",status="400"}'] == 1
        assert found['crelle_requests_total{path="other",status="404"}'] == 1
        assert found["crelle_time_to_first_token_seconds_count"] == found["crelle_time_per_token_seconds_count"] == 3
        assert found['crelle_time_to_first_token_seconds_bucket{le="+Inf"}'] == 3
        median, slow = (found[f'crelle_recent_time_to_first_token_seconds{{quantile="{q}"}}'] for q in (0.5, 0.99))
        assert 0 < median <= slow <= found["crelle_time_to_first_token_seconds_sum"]
        assert found["crelle_prefill_seconds_total"] > 0
        assert found["crelle_decode_seconds_total"] > 0
        assert found["crelle_tokens_drawn_total"] == 9
        assert found["crelle_prompt_tokens_total"] == 3 * (len(SECRET) + 1)
        assert found["crelle_kv_pages"] == 600
        zero = ("kv_pages_used", "queue_length", "requests_running", "requests_waiting", "texts_running")
        assert [found[f"crelle_{name}"] for name in zero] == [0] * 5


def test_metrics_have_the_names_and_types_that_dashboards_know(server: Running) -> None:
    gauges = """ready queue_length queue_limit texts_running requests_running requests_waiting kv_pages kv_pages_used
        kv_pages_cached tokens_per_second recent_time_to_first_token_seconds"""
    counters = """steps tokens_run tokens_drawn draft_tokens accepted_tokens tokens_reused prompt_tokens preemptions
        expert_uses expert_hits texts_finished texts_failed disconnects slow_readers timeouts requests prefill_seconds
        decode_seconds"""
    want = {f"crelle_{name}": "gauge" for name in gauges.split()}
    want |= {f"crelle_{name}_total": "counter" for name in counters.split()}
    want |= dict.fromkeys(("crelle_time_to_first_token_seconds", "crelle_time_per_token_seconds"), "histogram")
    assert status(complete(server)) == 200
    head, _, page = server.get("/metrics").partition(b"\r\n\r\n")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    kinds = dict(line.split()[2:] for line in page.decode().splitlines() if line.startswith("# TYPE"))
    assert kinds == want
    names = {re.sub(r"_(bucket|sum|count)$", "", name.split("{")[0]) for name in numbers(server)}
    assert names == set(want)


def test_servers_in_one_process_count_apart(server: Running, llm: LLM) -> None:
    assert status(complete(server)) == 200
    with serving(llm) as other:
        assert numbers(other)["crelle_time_to_first_token_seconds_count"] == 0


def test_quantiles_are_values_that_were_seen() -> None:
    values = [float(v) for v in range(101)]
    assert list(quantiles(reversed(values), (0.5, 0.99))) == [(0.5, 50.0), (0.99, 99.0)]
    assert list(quantiles([7.0], (0.5, 0.99))) == [(0.5, 7.0), (0.99, 7.0)]
    assert list(quantiles([], (0.5,))) == []


def test_histogram_and_rate() -> None:
    counted = histogram("h", "", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 5.0):
        counted.observe(value)
    (metric,) = counted.collect()
    buckets = [(sample.labels["le"], sample.value) for sample in metric.samples if sample.name == "h_bucket"]
    assert buckets == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    rate = Rate()
    for second in range(20):
        rate.sample(10 * second, now=float(second))
    assert rate.per_second(195, now=19.5) == pytest.approx(10)
    for second in range(20, 30):
        rate.sample(195, now=float(second))
    assert rate.per_second(195, now=30.0) == 0


def test_health_ready_models_and_the_document(server: Running) -> None:
    assert body_of(server.get("/health")) == {"status": "ok"}
    assert body_of(server.get("/ready")) == {"status": "ready"}
    assert body_of(server.get("/v1/models"))["data"][0]["context"] == CONTEXT
    assert status(server.get("/v1/models/other/thing")) == 404
    assert body_of(server.get("/openapi.json"))["openapi"] == "3.1.0"


def test_playground_is_served_where_there_is_one(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "PLAYGROUND", tmp_path / "page.html")
    assert status(server.get("/")) == 404
    (tmp_path / "page.html").write_text("<script>alert('é')</script>")
    answer = server.get("/")
    assert answer.endswith("<script>alert('é')</script>".encode())
    assert b"text/html; charset=utf-8" in answer
    digest = base64.b64encode(hashlib.sha256("alert('é')".encode()).digest())
    assert b"script-src 'sha256-" + digest + b"'; style-src 'none'; connect-src 'self'" in answer
    assert b"unsafe" not in answer


# Who may call ---------------------------------------------------------------------------------------------------------


def test_guessed_tokens_are_counted_in_answers_and_metrics(llm: LLM) -> None:
    said = []
    for how in ("off", "ngram:tokens=3,adaptive=false"):
        with serving(llm, engine={"speculate": how}) as server:
            answer = body_of(complete(server, prompt="one two one two one two one", max_tokens=40, ignore_eos=True))
            counts, found = answer["usage"]["completion_tokens_details"], numbers(server)
            right, wrong = counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]
            assert (found["crelle_accepted_tokens_total"], found["crelle_draft_tokens_total"]) == (right, right + wrong)
            assert found["crelle_tokens_drawn_total"] == answer["usage"]["completion_tokens"] == 40
            assert (right > 0) == (how != "off")
            said.append(answer["choices"][0]["text"])
    assert said[0] == said[1]


def test_without_a_key_only_harmless_pages_open(llm: LLM) -> None:
    with serving(llm, keys=Keys.of("sesame")) as server:
        for page in ("/health", "/ready", "/openapi.json"):
            assert status(server.get(page)) == 200
        for page in ("/v1/models", "/metrics", "/v1/status", "/nowhere"):
            answer = server.get(page)
            assert status(answer) == 401
            assert b"WWW-Authenticate: Bearer" in answer
            assert status(server.get(page, "Authorization: Basic sesame")) == 401
        assert status(server.get("/metrics", "Authorization: bearer sesame")) == 200
        assert status(complete(server)) == 401
        assert status(complete(server, "Authorization: Bearer sesame")) == 200
        document = body_of(server.get("/openapi.json"))
        assert document["security"] == [{"key": []}]


def test_prefixes_are_not_shared_between_keys(llm: LLM) -> None:
    def cached(server: Running, key: str) -> int:
        answer = complete(server, f"Authorization: Bearer {key}", prompt="x" * 100)
        return int(body_of(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serving(llm, keys=Keys.of("one", "two")) as server:
        assert [cached(server, key) for key in ("one", "one", "two", "two")] == [0, 96, 0, 96]
        server.assert_empty()


def test_keys_come_from_file_environment_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRELLE_API_KEYS", "three, four,")
    (tmp_path / "keys").write_text("# mine\none\n\n  two  \n")
    keys = Keys.read(tmp_path / "keys", "zero")
    assert [keys.find(k) for k in ("zero", "one", "two", "three", "four")] == [0, 1, 2, 3, 4]
    assert [keys.find(k) for k in ("", "On", "one ", "# mine", "one\udcff")] == [None] * 5
    assert "one" not in repr(keys)
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(FormatError, match="contains no API key"):
        Keys.read(tmp_path / "empty")
    with pytest.raises(FormatError, match="cannot read API keys"):
        Keys.read(tmp_path / "absent")
    with pytest.raises(SchemeError, match="visible ASCII"):
        Keys.of("with space")


def test_no_web_page_may_call_unless_it_is_listed(llm: LLM) -> None:
    preflight = (
        b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: %b\r\nAccess-Control-Request-Method: POST\r\n"
    )
    preflight += b"Connection: close\r\n\r\n"
    with serving(llm, origins=("https://good.example",)) as server:
        answer = complete(server, "Origin: https://good.example")
        assert status(answer) == 200
        assert b"Access-Control-Allow-Origin: https://good.example" in answer
        answer = server.raw(preflight % b"https://good.example")
        assert status(answer) == 204
        assert b"Access-Control-Allow-Headers: Authorization, Content-Type" in answer
        for bad in ("https://evil.example", "null", "https://good.example.evil.example"):
            assert status(complete(server, f"Origin: {bad}")) == 403
            assert status(server.raw(preflight % bad.encode())) == 403
        with server.connect() as sock:
            given = {"prompt": "a", "max_tokens": 2, "stream": True}
            sock.sendall(post("/v1/completions", json.dumps(given).encode(), "Origin: https://good.example"))
            assert b"Access-Control-Allow-Origin: https://good.example" in sock.recv(65536)
    with serving(llm) as server:
        assert status(complete(server, "Origin: http://localhost:3000")) == 200
        assert b"Access-Control" not in complete(server, "Origin: http://localhost:3000")
        assert status(server.raw(preflight % b"http://localhost:3000")) == 405


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example", "")))


# Logs -----------------------------------------------------------------------------------------------------------------


def test_log_is_json_and_has_no_prompts_unless_asked(llm: LLM) -> None:
    with serving(llm) as server:
        assert status(complete(server)) == 200
        assert status(complete(server, stop=[SECRET], n="x" + SECRET)) == 400
        assert status(server.get("/health")) == 200
        server.assert_empty()
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert [line["event"] for line in lines] == ["ready", "request", "request", "stopping", "stopped"]
    good, bad = lines[1:3]
    assert (good["status"], good["prompt_tokens"], good["completion_tokens"]) == (200, len(SECRET) + 1, 3)
    assert (bad["status"], bad["code"], bad["param"]) == (400, "invalid_value", "n")
    assert SECRET not in server.log
    with serving(llm, log_prompts=True) as server:
        assert status(complete(server)) == 200
        server.assert_empty()
    assert SECRET in server.log


def test_places_of_tokens_count_characters_not_bytes() -> None:
    place = TextOffset()
    assert [place.take(t) for t in (b"a", b"\xe2", b"\x82", b"\xac5", b"\xc3\xa9", b"b")] == [0, 1, 1, 1, 3, 4]


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_bytes_of_tokens_are_the_bytes_of_the_text(llm: LLM) -> None:
    texts = TokenTexts(llm.tokenizer)
    for text in ("Hello world", "Café €5 𝄞\n\t\x00", "".join(map(chr, range(1, 400)))):
        assert b"".join(map(texts.raw, llm.tokenizer.encode(text, bos=False))) == text.encode()
    part = llm.tokenizer.encode("€", bos=False)[0]
    assert texts.text(part) == "bytes:\\xe2"
    assert texts.text(256) == "<|bos|>"
    assert texts.text(10_000) == "<unused 10000>"


def test_bytes_of_a_real_tokenizers_tokens(data: Path) -> None:
    from crelle.engine.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer(data / "stories15M")
    texts = TokenTexts(tokenizer)
    text = "Once upon a time, naïve €5 𝄞!"
    assert b"".join(map(texts.raw, tokenizer.encode(text, bos=False))).decode().lstrip(" ") == text
