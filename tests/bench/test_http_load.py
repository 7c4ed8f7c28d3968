"""The load generator, against a server without a model: what it sends, what it measures, what it makes of faults."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
from alarm import at_most
from hypothesis import given
from hypothesis import strategies as st
from server.fake_server import FakeServer

from crelle.bench.load import http_load
from crelle.bench.load.http_load import Arrival, LoadReport, Percentiles, poisson, run_closed_loop, run_trace
from crelle.errors import CrelleError, SchemeError

NO_EVENT = "the stream holds something that is not an event of this interface"
PAUSE = 0.02  # seconds before each word of the server's


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(answer=lambda body: "one two three four five six", pause=PAUSE) as server:
        yield server


def loop(server: FakeServer, clients: int = 2, seconds: float = 0.5, **options: object) -> LoadReport:
    return run_closed_loop(
        server.url, clients=clients, seconds=seconds, prompts=["a", "b", "c"], max_tokens=6, **options
    )  # type: ignore[arg-type]


def test_closed_loop_asks_as_openai_clients_do(server: FakeServer) -> None:
    report = loop(server, api_key="k", extra={"temperature": 0.5, "precision": 3})
    body, headers = server.requests[0], server.headers[0]
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "precision": 3,
    }
    assert headers["Authorization"] == "Bearer k"
    assert {r["messages"][0]["content"] for r in server.requests} == {"a", "b", "c"}  # all prompts take their turn
    assert report.requests == len(server.requests) == len(report.calls)
    assert report.failures == 0
    assert all(c.text == "one two three four five six" and c.tokens == 6 and c.status == 200 for c in report.calls)


def test_closed_loop_keeps_exactly_its_clients_busy(server: FakeServer) -> None:
    report = loop(server, clients=5)
    changes = sorted([(c.begun, 1) for c in report.calls] + [(c.begun + c.seconds, -1) for c in report.calls])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    assert peak == 5
    assert all(c.begun < 0.5 for c in report.calls)  # nobody begins when the time is over


def test_times_are_those_of_the_server(server: FakeServer) -> None:
    report = loop(server, clients=1)
    assert report.first_token is not None
    assert report.per_token is not None
    assert report.answer is not None
    assert report.stall is not None
    assert PAUSE <= report.first_token.p50 < report.answer.p50
    assert 0.5 * PAUSE <= report.per_token.p50 < report.answer.p50
    assert report.answer.p50 >= 6 * PAUSE
    assert report.per_token.p50 <= report.stall.p50
    assert 0 < report.tokens_per_second <= 1 / PAUSE
    for c in report.calls:
        assert c.first is not None
        assert c.per_token is not None
        assert c.first + 5 * c.per_token <= c.seconds


def test_throughput_counts_what_came_in_time(server: FakeServer) -> None:
    server.answer, server.pause = lambda body: "word " * 20, 0.05
    report = run_closed_loop(server.url, clients=1, seconds=0.5, prompts=["a"], max_tokens=20)
    (call,) = report.calls  # a second long: half of it lies beyond the end
    assert call.tokens == 20
    assert 0 < call.within < 0.6
    assert report.tokens == round(20 * call.within)
    assert report.tokens_per_second == report.tokens / 0.5
    assert report.requests_per_second == 0


def test_completions_without_chat(server: FakeServer) -> None:
    report = loop(server, chat=False, model="other")
    assert server.paths.count("/v1/models") == 0  # a model that is named is not asked for
    assert server.requests[0]["prompt"] == "a"
    assert server.requests[0]["model"] == "other"
    assert report.calls[0].text == "one two three four five six"


def test_pieces_of_events_are_put_together(server: FakeServer) -> None:
    server.answer, server.pause, server.dribble = lambda body: "naïve 日本語 🙂", 0.0, True
    report = loop(server, clients=3)
    assert report.failures == 0
    assert {c.text for c in report.calls} == {"naïve 日本語 🙂"}


def test_trace_sends_when_due_whatever_the_server_does(server: FakeServer) -> None:
    server.pause = 0.1
    due = [0.0, 0.05, 0.05, 0.3]
    report = run_trace(server.url, [Arrival(at, f"p{i}", 4) for i, at in enumerate(due)])
    assert report.clients is None
    assert [c.begun for c in report.calls] == due
    assert [r["max_tokens"] for r in server.requests] == [4] * 4
    assert [c.tokens for c in report.calls] == [4] * 4
    assert report.failures == 0
    assert all(a.begun + a.seconds > b.begun for a, b in pairwise(report.calls))  # nobody waited for another
    assert report.seconds >= 0.7  # the last is due at 0.3 and takes 0.4
    assert report.tokens == 16


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"error_after": 2}, "The model ran out of pages."),
        ({"break_after": 2}, "the stream ended before the answer was complete"),
        ({"failure": (500, "oops", {})}, "500: Internal Server Error"),
        ({"failure": (200, "data: [1, 2]\n\n", {})}, NO_EVENT),
        ({"failure": (200, "data: nonsense\n\n", {})}, NO_EVENT),
        ({"failure": (200, "", {})}, "the stream ended before the answer was complete"),
    ],
)
def test_failures_are_counted_by_their_sentence(server: FakeServer, fault: dict[str, object], sentence: str) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    report = loop(server)
    assert report.failures == report.requests > 0
    assert report.errors == {sentence: report.requests}
    assert report.tokens == 0
    assert report.first_token is None


def test_a_model_without_a_chat_template_is_asked_for_completions(server: FakeServer) -> None:
    assert loop(server, chat=None).chat
    assert {r["max_tokens"] for r in server.requests if "messages" in r} == {1, 6}, "one token to try, then the load"
    server.chats = False
    server.requests.clear()
    report = loop(server, chat=None, give_up=8)
    assert (report.chat, report.failures) == (False, 0)
    assert ["messages" in r for r in server.requests].count(True) == 1
    assert report.calls[0].text == "one two three four five six"
    server.failure = (404, {"error": {"message": "no such page"}}, {})
    with pytest.raises(
        CrelleError, match=r"neither chats nor completions: /v1/chat/completions 404: no such page; /v1/"
    ):
        loop(server, chat=None)


def test_a_load_whose_first_requests_all_fail_is_stopped(server: FakeServer) -> None:
    server.chats = False
    with pytest.raises(
        CrelleError, match=r"the first 8 requests to http\S+/v1/chat/completions failed \(8 times: 400: this"
    ):
        loop(server, seconds=60, give_up=8)
    assert (sent := len(server.requests)) < 12
    with pytest.raises(CrelleError, match="the first 8 requests"):
        run_trace(server.url, [Arrival(i / 10, "a", 1) for i in range(600)], give_up=8)
    assert len(server.requests) < sent + 50
    with pytest.raises(CrelleError, match="all 2 requests"):
        run_trace(server.url, [Arrival(0.0, "a", 1)] * 2, give_up=8)


def test_a_server_that_is_full_is_waited_for(server: FakeServer) -> None:
    def free(*_: object) -> None:
        if len(server.requests) > 12:
            server.failure = None

    server.failure = (429, {"error": {"message": "the queue is full"}}, {"Retry-After": "0.01"})
    report = loop(server, give_up=2, progress=free)
    assert 10 < report.failures < report.requests
    server.failure = (429, {"error": {"message": "the queue is full"}}, {"Retry-After": "0.01"})
    with pytest.raises(CrelleError, match=r"all \d+ requests .* failed \(\d+ times: 429: the queue is full\)"):
        loop(server, give_up=2)


def test_failures_after_an_answer_do_not_stop_a_load(server: FakeServer) -> None:
    def fail(*_: object) -> None:
        server.failure = (500, "oops", {})

    report = loop(server, seconds=1.0, give_up=1, progress=fail)
    assert 0 < report.requests - report.failures <= 2 < report.failures


def test_a_refused_client_waits_as_it_is_told(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_load, "_LONGEST_PAUSE", 3600.0)
    server.failure = (429, {"error": {"message": "the queue is full"}}, {"Retry-After": "3600"})
    with at_most(60, TimeoutError("it waited beyond the end")):
        report = loop(server, clients=3, seconds=0.6)
    assert report.errors == {"429: the queue is full": 3}
    server.failure = (503, {"error": {"message": "starting"}}, {})
    assert 1 <= loop(server, clients=1, seconds=0.6).requests <= 7  # without a word it waits a tenth of a second


def test_an_answer_that_never_ends_is_given_up(server: FakeServer) -> None:
    server.pause = 10
    report = loop(server, timeout=0.2)
    assert set(report.errors) == {"no whole answer came in time"}


def test_a_server_that_dies_is_a_failure_not_a_crash() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(FakeServer(pause=PAUSE))
        report = loop(server, clients=2, seconds=1.0, progress=lambda *_: stack.close())  # with the first answer
    assert 0 < report.failures < report.requests
    assert all(
        e.startswith(("it cannot be reached", "the connection broke", "the stream ended")) for e in report.errors
    )


def test_no_server_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        with pytest.raises(CrelleError, match=r"no server at http://127.0.0.1:\d+: it cannot be reached"):
            run_closed_loop(
                f"http://127.0.0.1:{taken.getsockname()[1]}", clients=1, seconds=1, prompts=["a"], max_tokens=1
            )


def test_a_wrong_key_is_a_sentence(server: FakeServer) -> None:
    server.api_key = "right"
    with pytest.raises(CrelleError, match="does not list its models: 401: This server needs an API key"):
        loop(server, api_key="wrong")
    assert loop(server, api_key="right").failures == 0


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_address_with_and_without_v1(server: FakeServer, end: str) -> None:
    report = run_trace(server.url + end, [Arrival(0.0, "a", 1)])
    assert report.failures == 0
    assert report.url == server.url


@pytest.mark.parametrize(
    "wrong", [{"clients": 0}, {"seconds": 0.0}, {"max_tokens": -1}, {"prompts": []}, {"timeout": float("nan")}]
)
def test_senseless_loads_are_refused(wrong: dict[str, object]) -> None:
    fine: dict[str, object] = {"clients": 1, "seconds": 1.0, "prompts": ["a"], "max_tokens": 1}
    with pytest.raises(SchemeError):
        run_closed_loop("http://127.0.0.1:1", **(fine | wrong))  # type: ignore[arg-type]


def test_senseless_addresses_and_traces_are_refused() -> None:
    for url in ("127.0.0.1:8000", "ftp://x", "http://", ""):
        with pytest.raises(SchemeError, match="should look like"):
            run_trace(url, [Arrival(0.0, "a", 1)])
    for arrivals in ([], [Arrival(-1.0, "a", 1)], [Arrival(0.0, "a", 0)]):
        with pytest.raises(SchemeError):
            run_trace("http://127.0.0.1:1", arrivals)
    with pytest.raises(SchemeError):
        poisson(0.0, 1.0, ["a"], 1)


def test_summary_is_json_without_the_calls(server: FakeServer) -> None:
    report = loop(server)
    found = json.loads(json.dumps(report.summary()))
    assert "calls" not in found
    assert found["first_token"]["p99"] == report.first_token.p99  # type: ignore[union-attr]
    assert found["clients"] == 2


def test_progress_is_told(server: FakeServer) -> None:
    told: list[tuple[float, int, int]] = []
    report = loop(server, progress=lambda *now: told.append(now))
    assert [n for _, n, _ in told] == list(range(1, report.requests + 1))
    assert {failed for _, _, failed in told} == {0}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_seen(values: list[float]) -> None:
    p = Percentiles.of(values)
    assert p is not None
    assert min(values) <= p.p50 <= p.p90 <= p.p99 <= p.max == max(values)
    assert sum(v <= p.p50 for v in values) >= len(values) / 2
    assert sum(v <= p.p90 for v in values) >= 0.9 * (len(values) - 1)


def test_percentiles_of_known_lists() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([2.0]) == Percentiles(2.0, 2.0, 2.0, 2.0, 2.0)
    assert Percentiles.of([float(v) for v in range(101)]) == Percentiles(50.0, 50.0, 90.0, 99.0, 100.0)


def test_poisson_arrivals_have_their_rate_and_their_seed() -> None:
    found = poisson(50.0, 100.0, ["a", "b"], 7, seed=3)
    assert found == poisson(50.0, 100.0, ["a", "b"], 7, seed=3) != poisson(50.0, 100.0, ["a", "b"], 7, seed=4)
    assert 4700 < len(found) < 5300
    assert all(x.at < y.at < 100 for x, y in pairwise(found))
    assert [a.prompt for a in found[:3]] == ["a", "b", "a"]
