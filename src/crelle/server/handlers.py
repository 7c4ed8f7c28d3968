"""The pages of the server, each a few lines; guard.py stands before them."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from crelle.errors import CrelleError
from crelle.server.ask import Ask, not_served
from crelle.server.faults import ApiError, failed, timed_out
from crelle.server.generation import Generation
from crelle.server.logs import describe
from crelle.server.schema import parse
from crelle.server.shapes import PING, sse
from crelle.server.state import State

STATE = web.AppKey("state", State)
PLAYGROUND = Path(__file__).parent / "static" / "playground.html"
_LAST_WORDS = 5.0  # seconds for an error to be written into a stream
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


def add_routes(app: web.Application) -> None:
    app.router.add_get("/", playground)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/status", status)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", openapi)


# What is small --------------------------------------------------------------------------------------------------------


async def playground(request: web.Request) -> web.StreamResponse:
    if not PLAYGROUND.is_file():
        raise ApiError(404, "this installation has no playground page; /openapi.json describes the others")
    html = PLAYGROUND.read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(html), "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
    return web.Response(text=html, content_type="text/html", charset="utf-8", headers=headers)


def _policy(html: str) -> str:
    """Let run exactly the scripts and styles that stand in the page, and let it talk to this server only."""
    allowed = {}
    for tag in ("script", "style"):
        digests = [sha256(block.encode()).digest() for block in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)]
        allowed[tag] = " ".join(f"'sha256-{b64encode(d).decode()}'" for d in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _model(state: State) -> dict[str, Any]:
    facts = state.facts
    found = {"id": facts.name, "object": "model", "created": state.created, "owned_by": "crelle"}
    return {**found, "context": facts.context, "precisions": list(facts.precisions)}


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model(request.app[STATE])]})


async def model(request: web.Request) -> web.Response:
    state, name = request.app[STATE], request.match_info["model"]
    if name != state.facts.name:
        raise not_served(name, state.facts)
    return web.json_response(_model(state))


async def status(request: web.Request) -> web.Response:
    state = request.app[STATE]
    stats = state.engine.stats
    return web.json_response(
        {
            "model": state.facts.name,
            "precisions": list(state.facts.precisions),
            "kv": str(state.engine.kv),
            "pages": stats.pages,
            "pages_used": stats.pages_used,
            "running": stats.running,
            "waiting": stats.waiting,
            "tokens_per_second": round(state.metrics.speed.per_second(stats.tokens_drawn), 2),
        }
    )


async def health(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if state.service.error is not None:
        state.require_ready()
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    request.app[STATE].require_ready()
    return web.json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    text = state.metrics.text(state.engine.stats, state.engine.queue_limit, state.why_not_ready is None)
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(request.app[STATE].document)


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = await read_body(request)
    texts, bos = state.asks.tokenize(body)
    tokenizer = state.llm.tokenizer
    work = partial(tokenizer.encode, texts[0], bos) if "prompt" in body else partial(tokenizer.encode_chat, texts)  # type: ignore[arg-type]
    try:
        ids = await state.off_the_loop(_characters(texts), work)
    except CrelleError as e:
        raise state.refused(e) from None
    return web.json_response({"tokens": ids, "count": len(ids), "context": state.facts.context})


# Text -----------------------------------------------------------------------------------------------------------------


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, request.app[STATE].asks.completion)


async def chat(request: web.Request) -> web.StreamResponse:
    return await _generate(request, request.app[STATE].asks.chat)


async def _generate(request: web.Request, read: Callable[[Any], Ask]) -> web.StreamResponse:
    state = request.app[STATE]
    ask = read(await read_body(request))
    state.require_ready()
    try:
        prompts = await state.off_the_loop(_characters(ask.texts), partial(ask.ids, state.llm.tokenizer))
    except CrelleError as e:
        raise state.refused(e) from None
    with Generation(state, request, ask, prompts) as generation:
        return await (_stream if ask.stream else _whole)(generation)


async def _whole(g: Generation) -> web.StreamResponse:
    limit = g.state.settings.timeout
    try:
        async with asyncio.timeout(limit):
            while not g.finished:
                await g.take()
    except TimeoutError:
        g.state.metrics.timeouts += 1
        raise timed_out(limit, g.tokens) from None
    return web.json_response(g.answer.whole(g.outputs, g.state.cut))


async def _stream(g: Generation) -> web.StreamResponse:
    """Send events as they come. Headers go with the first of them, so that an early fault still has its status."""
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    limit, writing, fault = g.state.settings.timeout, False, None
    try:
        async with asyncio.timeout(limit):
            while not g.finished:
                items = await g.take()
                data = b"".join(g.answer.chunk(index, event, g.state.cut) for index, event in items)
                writing = True
                if not response.prepared:
                    await response.prepare(g.request)
                    data = g.answer.opening() + data
                if data or not items:
                    await response.write(data or PING)
                writing = False
            await response.write(g.answer.closing(g.outputs))
    except TimeoutError:
        g.state.metrics.timeouts += 1
        fault = timed_out(limit, g.tokens)
    except ApiError as e:
        fault = e
    except ConnectionError:
        raise
    except Exception as e:
        g.visit.facts["fault"] = describe(e)
        fault = failed(g.visit.id)
    if fault is None:
        await response.write_eof()
        return response
    if not response.prepared:
        raise fault
    g.visit.facts |= {"code": fault.code, "failed_status": fault.status}
    if writing and g.request.transport is not None:  # the reader takes nothing, not even the reason
        g.request.transport.abort()
    else:
        async with asyncio.timeout(_LAST_WORDS):
            await response.write(sse(fault.body))
            await response.write_eof()
    return response


async def read_body(request: web.Request) -> Any:
    """Return the JSON of a request's body, which must be small, in time, and what it says it is."""
    settings = request.app[STATE].settings
    if request.content_type != "application/json":
        raise ApiError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body without Content-Encoding", code="unsupported_media_type", close=True)
    too_large = ApiError(413, f"the body is larger than {settings.max_body} bytes", code="body_too_large", close=True)
    if (request.content_length or 0) > settings.max_body:
        raise too_large
    try:
        async with asyncio.timeout(settings.body_timeout):
            body = await request.read()
    except TimeoutError:
        why = f"the body did not arrive within {settings.body_timeout:g} s"
        raise ApiError(408, why, code="body_timeout", close=True) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise ApiError(400, "the body's transfer encoding is broken", code="invalid_body", close=True) from None
    return parse(body)


def _characters(texts: Any) -> int:
    """Count what is to be tokenized."""
    return sum(len(t if isinstance(t, str) else t["content"]) for t in texts if isinstance(t, str | dict))
