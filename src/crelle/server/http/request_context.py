"""What is known about the HTTP request that the current task answers."""

import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestContext:
    """One HTTP request: its id, whose it is, and fields of its log line."""

    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(8)}")
    cache_salt: int | None = None  # number of the API key; prefixes of prompts are not shared between them
    log_fields: dict[str, Any] = field(default_factory=dict)


REQUEST_CONTEXT: ContextVar[RequestContext] = ContextVar("request_context")
