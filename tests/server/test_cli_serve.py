"""crelle serve as a process: its banner, its sentences, SIGTERM under load."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tiny_model
from in_process import run
from tiny_server import nested_llm, nested_model, serving

from crelle import LLM, Sampling


@contextmanager
def process(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Run `crelle serve` on a free port until the block is left; yields it, its port and what it said."""
    command = [sys.executable, "-m", "crelle.cli.main", "serve", str(nested_model()), "--port", "0", *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as found:
        assert found.stdout
        said = ""
        while not said.endswith(("}\n", "to stop.\n")):  # one JSON object, or the banner
            line = found.stdout.readline()
            assert line, found.stderr and found.stderr.read()
            said += line
        port = re.search(r"http://[\d.]+:(\d+)", said)
        assert port
        try:
            yield found, int(port[1]), said
        finally:
            found.kill()


def ask(port: int, timeout: float = 60, **body: Any) -> tuple[int, Any]:
    given = json.dumps({"temperature": 0, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(given)}"
    with socket.create_connection(("127.0.0.1", port), timeout) as sock:
        sock.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + given)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return int(answer.split()[1]), json.loads(answer.split(b"\r\n\r\n", 1)[1])


def test_sigterm_under_load_answers_everybody_and_ends_with_code_0() -> None:
    answers: list[tuple[int, Any]] = []
    with process("--grace", "0.5", "--max-batch", "4", "--json") as (server, port, said):
        facts = json.loads(said)
        assert ask(port, prompt="Hello", max_tokens=5)[0] == 200

        def client() -> None:
            answers.append(ask(port, prompt="Hello", max_tokens=1900))

        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        for thread in clients:
            thread.join(30)
        out, log = server.communicate(timeout=30)
        assert server.returncode == 0
    assert out == "", "one JSON object and nothing else"
    assert (facts["model"], facts["precisions"], facts["max_batch"]) == ("tiny", [2, 3, 4], 4)
    assert facts["scheme"].startswith("bcq-nested")
    assert facts["exact"] is True  # the default on a CPU
    assert len(answers) == 8
    assert 200 in {code for code, _ in answers}
    longest = max(body["usage"]["completion_tokens"] for code, body in answers if code == 200)
    whole = nested_llm("alone").generate("Hello", Sampling(max_tokens=longest)).text
    assert sum(b["usage"]["completion_tokens"] for c, b in answers if c == 200) < 8 * 1900, "ended, not finished"
    for code, body in answers:
        assert code in (200, 503)
        if code == 200:
            assert whole.startswith(body["choices"][0]["text"])
            assert body["choices"][0]["text"]
        else:
            assert body["error"]["code"] == "unavailable"
    assert "Traceback" not in log + out
    events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    assert events[-1] == "stopped"
    assert {"ready", "signal", "stopping"} <= set(events)


def test_what_was_chosen_for_the_machine_is_said() -> None:
    with process("--json") as (_, port, said):
        facts = json.loads(said)
        assert facts["bytes"]["total"] == sum(facts["bytes"][part] for part in ("weights", "working", "cache"))
        assert "whole contexts (--memory to change)" in facts["memory"], "a tiny model needs no quarter of a machine"
        assert (facts["max_batch"], facts["budget"], facts["longest"]) == (32, 512, facts["context"])
    small = ("--max-batch", "2", "--budget", "16")
    # weights differ by instruction set
    with process("--memory", "40MB", *small, "--no-exact", "--json") as (_, port, said):
        facts = json.loads(said)
        assert facts["exact"] is False, "it can be given up"
        assert ask(port, prompt="Hello", max_tokens=5)[0] == 200
    held = facts["bytes"]["weights"] + facts["bytes"]["working"] + 20 * facts["bytes"]["cache"] // facts["pages"]
    with process("--memory", f"{held / 1000:.0f}kB", *small) as (_, port, said):
        assert "2 concurrent sequences (--max-batch), 16 tokens per step (--budget)" in said
        holds = re.search(r"The KV cache limits sequences to (\d+) tokens; the model's context is 2048", said)
        assert holds
        code, answer = ask(port, prompt="a" * int(holds[1]), max_tokens=5)
        assert (code, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "give the cache more memory" in answer["error"]["message"]
        assert ask(port, prompt="Hello", max_tokens=5)[0] == 200


def test_more_memory_than_the_machine_has_is_a_sentence() -> None:
    done = run("serve", nested_model(), "--port", "0", "--memory", "900TB")
    assert done.code == 2
    assert "a memory limit of 900,000 GB is more than the" in done.err


def test_banner_says_what_is_served_and_where() -> None:
    with process("--kv", "4", "--memory", "40MB", "--name", "small", CRELLE_API_KEYS="sesame") as (server, port, said):
        assert ask(port, prompt="Hello")[0] == 401
        server.send_signal(signal.SIGINT)
        out, log = server.communicate(timeout=30)
    assert server.returncode == 0
    for line in (
        "model    small",
        "bcq-nested:bits=4,group=24",
        "2, 3, 4 bits, chosen per request",
        "memory   40 MB: set by --memory\n           weights ",
        "32 concurrent sequences (--max-batch), 512 tokens per step (--budget), 256 waiting requests",
    ):
        assert line in said
    assert "kv4" in said
    assert "API key  required (1 key)\n" in said
    assert "sesame" not in said + out + log


def test_mistakes_are_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            ("--port", port): "in use; choose another --port",
            ("--host", "no-such-host.invalid"): "cannot listen on no-such-host.invalid",
        }
        for options, says in cases.items():
            done = run("serve", nested_model(), *options)
            assert (done.code, done.out) == (2, "")
            assert re.search(says, done.err), done.err
            assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--timeout", "0"], "timeout must be above 0"),
        (["--api-key-file", "/no/such/file"], "cannot read API keys"),
        (["--allow-origin", "example.org"], "an origin must look like"),
        (["--max-body", "lots"], "a memory size must look like"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], says: str) -> None:
    result = run("serve", nested_model(), *options)
    assert result.code == 2
    assert says in result.err


