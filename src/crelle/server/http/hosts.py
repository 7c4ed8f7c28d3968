"""Under which names this server may be called, and from which web pages. docs/guide/threat-model.md has the reasons.

A web page of a stranger can give its own name the address 127.0.0.1 (DNS rebinding): the browser then takes our answers
for the page's own, and only the Host header tells. So:

    bound to a loopback address      Host is a loopback name or one of --allow-host, with keys and without
    bound elsewhere, without keys    a web page's Host is an address, a loopback name or one of --allow-host
    bound elsewhere, with keys       any Host: a page of a stranger has no key

and a page that names its origin must be listed (--allow-origin), or be our own: of the same host and port; on a
loopback address of any port, for that is this machine. X-Forwarded-Host and the like are never looked at.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from aiohttp import web

from crelle.server.errors import ApiError
from crelle.server.settings import Settings, is_loopback

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@?#\\\s]+)(?::([0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_OTHERS = {"cross-site", "same-site"}  # values of Sec-Fetch-Site that are not the page's own


def check_host(settings: Settings, request: web.Request) -> None:
    """Refuse a request that is not addressed to us; before its body is read."""
    names = [_name(value) for value in _authorities(request)]
    if len(names) == 0 or None in names:
        raise ApiError(400, "send one Host header with a name or an address", code="invalid_host", close=True)
    if not settings.loopback:
        return
    for name in names:
        if name is not None and not (is_loopback(name) or name in settings.hosts):
            raise _not_ours(name)


def check_origin(settings: Settings, request: web.Request) -> str | None:
    """Refuse web pages of strangers; return the origin of a page that is listed.

    Browsers say where a page comes from, in Origin or Sec-Fetch-Site; other programs say nothing.
    """
    origins = request.headers.getall("Origin", [])
    if not origins:
        if request.headers.get("Sec-Fetch-Site", "").lower() in _OTHERS and not _followed_link(request):
            raise _foreign()
        return None
    if len(origins) > 1:
        raise _foreign()
    if listed(settings, origins[0]):
        return origins[0]
    if not _own(settings, origins[0], request.headers.get("Host", "")):
        raise _foreign()
    return None


def listed(settings: Settings, origin: str) -> bool:
    return origin in settings.origins or "*" in settings.origins


def _authorities(request: web.Request) -> list[str]:
    """Return every name that the request gives its server: the Host header, and that of an absolute target."""
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1:
        return []
    target = request.raw_path
    if target.startswith("/") or target == "*":
        return hosts
    try:
        return [*hosts, urlsplit(target).netloc]
    except ValueError:
        return []


def _name(authority: str) -> str | None:
    """Return the host of `host:port`, in small letters and without the root's dot; None: it is not one."""
    found = _AUTHORITY.fullmatch(authority.strip())
    return found[1].lower().removesuffix(".") or None if found else None


def _own(settings: Settings, origin: str, host: str) -> bool:
    """Whether a page that is not listed was served by us."""
    try:
        parts = urlsplit(origin)
        name = _name(parts.netloc)
    except ValueError:
        return False
    if name is None or parts.scheme not in _DEFAULT_PORTS:
        return False
    if settings.loopback and is_loopback(name):
        return True
    default = _DEFAULT_PORTS[parts.scheme]
    if _with_port(parts.netloc, default) != _with_port(host, default):
        return False
    return bool(settings.keys and not settings.loopback) or _cannot_be_rebound(settings, name)


def _with_port(authority: str, default: str) -> tuple[str | None, str]:
    found = _AUTHORITY.fullmatch(authority.strip())
    return _name(authority), (found[2] if found else None) or default


def _cannot_be_rebound(settings: Settings, name: str) -> bool:
    """Whether a name cannot be a stranger's that was pointed here."""
    if name in settings.hosts or name == settings.host.lower() or is_loopback(name):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return not settings.loopback


def _followed_link(request: web.Request) -> bool:
    """Whether a person came here from another page: that page cannot see the answer."""
    return request.method == "GET" and request.headers.get("Sec-Fetch-Mode", "").lower() == "navigate"


def _not_ours(name: str) -> ApiError:
    shown = name if len(name) <= 100 else name[:100] + "…"
    why = f"this server listens on a loopback address and does not accept the host name '{shown}'; see --allow-host"
    return ApiError(403, why, code="host_not_allowed", close=True)


def _foreign() -> ApiError:
    why = "web pages of this origin may not call this server; see --allow-origin"
    return ApiError(403, why, code="origin_not_allowed", close=True)
