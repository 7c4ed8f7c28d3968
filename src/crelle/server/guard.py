"""What every request passes: who may call, and what becomes of errors. Nothing above it ever sees an exception."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from urllib.parse import urlsplit

from aiohttp import web

from crelle.server.faults import ApiError, failed
from crelle.server.handlers import STATE
from crelle.server.logs import describe, log
from crelle.server.settings import is_loopback
from crelle.server.state import State
from crelle.server.visit import VISIT, Visit

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
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request through to its handler, and always give an answer in OpenAI's shape."""
    state, begun, status = request.app[STATE], perf_counter(), _LEFT
    visit = Visit()
    VISIT.set(visit)
    try:
        response = await _answer(state, request, visit, handler)
        status = response.status
        return response
    finally:  # also where the client has left and this task is cancelled
        state.metrics.disconnects += status == _LEFT
        state.metrics.answered(_label(request), visit.facts.get("failed_status", status))
        if status != 200 or request.path not in _QUIET:
            _log(request, visit, status, perf_counter() - begun)


async def _answer(state: State, request: web.Request, visit: Visit, handler: Handler) -> web.StreamResponse:
    try:
        origin = _check_origin(state, request)
        if origin and request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204, headers=_PREFLIGHT)
        visit.realm = _check_key(state, request)
        response = await handler(request)
    except ApiError as e:
        response = _error(visit, e)
    except web.HTTPException as e:  # aiohttp's own: no such page, another method
        response = _error(visit, _translated(request, e))
    except ConnectionError:
        raise asyncio.CancelledError from None  # nobody is there to be answered
    except Exception as e:
        visit.facts["fault"] = describe(e)
        response = _error(visit, failed(visit.id))
    return response


async def dress(request: web.Request, response: web.StreamResponse) -> None:
    """Add what every answer has in its head, streams too."""
    response.headers.update({"X-Request-Id": VISIT.get().id, "X-Content-Type-Options": "nosniff", "Server": "crelle"})
    origin = request.headers.get("Origin")
    if origin and _listed(request.app[STATE], origin):
        response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})


def _check_origin(state: State, request: web.Request) -> str | None:
    """Refuse web pages of others. Their browsers say where they come from; other programs say nothing.

    On a loopback address a page must come from this machine: otherwise any site that a user visits could have its own
    name point to 127.0.0.1 and call. Elsewhere it must come from the host that it calls.
    """
    origin = request.headers.get("Origin")
    if origin is None or _listed(state, origin):
        return origin
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        host = ""
    own = is_loopback(host) if state.settings.loopback else origin.split("://")[-1] == request.headers.get("Host")
    if not own:
        raise ApiError(403, "web pages of this origin may not call this server", code="origin_not_allowed")
    return None


def _listed(state: State, origin: str) -> bool:
    return origin in state.settings.origins or "*" in state.settings.origins


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
        return ApiError(404, "there is no such page; /openapi.json lists those there are", code="not_found")
    if isinstance(e, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(e.allowed_methods))
        why = f"{request.method} is not for this page; {allowed} is"
        return ApiError(405, why, code="method_not_allowed", headers={"Allow": allowed})
    return ApiError(e.status, e.reason, code=None)


def _error(visit: Visit, e: ApiError) -> web.Response:
    visit.facts |= {"code": e.code, "param": e.param}
    response = web.json_response(e.body, status=e.status, headers=e.headers)
    if e.close:
        response.force_close()
    return response


def _label(request: web.Request) -> str:
    """Return the path as it was declared: what clients make up must not become labels without end."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _log(request: web.Request, visit: Visit, status: int, seconds: float) -> None:
    level = logging.ERROR if status >= 500 or "fault" in visit.facts else logging.INFO
    path = request.path if len(request.path) <= 100 else request.path[:100] + "…"
    said = {"id": visit.id, "client": request.remote, "method": request.method[:20], "path": path}
    log("request", level, **said, status=status, seconds=round(seconds, 4), **visit.facts)
