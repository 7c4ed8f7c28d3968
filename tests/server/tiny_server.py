"""A server on a tiny random model, in a thread of this process, and clients for it."""

import asyncio
import atexit
import json
import random
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import safetensors.torch
from conftest import quantized_copy, write_tiny_model
from torch import Tensor

from crelle import LLM
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.engine import Engine
from crelle.engine.scheduler import Step
from crelle.server import logs
from crelle.server.app import Server, running
from crelle.server.settings import Settings

CONTEXT = 2048
GREEDY = {"prompt": "Hello", "max_tokens": 12, "temperature": 0}
VISIBLE = 94  # the tokens of ! to ~ come first


class Running:
    """A server and what tests want to know about it."""

    def __init__(self, server: Server, log: StringIO, stop: Callable[[], None]) -> None:
        self.server, self.state, self.url, self.stop = server, server.state, server.address, stop
        self.engine, self.llm, self._log = server.state.engine, server.state.llm, log
        self.port = int(self.url.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return self._log.getvalue()

    def connect(self, **options: Any) -> socket.socket:
        sock = socket.socket()
        for name, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.settimeout(240)
        try:
            sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        return sock

    def get(self, path: str, *headers: str) -> bytes:
        """Return the answer to a GET, head and body."""
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
        return self.raw(("\r\n".join(lines) + "\r\n\r\n").encode())

    def raw(self, data: bytes) -> bytes:
        """Send bytes as they are, return all that comes back until the server closes."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)

    def assert_empty(self, seconds: float = 240) -> None:
        """Wait until nothing runs; then every page is free, or kept only for others with the same prefix."""
        end = time.monotonic() + seconds
        while (self.engine._active or self.state.generations) and time.monotonic() < end:
            time.sleep(0.01)  # a client has its last event before the engine forgets the sequence
        assert not self.state.generations
        assert not self.engine.scheduler.unfinished
        assert not self.engine._active
        assert self.engine.stats.pages_used == 0
        self.engine.blocks.assert_consistent([])
        assert (self.state.metrics.running, self.state.metrics.waiting) == (0, 0)
        assert "Traceback" not in self.log


def read_all(sock: socket.socket) -> bytes:
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


def post(path: str, body: bytes, *headers: str, close: bool = True) -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *headers, *(["Connection: close"] if close else [])]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def body_of(answer: bytes) -> Any:
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@contextmanager
def serving(
    llm: LLM, *, engine: dict[str, Any] | None = None, sock: socket.socket | None = None, **settings: Any
) -> Iterator[Running]:
    """Serve in a thread; leaving the block shuts the server down."""
    log, started = StringIO(), threading.Event()
    box: dict[str, Any] = {}
    logs.set_up(log)
    service = AsyncEngine(Engine(llm, **{"pages": 600, "max_batch": 16, "queue_limit": 64, **(engine or {})}))

    async def main() -> None:
        stop = asyncio.Event()
        async with running(service, Settings(**{"port": 0, "grace": 5.0, **settings}), "tiny", sock) as server:
            box.update(server=server, stop=stop, loop=asyncio.get_running_loop())
            started.set()
            await stop.wait()

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as e:
            box["error"] = e
        started.set()

    def stop() -> None:
        if thread.is_alive():
            box["loop"].call_soon_threadsafe(box["stop"].set)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    started.wait(60)
    if "error" in box:
        raise box["error"]
    found = Running(box["server"], log, stop)
    try:
        yield found
    finally:
        stop()
        thread.join(60)
    assert not thread.is_alive()
    assert "error" not in box
    assert "Traceback" not in found.log


@cache
def nested_model() -> Path:
    """A nested checkpoint of 2 to 4 bits with a tokenizer of bytes; made once."""
    at = Path(tempfile.mkdtemp(prefix="crelle-tests-"))
    atexit.register(shutil.rmtree, at, ignore_errors=True)
    file = write_tiny_model(at / "plain", max_position_embeddings=CONTEXT) / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["lm_head.weight"][VISIBLE:] = 0  # so that greedy text is ASCII: half characters would be held back
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    quantized_copy(at / "plain", at / "tiny", "bcq-nested:bits=4,group=24,data=false")
    return at / "tiny"


@cache
def nested_llm(copy: str = "") -> LLM:
    """The model to serve; another copy is for comparing with, since the first belongs to the engine that runs it."""
    return LLM.load(nested_model(), device="cpu")


def slow_down(engine: Engine, seconds: float) -> None:
    """Make every step take at least so long, so that something can happen meanwhile."""
    compute = engine.runner.run

    def run(step: Step) -> Tensor:
        time.sleep(seconds)
        return compute(step)

    engine.runner.run = run  # type: ignore[method-assign]


def ask(server: Running, **more: Any) -> tuple[int, dict[str, Any]]:
    """Complete a prompt over a fresh connection."""
    answer = server.raw(post("/v1/completions", json.dumps({**GREEDY, **more}).encode()))
    return status(answer), json.loads(answer.split(b"\r\n\r\n", 1)[1])


def still_serves(server: Running, want: str) -> None:
    code, body = ask(server)
    assert (code, body["choices"][0]["text"]) == (200, want)
    server.assert_empty()


def reset(sock: socket.socket) -> None:
    """Hang up without a goodbye."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


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
