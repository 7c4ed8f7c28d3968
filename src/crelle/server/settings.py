"""The settings of the server."""

import hashlib
import hmac
import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from crelle.errors import FormatError, SchemeError

KEYS_VARIABLE = "CRELLE_API_KEYS"
_LONGEST_KEY = 512
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\]")  # a name, or an address


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys that open the server; none: any client may call. Only digests are kept."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, *keys: str) -> "Keys":
        for key in keys:
            if not key or len(key) > _LONGEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise SchemeError(f"an API key must have 1 to {_LONGEST_KEY} visible ASCII characters without spaces")
        return cls(tuple(dict.fromkeys(map(_digest, keys))))

    @classmethod
    def read(cls, file: Path | None = None, *more: str) -> "Keys":
        """Take the keys of a file (one a line, # begins a comment), of $CRELLE_API_KEYS (commas between) and `more`."""
        found = list(more)
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as e:
                raise FormatError(f"cannot read API keys from {file}: {getattr(e, 'strerror', None) or e}") from e
            of_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not of_file:
                raise FormatError(f"{file} contains no API key; add one, or leave out --api-key-file to allow everyone")
            found += of_file
        found += [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
        return cls.of(*found)

    def __bool__(self) -> bool:
        return bool(self.digests)

    def find(self, key: str) -> int | None:
        """Return the number of a key, or None. It always compares with all of them, each in constant time."""
        given, found = _digest(key), None
        for i, digest in enumerate(self.digests):
            if hmac.compare_digest(given, digest):
                found = i
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Addresses, limits and options. The limits of the engine (batch, queue, pages) are the engine's own."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free
    keys: Keys = field(default_factory=Keys)
    origins: tuple[str, ...] = ()  # web pages of these origins may call; * for all
    hosts: tuple[str, ...] = ()  # names under which the server is called, beside loopback names and addresses
    max_body: int = 2 << 20  # bytes
    max_prompt: int | None = None  # characters; None: 8 for each token of the context
    max_tokens: int | None = None  # of an answer; None: what the context and the cache hold
    timeout: float = 600.0  # seconds for a whole request
    body_timeout: float = 30.0  # seconds for headers or a body to arrive
    grace: float = 30.0  # seconds that running requests get at shutdown
    backlog: int = 1024  # events that a reader of a stream may lag behind
    patience: float = 15.0  # seconds without a token after which a stream sends a comment
    log_prompts: bool = False

    def __post_init__(self) -> None:
        bounds = {
            "port": (0 <= self.port < 65536, "between 0 and 65535"),
            "max_body": (self.max_body >= 1024, "at least 1024 bytes"),
            "max_prompt": (self.max_prompt is None or self.max_prompt >= 1, "at least 1 character"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            "timeout": (self.timeout > 0, "above 0 seconds"),
            "body_timeout": (self.body_timeout > 0, "above 0 seconds"),
            "grace": (self.grace >= 0, "at least 0 seconds"),
            "backlog": (self.backlog >= 1, "at least 1 event"),
            "patience": (self.patience > 0, "above 0 seconds"),
        }
        for name, (fine, wanted) in bounds.items():
            if not fine:
                raise SchemeError(f"{name} must be {wanted}, got {getattr(self, name)}")
        for origin in self.origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise SchemeError(f"an origin must look like https://example.org, got '{origin}'")
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise SchemeError(f"an allowed host must look like llm.example.org, without a port, got '{host}'")
        object.__setattr__(self, "hosts", tuple(host.lower().removesuffix(".") for host in self.hosts))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Say whether a host name or address means this machine itself."""
    bare = host.strip("[]").lower().removesuffix(".")
    if bare == "localhost" or bare.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
