"""The HTTP handlers; every request passes middleware.py first."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import CrelleError
from crelle.server.errors import PASSED_ON, ApiError, failed, timed_out
from crelle.server.generation import Generation
from crelle.server.http.bodies import LARGE
from crelle.server.http.reply import reply
from crelle.server.logs import describe
from crelle.server.requests import Detokenized, Embed, GenerationRequest, Tokenize, not_served
from crelle.server.responses import PING, sse
from crelle.server.schema.response_schemas import (
    Alive,
    Embeddings,
    EmbeddingUsage,
    EmbeddingVector,
    Model,
    Models,
    Status,
    Text,
    TokenIds,
)
from crelle.server.schema.strict_json import encode_large, parse
from crelle.server.state import State

A = TypeVar("A", GenerationRequest, Tokenize, Detokenized, Embed)
T = TypeVar("T")

STATE = web.AppKey("state", State)
PLAYGROUND = Path(__file__).parent / "static" / "playground.html"
_SMALL = 1000  # tokens, or logprobs of tokens, of an answer that is built in the loop
_EVENTS = 32  # of a stream, that are written before the loop runs others
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
    app.router.add_post("/v1/responses", respond)
    app.router.add_get("/v1/status", status)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", openapi)


# What is small --------------------------------------------------------------------------------------------------------


async def playground(request: web.Request) -> web.StreamResponse:
    if not PLAYGROUND.is_file():
        raise ApiError(404, "this installation has no playground page; /openapi.json lists the available paths")
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


def _model(state: State) -> Model:
    info = state.info
    bits = list(info.precisions)
    return Model(id=info.name, created=state.created, owned_by="crelle", context=info.context, precisions=bits)


async def models(request: web.Request) -> web.Response:
    return reply(Models([_model(request.app[STATE])]))


async def model(request: web.Request) -> web.Response:
    state, name = request.app[STATE], request.match_info["model"]
    if name != state.info.name:
        raise not_served(name, state.info)
    return reply(_model(state))


async def status(request: web.Request) -> web.Response:
    state = request.app[STATE]
    stats = state.engine.stats
    return reply(
        Status(
            model=state.info.name,
            precisions=list(state.info.precisions),
            kv=str(state.engine.kv),
            pages=stats.pages,
            pages_used=stats.pages_used,
            page_tokens=state.engine.kv.page,
            chat=state.llm.tokenizer.chats,
            running=stats.running,
            waiting=stats.waiting,
            tokens_per_second=round(state.metrics.speed.per_second(stats.tokens_sampled), 2),
        )
    )


async def health(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if state.why_unhealthy:
        state.require_ready()
    return reply(Alive("ok"))


async def ready(request: web.Request) -> web.Response:
    request.app[STATE].require_ready()
    return reply(Alive("ready"))


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    page = state.metrics.page(state.engine.stats, state.engine.queue_limit, state.why_not_ready is None)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def openapi(request: web.Request) -> web.Response:
    return reply(request.app[STATE].document)


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    _, ids = await _prepared(request, state.parser.tokenize, Tokenize.ids)
    answer = TokenIds(ids, len(ids), state.info.context)
    return reply(await state.writing(partial(encode_large, answer)) if len(ids) > _SMALL else answer)


async def detokenize(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    _, text = await _prepared(request, state.parser.detokenize, Detokenized.text)
    return reply(Text(text))


async def embeddings(request: web.Request) -> web.StreamResponse:
    state, vectors = request.app[STATE], list[EmbeddingVector]()
    asked, prompts = await _prepared(request, state.parser.embedding, Embed.ids)
    limit = state.settings.timeout
    try:
        async with asyncio.timeout(limit):
            for i, ids in enumerate(prompts):
                found = await state.embedding(ids, asked.pooling, asked.normalize)
                data = b64encode(found.numpy().astype("<f4").tobytes()).decode() if asked.base64 else found.tolist()
                vectors.append(EmbeddingVector(index=i, embedding=data))
    except TimeoutError:
        state.metrics.timeouts += 1
        raise timed_out(limit, 0) from None
    tokens = sum(map(len, prompts))
    state.metrics.prompt_tokens += tokens
    answer = Embeddings(data=vectors, model=state.info.name, usage=EmbeddingUsage(tokens, tokens))
    return reply(await state.writing(partial(encode_large, answer)))


# Completions ----------------------------------------------------------------------------------------------------------


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, request.app[STATE].parser.completion)


async def chat(request: web.Request) -> web.StreamResponse:
    return await _generate(request, request.app[STATE].parser.chat)


async def respond(request: web.Request) -> web.StreamResponse:
    return await _generate(request, request.app[STATE].parser.respond)


async def _generate(request: web.Request, read: Callable[[Any], GenerationRequest]) -> web.StreamResponse:
    state = request.app[STATE]
    params, prompts = await _prepared(request, read, GenerationRequest.ids)
    async with Generation(state, request, params, prompts) as generation:
        return await (_stream if params.stream else _whole)(generation)


async def _prepared(request: web.Request, read: Callable[[Any], A], ids: Callable[[A, Tokenizer], T]) -> tuple[A, T]:
    """Return what a body asks for, and its token ids. A large body is parsed, checked and tokenized beside the loop."""
    state = request.app[STATE]
    tokenizer = state.llm.tokenizer

    def work(body: bytes) -> tuple[A, T]:
        asked = read(parse(body))
        state.require_ready()
        return asked, ids(asked, tokenizer)

    try:
        async with state.bodies.read(request) as body:
            if len(body) > LARGE:
                return await state.reading(len(body), partial(work, body))
            asked = read(parse(body))
            state.require_ready()
            # a chat template is the checkpoint's program: it may take as long as its limits let it
            size = LARGE if asked.chat else asked.characters
            return asked, await state.reading(size, partial(ids, asked, tokenizer))
    except CrelleError as e:
        raise state.refused(e) from None


async def _whole(g: Generation) -> web.StreamResponse:
    limit = g.state.settings.timeout
    try:
        async with asyncio.timeout(limit):
            while not g.finished:
                items = await g.take()
                for index, event in items if g.params.chat else ():
                    g.response.note(index, event)
    except TimeoutError:
        g.state.metrics.timeouts += 1
        raise timed_out(limit, g.tokens) from None
    if g.values <= _SMALL or g.params.responds is not None:
        return reply(g.response.whole(g.outputs, g.state.cut))
    return reply(await g.state.writing(lambda: encode_large(g.response.whole(g.outputs, g.state.cut))))


async def _stream(g: Generation) -> web.StreamResponse:
    """Send events as they come. Headers go with the first of them, so that an early fault still has its status."""
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    limit, writing = g.state.settings.timeout, False
    try:
        async with asyncio.timeout(limit):
            while not g.finished:
                items = await g.take()
                for some in batched(items, _EVENTS):
                    data = b"".join(g.response.chunk(index, event, g.state.cut) for index, event in some)
                    if not response.prepared:
                        data = g.response.opening() + data
                    writing = True
                    if not response.prepared:
                        await response.prepare(g.request)
                    if data or not items:
                        await response.write(data or PING)
                    writing = False
                    if len(items) > _EVENTS:
                        await asyncio.sleep(0)  # let other tasks run
            closing = g.response.closing(g.outputs)
            writing = True
            await response.write(closing)
            await response.write_eof()
            return response
    except TimeoutError:
        g.state.metrics.timeouts += 1
        fault = timed_out(limit, g.tokens)
    except ApiError as e:
        fault = e
    except PASSED_ON:
        raise
    except BaseException as e:
        g.context.log_fields["fault"] = describe(e)
        fault, writing = failed(g.context.id), False
    if not response.prepared:
        raise fault
    g.context.log_fields |= {"code": fault.code, "failed_status": fault.status}
    try:
        if writing:
            raise TimeoutError("the client does not read the response")
        async with asyncio.timeout(_LAST_WORDS):
            await response.write(sse(fault.body))
            await response.write_eof()
    except PASSED_ON:
        raise
    except BaseException as e:  # the answer has begun: no other one can be given any more
        g.context.log_fields.setdefault("fault", describe(e))
        if g.request.transport is not None:
            g.request.transport.abort()
    return response


def batched(items: list[T], size: int) -> list[list[T]]:
    """Split a list into batches; an empty one is one batch."""
    return [items[i : i + size] for i in range(0, max(len(items), 1), size)]
