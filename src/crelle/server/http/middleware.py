"""Middleware of every request: authorization and error responses. Nothing above it ever sees an exception."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter

from aiohttp import web

from crelle.server.errors import PASSED_ON, ApiError, failed
from crelle.server.handlers import STATE
from crelle.server.http.hosts import check_host, check_origin, listed
from crelle.server.http.reply import reply
from crelle.server.http.request_context import REQUEST_CONTEXT, RequestContext
from crelle.server.logs import describe, log
from crelle.server.state import State

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN = {"/", "/health", "/ready", "/openapi.json"}  # without an API key
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type",
    "Access-Control-Max-Age": "600",
}
_LEFT = 499  # the client did not wait for its answer
_QUIET = {"/health", "/ready", "/metrics", "/v1/status"}  # asked every few seconds: logged only where they fail


@web.middleware
async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request through to its handler, and always give an answer in OpenAI's shape."""
    state, begun, status = request.app[STATE], perf_counter(), _LEFT
    context = RequestContext()
    REQUEST_CONTEXT.set(context)
    try:
        response = await _answer(state, request, context, handler)
        status = response.status
        return response
    finally:  # also where the client has left and this task is cancelled
        state.metrics.disconnects += status == _LEFT
        state.metrics.answered(_label(request), context.log_fields.get("failed_status", status))
        if status != 200 or request.path not in _QUIET:
            _log(request, context, status, perf_counter() - begun)


async def _answer(state: State, request: web.Request, context: RequestContext, handler: Handler) -> web.StreamResponse:
    try:
        check_host(state.settings, request)
        origin = check_origin(state.settings, request)
        if origin and request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204, headers=_preflight(state, request, origin))
        context.cache_salt = _check_key(state, request)
        response = await handler(request)
    except ApiError as e:
        response = _error(context, e)
    except web.HTTPException as e:  # aiohttp's own: no such page, another method
        response = _error(context, _translated(request, e))
    except ConnectionError:
        raise asyncio.CancelledError from None
    except PASSED_ON:
        raise
    except BaseException as e:  # also what is none of Python's own, such as a panic in a tokenizer's Rust
        context.log_fields["fault"] = describe(e)
        response = _error(context, failed(context.id))
    return response


async def dress(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every answer, streams too."""
    response.headers.update(
        {"X-Request-Id": REQUEST_CONTEXT.get().id, "X-Content-Type-Options": "nosniff", "Server": "crelle"}
    )
    settings = request.app[STATE].settings
    if settings.origins:
        response.headers["Vary"] = "Origin"
    origin = request.headers.get("Origin")
    if origin and listed(settings, origin):
        response.headers["Access-Control-Allow-Origin"] = origin


def _preflight(state: State, request: web.Request, origin: str) -> dict[str, str]:
    """Answer a browser that asks whether a page may call; one of the public web only if it is listed by name."""
    private = request.headers.get("Access-Control-Request-Private-Network") == "true"
    if private and origin in state.settings.origins:
        return {**_PREFLIGHT, "Access-Control-Allow-Private-Network": "true"}
    return _PREFLIGHT


def _check_key(state: State, request: web.Request) -> int | None:
    """Return the number of the key that was sent, where keys are asked for."""
    if not state.settings.keys or request.path in _OPEN:
        return None
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    number = state.settings.keys.find(key.strip()) if scheme.lower() == "bearer" else None
    if number is None:
        why = "send a valid API key: Authorization: Bearer KEY"
        raise ApiError(401, why, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}, close=True)
    return number


def _translated(request: web.Request, e: web.HTTPException) -> ApiError:
    if e.status == 404:
        return ApiError(404, "unknown path; /openapi.json lists the available paths", code="not_found")
    if isinstance(e, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(e.allowed_methods))
        why = f"{request.method} is not allowed for this path; use {allowed}"
        return ApiError(405, why, code="method_not_allowed", headers={"Allow": allowed})
    return ApiError(e.status, e.reason, code=None)


def _error(context: RequestContext, e: ApiError) -> web.Response:
    context.log_fields |= {"code": e.code, "param": e.param}
    response = reply(e.body, status=e.status, headers=e.headers)
    if e.close:
        response.force_close()
    return response


def _label(request: web.Request) -> str:
    """Return the path as it was declared: what clients make up must not become labels without end."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _log(request: web.Request, context: RequestContext, status: int, seconds: float) -> None:
    level = logging.ERROR if status >= 500 or "fault" in context.log_fields else logging.INFO
    path = request.path if len(request.path) <= 100 else request.path[:100] + "…"
    said = {"id": context.id, "client": request.remote, "method": request.method[:20], "path": path}
    log("request", level, **said, status=status, seconds=round(seconds, 4), **context.log_fields)
