"""Answers as JSON."""

from collections.abc import Mapping

from aiohttp import web
from msgspec import Raw, Struct

from crelle.server.schema.strict_json import encode


def reply(value: Struct | Raw | bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with a struct; bytes are JSON already."""
    body = bytes(value) if isinstance(value, bytes | Raw) else encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")
