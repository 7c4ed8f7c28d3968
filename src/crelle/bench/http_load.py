"""Load over HTTP: many clients of an OpenAI-compatible server at once, and how long each of them waited.

    run_closed_loop   N clients, each of which sends its next request when its last answer is complete: throughput
    run_trace         requests leave when they are due, whatever the server does: what waiting in line feels like

Every request streams, for only a stream shows when the first token came. Tokens are those that the server counts
(`usage`); where it sends no count, pieces of text. Times are taken when bytes arrive here, so client and server on one
machine share its cores: the figures are those of both together.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from urllib.parse import urlsplit

from crelle.bench.load_report import Call, LoadReport, Percentiles
from crelle.errors import CrelleError, SchemeError, UnsupportedError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_LONGEST_PAUSE = 5.0  # seconds that a refused client waits at most, whatever Retry-After says
_PAUSE = 0.1  # and where it says nothing
_TIMEOUT = 600.0  # seconds for one answer, unless told

__all__ = ["Arrival", "Call", "LoadReport", "Percentiles", "Progress", "poisson", "run_closed_loop", "run_trace"]

Progress = Callable[[float, int, int], None]  # seconds so far, requests answered, requests failed


class LoadOptions(TypedDict, total=False):
    """What any load may set."""

    api_key: str | None
    model: str | None  # default: the first that the server lists
    chat: bool  # default: true; false asks /v1/completions
    extra: Mapping[str, Any] | None  # further fields of each request (temperature is 0 unless named here)
    timeout: float  # seconds for one answer
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: when it is due, in seconds from the beginning, and what it asks."""

    at: float
    prompt: str
    max_tokens: int


def run_closed_loop(
    url: str,
    *,
    clients: int,
    seconds: float,
    prompts: Sequence[str],
    max_tokens: int,
    **options: Unpack[LoadOptions],
) -> LoadReport:
    """Let `clients` clients ask, one request after the other, for `seconds`; then let the last answers come in.

    url: of the server, with or without /v1.  prompts: taken in order by whichever client is free.
    A refused client waits as long as the server says. Failures are counted, not raised; but a server that does not
    list its models raises a CrelleError before anything is sent.
    """
    timeout = options.get("timeout", _TIMEOUT)
    for name, value in {"clients": clients, "seconds": seconds, "max_tokens": max_tokens, "timeout": timeout}.items():
        if not value > 0:
            raise SchemeError(f"{name} must be above 0, got {value}")
    if not prompts:
        raise SchemeError("a load needs at least one prompt")

    async def run() -> LoadReport:
        async with _open(url, **options) as load:
            order = count()

            async def client() -> None:
                while load.now() < seconds:
                    call = await load.call(load.now(), prompts[next(order) % len(prompts)], max_tokens, seconds)
                    if call.error is not None:
                        pause = min(call.retry_after or _PAUSE, _LONGEST_PAUSE, seconds - load.now())
                        await asyncio.sleep(max(0.0, pause))

            await asyncio.gather(*(client() for _ in range(clients)))
            return LoadReport.of(load.base, load.model, clients, seconds, load.calls)

    return asyncio.run(run())


def run_trace(url: str, arrivals: Sequence[Arrival], **options: Unpack[LoadOptions]) -> LoadReport:
    """Send each request when it is due, however many are under way, and wait for all answers. See run_closed_loop."""
    if not arrivals:
        raise SchemeError("a trace needs at least one arrival")
    if wrong := next((a for a in arrivals if not (a.at >= 0 and a.max_tokens > 0)), None):
        raise SchemeError(
            f"an arrival needs a time from 0 on and max_tokens above 0, got {wrong.at}, {wrong.max_tokens}"
        )

    async def run() -> LoadReport:
        async with _open(url, **options) as load:

            async def client(a: Arrival) -> None:
                await asyncio.sleep(a.at - load.now())
                await load.call(a.at, a.prompt, a.max_tokens, float("inf"))

            await asyncio.gather(*map(client, arrivals))
            return LoadReport.of(load.base, load.model, None, load.now(), load.calls)

    return asyncio.run(run())


def poisson(rate: float, seconds: float, prompts: Sequence[str], max_tokens: int, *, seed: int = 0) -> list[Arrival]:
    """Return arrivals that know nothing of each other, `rate` a second on average; the same seed, the same list."""
    if not (rate > 0 and seconds > 0 and prompts):
        raise SchemeError(
            f"arrivals need a rate and a time above 0 and a prompt, got {rate}, {seconds}, {len(prompts)}"
        )
    rng, at = random.Random(seed), 0.0
    found: list[Arrival] = []
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at, prompts[len(found) % len(prompts)], max_tokens))
    return found


