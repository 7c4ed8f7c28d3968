"""What is known about the HTTP request that the current task answers."""

import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Visit:
    """One HTTP request: its number, whose it is, and what the log shall say about it."""

    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(8)}")
    cache_salt: int | None = None  # number of the API key; prefixes of prompts are not shared between them
    facts: dict[str, Any] = field(default_factory=dict)


VISIT: ContextVar[Visit] = ContextVar("visit")
