"""One JSON object a line. No prompt, no answer, no key is ever in it, unless prompts were asked for."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from crelle.server.schema.strict_json import dumps_log

LOGGER = logging.getLogger("crelle.server")


class JsonLines(logging.Formatter):
    """Formats a record as JSON. Of exceptions it tells class and message, never the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "event": _short(record.getMessage())}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = describe(record.exc_info[1])
        return dumps_log(line)


def describe(error: BaseException) -> str:
    """Name an exception on one line, and what it was raised from: a coroutine turns StopIteration into RuntimeError."""
    said = f"{type(error).__name__}: {_short(str(error))}"
    return said if error.__cause__ is None else f"{said} (from {describe(error.__cause__)})"


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    LOGGER.log(level, event, extra={"fields": {k: v for k, v in fields.items() if v is not None}})


def set_up(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send the server's logs, and those of aiohttp and asyncio, to a stream (default: standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    for logger, least in ((LOGGER, level), (logging.getLogger("aiohttp"), logging.ERROR), (_asyncio(), logging.ERROR)):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def _asyncio() -> logging.Logger:
    return logging.getLogger("asyncio")


def _short(text: str) -> str:
    first = text.split("\n", 1)[0]
    return first if len(first) <= 300 else first[:300] + "…"