@asynccontextmanager
async def _open(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    chat: bool = True,
    extra: Mapping[str, Any] | None = None,
    timeout: float = _TIMEOUT,
    progress: Progress | None = None,
) -> AsyncIterator["_Load"]:
    try:
        import aiohttp
    except ImportError as e:
        raise UnsupportedError("the load generator needs aiohttp: pip install 'crelle[server]'") from e
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise SchemeError(f"the server's address should look like http://127.0.0.1:8000, got {url!r}")
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)  # as many connections as there are clients
    times = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=times, headers=headers) as session:
        load = _Load(session, base, model or await _first_model(session, base), chat, dict(extra or {}), progress)
        yield load


async def _first_model(session: "ClientSession", base: str) -> str:
    try:
        async with session.get(f"{base}/v1/models") as response:
            if response.status != 200:
                raise CrelleError(f"{base} does not list its models: {await _refusal(response)}")
            return str((await response.json())["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise CrelleError(f"{base}/v1/models does not answer like an OpenAI-compatible server") from e
    except _broken() as e:
        raise CrelleError(f"no server at {base}: {_why(e)}") from e


class _Load:
    """The clients' common side: a session, a clock, and the calls so far."""

    def __init__(
        self,
        session: "ClientSession",
        base: str,
        model: str,
        chat: bool,
        extra: dict[str, Any],
        progress: Progress | None,
    ) -> None:
        self.session, self.base, self.model, self.chat, self.extra = session, base, model, chat, extra
        self.calls: list[Call] = []
        self.failures = 0
        self._progress = progress
        self._begun = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begun

    async def call(self, begun: float, prompt: str, max_tokens: int, until: float) -> Call:
        """Ask once, note how it went, and return that."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        body = {"model": self.model, "max_tokens": max_tokens, **asked, **options, **self.extra}
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        received = _Response()
        try:
            async with self.session.post(self.base + path, json=body) as response:
                received.status = response.status
                if response.status == 200:
                    await self._listen(response, received)
                else:
                    received.retry_after = _retry_after(response)
                    received.error = await _refusal(response)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            received.error = "the stream holds something that is not an event of this interface"
        except _broken() as e:
            received.error = _why(e)
        call = received.call(begun, self.now(), prompt, until)
        self.calls.append(call)
        self.failures += call.error is not None
        if self._progress:
            self._progress(self.now(), len(self.calls) - self.failures, self.failures)
        return call

    async def _listen(self, response: "ClientResponse", received: "_Response") -> None:
        rest = b""
        async for chunk in response.content.iter_any():
            now = self.now()
            *blocks, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
            for line in (line for block in blocks for line in block.split(b"\n") if line.startswith(b"data:")):
                received.event(line[5:].strip(), now)
            if received.done or received.error:
                return
        received.error = "the stream ended before the answer was complete"


class _Response:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.error: str | None = None
        self.retry_after: float | None = None
        self.done = False
        self.texts: list[str] = []
        self.times: list[float] = []  # when each text came
        self.usage: dict[str, Any] = {}

    def event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"]["message"])
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content") if "delta" in choice else choice["text"]:
                self.texts.append(text)
                self.times.append(now)

    def call(self, begun: float, ended: float, prompt: str, until: float) -> Call:
        times, tokens = self.times, int(self.usage.get("completion_tokens", len(self.texts)))
        return Call(
            begun=begun,
            seconds=ended - begun,
            prompt=prompt,
            text="".join(self.texts),
            tokens=tokens,
            prompt_tokens=int(self.usage.get("prompt_tokens", 0)),
            first=times[0] - begun if times else None,
            per_token=(times[-1] - times[0]) / (tokens - 1) if times and tokens > 1 else None,
            stall=max((b - a for a, b in pairwise(times)), default=None),
            within=sum(t <= until for t in times) / len(times) if times else 1.0,
            status=self.status,
            error=self.error,
            retry_after=self.retry_after,
        )


def _retry_after(response: "ClientResponse") -> float | None:
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None


async def _refusal(response: "ClientResponse") -> str:
    """Return the status and, where the server sends one, its sentence."""
    try:
        said = json.loads(await response.read())["error"]["message"]
        return f"{response.status}: {said}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status}: {response.reason}"


def _broken() -> tuple[type[BaseException], ...]:
    """Return all that a connection may die of."""
    import aiohttp

    return (aiohttp.ClientError, asyncio.TimeoutError, OSError)


def _why(e: BaseException) -> str:
    """Say it in words that are the same each time, so that equal failures count as one."""
    import aiohttp

    if isinstance(e, asyncio.TimeoutError):
        return "no whole answer came in time"
    if isinstance(e, aiohttp.ClientConnectorError):
        return f"it cannot be reached ({e.os_error.strerror or e.os_error})"
    return "the connection broke"
