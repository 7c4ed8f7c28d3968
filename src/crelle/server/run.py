"""Serve until a signal comes, or until the engine has stopped after a fault."""

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from crelle.engine.async_engine import AsyncEngine
from crelle.server.app import Server, running
from crelle.server.logs import log
from crelle.server.settings import Settings

# Seconds that the loop waits for the interpreter lock while another thread computes, each time that it wakes up or
# has read or written: some five times a request. With Python's own 5 ms that is seen in every answer.
_SWITCH = 0.001
_OPEN_MAX = 10_240


def serve(
    service: AsyncEngine,
    settings: Settings,
    *,
    name: str | None = None,
    sock: socket.socket | None = None,
    on_start: Callable[[Server], None] | None = None,
) -> str | None:
    """Serve until SIGTERM or SIGINT; a second signal ends the grace. Returns why the engine stopped by itself, if so.

    All requests were answered then, and the process should end with a code that is not 0: what starts it again goes by
    that. name, sock: as in `running`.  on_start: called when requests are taken.
    """
    _raise_file_limit()
    gc.collect()
    gc.freeze()  # the model stays: the collector need not look at it again
    gc.set_threshold(10_000, 20, 20)
    sys.setswitchinterval(_SWITCH)
    return asyncio.run(_serve(running(service, settings, name, sock), on_start))


async def _serve(
    server_runs: AbstractAsyncContextManager[Server], on_start: Callable[[Server], None] | None
) -> str | None:
    loop = asyncio.get_running_loop()
    async with server_runs as server:

        def on_signal(number: signal.Signals) -> None:
            if server.stop.is_set():
                server.hurry.set()
            log("signal", name=number.name)
            server.stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        if on_start:
            on_start(server)
        await server.stop.wait()
    return server.state.service.stop_reason


def _raise_file_limit() -> None:
    """Every connection is an open file; take as many as the system gives."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS says "unlimited" and means its OPEN_MAX
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _OPEN_MAX), hard))
