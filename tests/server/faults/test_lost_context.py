"""A CUDA context that is destroyed while `crelle serve` runs: requests are answered, and the process ends with 1."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_server import nested_model

SCRIPT = Path(__file__).with_name("serve_until_destroyed.py")


def ask(port: int, patience: float = 120) -> tuple[int, Any]:
    body = json.dumps({"prompt": "Hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), patience) as sock:
        sock.sendall(head.encode() + body)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return int(answer.split()[1]), json.loads(answer.split(b"\r\n\r\n", 1)[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_destroyed_context_ends_the_server(device: str) -> None:
    command = [sys.executable, str(SCRIPT), "serve", str(nested_model()), "--port", "0", "--json", "--device", device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            said = ""
            while not said.endswith("}\n"):
                line = server.stdout.readline()
                assert line, server.stderr and server.stderr.read()
                said += line
            facts = json.loads(said)
            assert facts["device"].startswith(device)
            found = re.search(r":(\d+)", facts["address"])
            assert found
            port = int(found[1])
            code, body = ask(port)
            assert (code, body["usage"]["completion_tokens"]) == (200, 20)
            server.send_signal(signal.SIGUSR1)
            code, body = ask(port)
            assert code in (500, 503)
            assert "error" in body
            _, log = server.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            server.kill()
            pytest.fail("it does not end: " + server.communicate()[1])
        finally:
            server.kill()
    assert server.returncode == 1, log[-4000:]
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (died,) = (e for e in events if e["event"] == "engine died")
    assert re.match(r"the CUDA context is lost \((an illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS)", died["reason"])