def test_bench_of_a_model_without_a_chat_template_asks_for_completions(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "base", max_position_embeddings=512)
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with serving(LLM.load(model, device="cpu")) as server:
        load = ("--clients", "2", "--seconds", "0.5", "--prompt", "4", "--tokens", "3", "--ignore-eos")
        done = run("bench", "serve", "--url", server.url, *load, "--json")
        assert done.code == 0, done.err
        assert (done.json["chat"], done.json["failures"]) == (False, 0)
        assert done.json["tokens"] > 0
        assert server.state.metrics.requests["/v1/chat/completions", 400] == 1, "one to find out"


def test_without_its_libraries_the_remedy_is_named() -> None:
    libraries = ["aiohttp", "msgspec", "prometheus_client"]
    code = (
        "import os, sys; import torch; from crelle.cli.main import main\n"
        f"for missing in {libraries}:\n"
        "    if os.fork() == 0:\n"
        "        sys.modules[missing] = None; sys.argv = ['crelle', 'serve', 'x']\n"
        "        main()\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["2"] * 3, done.stderr
    for missing in libraries:
        assert f"crelle serve needs {missing}: pip install 'crelle[server]'" in done.stderr


def test_all_else_works_without_the_servers_libraries() -> None:
    """As on a machine that only measures: every module of crelle but the server's can be imported."""
    code = (
        "import pkgutil, sys, importlib\n"
        "for name in ('aiohttp', 'msgspec', 'prometheus_client'): sys.modules[name] = None\n"
        "import crelle.bench, crelle.cli, crelle.engine, crelle.eval\n"
        "for package in (crelle.bench, crelle.cli, crelle.engine, crelle.eval):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
