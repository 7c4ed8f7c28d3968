"""Answers as JSON."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from crelle.server.strict_json import encode


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with a value; bytes are JSON already."""
    body = value if isinstance(value, bytes) else encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")
