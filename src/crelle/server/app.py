"""The server as an aiohttp application, its start and its end.

async with running(service, settings) as server:        # accepts requests
    await something
                                                        # takes no more, finishes or ends what runs, is gone
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from crelle.engine.async_engine import AsyncEngine
from crelle.errors import CapacityError
from crelle.server.event_queue import EventBridge
from crelle.server.handlers import STATE, add_routes
from crelle.server.http.middleware import dress, middleware
from crelle.server.logs import LOGGER, describe, log
from crelle.server.settings import Settings
from crelle.server.state import State

_IDLE = 75.0  # seconds after which a connection without a request is closed
_HEADERS, _HEADER_SIZE = 128, 8190  # of a request, and bytes of each
_LINGER = 3.0  # seconds in which what a refused client still sends is thrown away
_QUEUE = 1024  # connections that the system holds until they are accepted
_LAST = 5.0  # seconds for answers that were ended early to be written


@dataclass(slots=True)
class Server:
    """A server that runs."""

    state: State
    address: str  # http://host:port
    runner: web.AppRunner
    stop: asyncio.Event  # set: it should end, since a signal came or the engine has stopped
    hurry: asyncio.Event  # set: no grace any more


def make_app(state: State) -> web.Application:
    app = web.Application(middlewares=[middleware], client_max_size=state.settings.max_body)
    app[STATE] = state
    app.on_response_prepare.append(dress)
    add_routes(app)
    return app


@asynccontextmanager
async def running(
    service: AsyncEngine, settings: Settings, name: str | None = None, sock: socket.socket | None = None
) -> AsyncIterator[Server]:
    """Listen while the block runs; then shut down within the grace that the settings give. Ends the service too."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_unexpected)
    state = State(service, settings, name)
    state.warm_up()
    state.bridge = EventBridge(loop)
    runner = web.AppRunner(
        make_app(state),
        handler_cancellation=True,  # a client that disconnects ends its sequences
        access_log=None,
        logger=LOGGER,
        auto_decompress=False,  # a small body must not become a large one
        max_headers=_HEADERS,
        max_field_size=_HEADER_SIZE,
        max_line_size=_HEADER_SIZE,
        keepalive_timeout=_IDLE,
        lingering_time=_LINGER,
        shutdown_timeout=_LAST,
    )
    await runner.setup()
    stop = asyncio.Event()
    watching = asyncio.create_task(_watch(state, stop))
    try:
        sock = sock or reserve(settings)
        await web.SockSite(runner, sock, backlog=_QUEUE).start()
        server = Server(state, address(sock), runner, stop, asyncio.Event())
        log("ready", address=server.address, model=state.info.name, keys=len(settings.keys.digests))
        try:
            yield server
        finally:
            await _finish(server)
    finally:
        watching.cancel()
        await runner.cleanup()
        await asyncio.to_thread(service.close, finish=False)
        state.close()
        log("stopped")


async def _finish(server: Server) -> None:
    """Accept no more; wait for what runs, for a while; then end it and let what it has be sent."""
    state = server.state
    state.closing = True
    for site in list(server.runner.sites):
        await site.stop()
    log("stopping", requests=len(state.generations), grace=state.settings.grace)
    await _until_idle(state, state.settings.grace, server.hurry)
    if state.generations:
        log("cutting", logging.WARNING, requests=len(state.generations))
        state.cut = "shutdown"
        for generation in list(state.generations):
            generation.cancel()
        await _until_idle(state, _LAST)


async def _until_idle(state: State, seconds: float, hurry: asyncio.Event | None = None) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while state.generations and loop.time() < end and not (hurry and hurry.is_set()):
        await asyncio.sleep(0.02)


async def _watch(state: State, stop: asyncio.Event) -> None:
    """Count once a second, for rates. If the engine has died, log it, and a second later ask for the server's end.

    Until then /ready and /health report why, and whoever asks gets 503 instead of a refused connection.
    """
    hung = False
    while state.service.error is None:
        state.metrics.sample(state.engine.stats)
        if not hung and (why := state.why_unhealthy) and state.service.error is None:
            log("engine hangs", logging.CRITICAL, reason=why)
        hung = state.why_unhealthy is not None
        await asyncio.sleep(1)
    why, fault = state.service.stop_reason, describe(state.service.error)
    log("engine died", logging.CRITICAL, reason=why, fault=fault)
    await asyncio.sleep(1)
    stop.set()


def reserve(settings: Settings) -> socket.socket:
    """Take the port, or say why that cannot be done. It does not accept connections yet."""
    where = f"{settings.host} port {settings.port}"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, there = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(there)
        except OSError:
            sock.close()
            raise
    except OSError as e:
        remedy = "; choose another --port, or 0 for a free one" if "in use" in str(e) else ""
        raise CapacityError(f"cannot listen on {where}: {e.strerror or e}{remedy}") from e
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _unexpected(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the loop's own errors, such as too many open files, in one line."""
    error = context.get("exception")
    log("loop", logging.ERROR, said=context.get("message"), fault=describe(error) if error else None)
