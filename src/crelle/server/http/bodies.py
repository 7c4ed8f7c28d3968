"""The bodies of requests: which are read at all, how many large ones at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http import HttpProcessingError

from crelle.server.errors import ApiError
from crelle.server.settings import Settings

LARGE = 32 << 10  # bytes from which a body is parsed, checked and tokenized beside the loop
_AT_ONCE = 16  # large bodies that are in memory; more wait unread


class Bodies:
    """Reads bodies for one server."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._room = settings, asyncio.Semaphore(_AT_ONCE)

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read a body, which must be small, in time, and what it says it is. It is in memory while the block runs."""
        self._check(request)
        if request.content_length is not None and request.content_length <= LARGE:
            yield await self._bytes(request)
            return
        await self._enter()
        try:
            yield await self._bytes(request)
        finally:
            self._room.release()

    def _check(self, request: web.Request) -> None:
        if request.content_type != "application/json":
            raise ApiError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "send the body without Content-Encoding", code="unsupported_media_type", close=True)
        if (request.content_length or 0) > self._settings.max_body:
            raise self._too_large()

    async def _enter(self) -> None:
        limit = self._settings.body_timeout
        try:
            async with asyncio.timeout(limit):
                await self._room.acquire()
        except TimeoutError:
            why = f"the server is already reading {_AT_ONCE} bodies of more than {LARGE} bytes, and none "
            f"finished in {limit:g} s"
            raise ApiError(429, why, code="too_many_bodies", headers={"Retry-After": "5"}, close=True) from None

    async def _bytes(self, request: web.Request) -> bytes:
        """Read to the end. aiohttp's own request.read() would keep the body as long as the request is answered."""
        limit, most = self._settings.body_timeout, self._settings.max_body
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(limit):
                while part := await request.content.readany():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise self._too_large()
                return b"".join(parts)
        except TimeoutError:
            why = f"the body did not arrive within {limit:g} s"
            raise ApiError(408, why, code="body_timeout", close=True) from None
        except (web.RequestPayloadError, HttpProcessingError):
            raise ApiError(400, "the body's transfer encoding is broken", code="invalid_body", close=True) from None

    def _too_large(self) -> ApiError:
        why = f"the body is larger than {self._settings.max_body} bytes"
        return ApiError(413, why, code="body_too_large", close=True)
