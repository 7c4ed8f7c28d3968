"""A server with the face of Crelle's and no model behind it: says what a test gives it, remembers what it was asked.

It serves the page under the strictest policy that the page must live with, streams word by word, and fails on request.
"""

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

import crelle

PAGE = Path(crelle.__file__).parent / "server" / "static" / "playground.html"


def content_security_policy(html: str) -> str:
    """Return a policy that lets run exactly the one script and the one style sheet that stand in the page."""
    allowed = {}
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        allowed[tag] = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{allowed['script']}'; style-src 'sha256-{allowed['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@dataclass
class FakeServer:
    """Fields may be changed while it runs."""

    answer: Callable[[dict[str, Any]], str] = lambda body: "An answer of several words."
    pause: float = 0.0  # seconds before each word
    precisions: tuple[int, ...] = ()
    api_key: str | None = None
    failure: tuple[int, dict[str, Any] | str, dict[str, str]] | None = None  # status, body, headers
    chats: bool = True  # false: chats are refused, as where a model has no chat template
    break_after: int | None = None  # words after which the stream ends without [DONE]
    error_after: int | None = None  # words after which an error comes down the stream
    call: tuple[str, str] | None = None  # a function's name and the arguments that it is called with
    dribble: bool = False  # every few bytes on their own, so that events and characters arrive in pieces
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies of generation requests, as they came
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # of every request
    vanished: int = 0  # clients that went away in mid-stream
    running: int = 0
    url: str = ""

    def __enter__(self) -> "FakeServer":
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self, ready: threading.Event) -> None:
        try:
            self._loop.run_until_complete(self._serve(ready))
        finally:
            self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._done = asyncio.Event()
        app = web.Application(middlewares=[self._gate])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/v1/models", self._models),
                web.get("/v1/status", self._status),
                web.post("/v1/chat/completions", self._generate),
                web.post("/v1/completions", self._generate),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._done.wait()
        await runner.cleanup()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.paths.append(request.path)
        wanted = f"Bearer {self.api_key}" if self.api_key and request.path.startswith("/v1") else None
        if wanted not in (None, request.headers.get("Authorization")):
            return web.json_response({"error": {"message": "This server needs an API key."}}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _page(self, request: web.Request) -> web.Response:
        html = PAGE.read_text()
        policy = {"Content-Security-Policy": content_security_policy(html), "Referrer-Policy": "no-referrer"}
        return web.Response(text=html, content_type="text/html", headers=policy)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model": "tiny",
                "precisions": list(self.precisions),
                "kv": "kv4",
                "pages": 512,
                "pages_used": 40 + 30 * self.running,
                "page_tokens": 16,
                "chat": self.chats,
                "running": self.running,
                "waiting": 0,
                "tokens_per_second": 61.25 * self.running,
            }
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.failure:
            status, said, headers = self.failure
            text = said if isinstance(said, str) else json.dumps(said)
            return web.Response(text=text, status=status, headers=headers, content_type="application/json")
        chat = request.path.endswith("chat/completions")
        if chat and not self.chats:
            return web.json_response({"error": {"message": "this model has no chat template"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.running += 1
        try:
            await response.prepare(request)
            await self._stream(response, body, chat)
        except (asyncio.CancelledError, ConnectionError):
            self.vanished += 1
            raise
        finally:
            self.running -= 1
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], chat: bool) -> None:
        async def send(event: dict[str, Any]) -> None:
            data = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
            for piece in (data[i : i + 5] for i in range(0, len(data), 5)) if self.dribble else (data,):
                await response.write(piece)
                await asyncio.sleep(0.002 if self.dribble else 0)

        def choice(text: str, finish: str | None = None) -> dict[str, Any]:
            said = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, **said, "finish_reason": finish}]}

        words = re.findall(r"\S+\s*|\s+", self.answer(body))[: body.get("max_tokens") or None]
        if chat:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i, word in enumerate(words):
            await asyncio.sleep(self.pause)
            if i == self.break_after:
                return
            if i == self.error_after:
                await send({"error": {"message": "The model ran out of pages."}})
                return
            await send(choice(word))
        if self.call is not None:
            name, given = self.call
            parts = [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}]
            parts += [{"function": {"arguments": c}} for c in given]
            for part in parts:
                await send({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **part}]}}]})
        await send(choice("", "length" if len(words) == body.get("max_tokens") else "stop"))
        if body.get("stream_options", {}).get("include_usage"):
            tokens = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
            await send({"choices": [], "usage": tokens})
        await response.write(b"data: [DONE]\n\n")
