"""/health and /ready tell the truth about the engine, and a server whose engine has stopped ends by itself."""

import asyncio
import json
import threading
from typing import Any

import pytest
import torch
from server_fixtures import llm, want  # noqa: F401
from test_server_faults import wait_for
from tiny_server import GREEDY, Running, ask, body_of, post, serving, slow_down, status, still_serves

from crelle import LLM
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.engine import Engine
from crelle.engine.faults import FAILED_STEPS
from crelle.engine.scheduler import Step
from crelle.server.app import Server, running
from crelle.server.run import _serve
from crelle.server.settings import Settings

SECRET = "the device fell off the bus at /secret/path"
LOST = f"CUDA error: unspecified launch failure\n{SECRET}"


def break_down(engine: Engine, message: str, requests: int = 0) -> None:
    """Let the runner fail for good, as soon as so many requests run or wait."""
    compute, broken = engine.runner.run, False

    def run(step: Step) -> torch.Tensor:
        nonlocal broken
        broken = broken or len(engine._active) >= requests
        if broken:
            raise RuntimeError(message)
        return compute(step)

    engine.runner.run = run  # type: ignore[method-assign]


def assert_not_healthy(server: Running, why: str) -> None:
    """Both pages say why, to anyone: without what the exception quotes."""
    wait_for(lambda: server.state.service.error is not None)
    for page in ("/ready", "/health"):
        answer = server.get(page)
        assert (status(answer), body_of(answer)["error"]["code"]) == (503, "unavailable")
        assert why in body_of(answer)["error"]["message"]
        assert b"secret" not in answer
    assert b"\ncrelle_ready 0" in server.get("/metrics")
    code, body = ask(server)
    assert (code, body["error"]["code"]) == (503, "unavailable")
    wait_for(lambda: f'"engine died", "reason": "{why}' in server.log)
    wait_for(server.server.stop.is_set)  # whoever runs the server is asked to end it
    server.assert_empty()


def test_a_device_that_fails_every_step_is_seen(llm: LLM) -> None:
    with serving(llm) as server:
        break_down(server.engine, SECRET)
        codes = [ask(server)[0] for _ in range(FAILED_STEPS)]
        assert codes[:-1] == [500] * (FAILED_STEPS - 1)
        assert codes[-1] in (500, 503)
        assert_not_healthy(server, "3 consecutive steps failed")


def test_a_lost_cuda_context_is_seen_at_once(llm: LLM) -> None:
    with serving(llm) as server:
        break_down(server.engine, LOST)
        assert ask(server)[0] in (500, 503)
        assert_not_healthy(server, "the CUDA context is lost (unspecified launch failure)")


def test_a_step_that_fails_now_and_then_leaves_the_server_healthy(llm: LLM, want: str) -> None:
    with serving(llm) as server:
        compute = server.engine.runner.run
        for _ in range(FAILED_STEPS + 1):
            break_down(server.engine, SECRET)
            assert ask(server)[0] == 500
            server.engine.runner.run = compute  # type: ignore[method-assign]
            still_serves(server, want)
        assert status(server.get("/ready")) == status(server.get("/health")) == 200
        assert not server.server.stop.is_set()


def test_a_step_that_does_not_end_is_seen(llm: LLM, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may hang without an error. While the step runs, and only then, the server is not healthy."""
    with serving(llm) as server:
        compute, hang = server.engine.runner.run, threading.Event()

        def run(step: Step) -> torch.Tensor:
            assert hang.wait(60)
            return compute(step)

        server.engine.runner.run = run  # type: ignore[method-assign]
        client = threading.Thread(target=ask, args=(server,))
        client.start()
        wait_for(lambda: server.state.service.step_seconds > 0)
        assert status(server.get("/ready")) == status(server.get("/health")) == 200
        monkeypatch.setattr("crelle.server.state.STUCK", 0)
        for page in ("/ready", "/health"):
            answer = server.get(page)
            assert status(answer) == 503
            assert "one step has been running for" in body_of(answer)["error"]["message"]
        assert b"\ncrelle_ready 0" in server.get("/metrics")
        wait_for(lambda: '"engine hangs"' in server.log)
        monkeypatch.undo()
        hang.set()
        client.join(20)
        assert status(server.get("/ready")) == status(server.get("/health")) == 200
        still_serves(server, want)
        assert not server.server.stop.is_set()


@pytest.mark.parametrize("message", [SECRET, LOST], ids=["failed steps", "lost context"])
def test_a_server_whose_engine_stopped_answers_everybody_and_ends(llm: LLM, message: str) -> None:
    """Nobody sends a signal: requests that run, stream and wait get an error, and serving returns the reason."""
    service = AsyncEngine(Engine(llm, pages=600, max_batch=4))
    slow_down(service.engine, 0.01)
    break_down(service.engine, message, requests=12)
    answers: list[bytes] = []
    threads: list[threading.Thread] = []

    def client(server: Server, body: dict[str, Any]) -> None:
        found = Running(server, None, lambda: None)  # type: ignore[arg-type]
        answers.append(found.raw(post("/v1/completions", json.dumps(body).encode())))

    def on_start(server: Server) -> None:
        for i in range(12):
            body = {**GREEDY, "max_tokens": 1500, "ignore_eos": True, "stream": i % 2 == 0}
            threads.append(threading.Thread(target=client, args=(server, body)))
            threads[-1].start()

    reason = asyncio.run(_serve(running(service, Settings(port=0, grace=20), "tiny"), on_start))
    for thread in threads:
        thread.join(20)
    assert reason == service.stop_reason is not None
    assert len(answers) == len(threads)
    for answer in answers:
        assert status(answer) in (200, 500, 503)
        assert b'"error":' in answer
        assert b"secret" not in answer
        assert b"[DONE]" not in answer
        if status(answer) == 200:  # a stream that had begun: it is ended properly
            assert answer.endswith(b"0\r\n\r\n")
    assert not service._thread.is_alive()
