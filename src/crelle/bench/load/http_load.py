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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from urllib.parse import urlsplit

from crelle.bench.load.load_report import Call, LoadReport, Percentiles
from crelle.errors import CrelleError, SchemeError, UnsupportedError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_LONGEST_PAUSE = 5.0  # seconds that a refused client waits at most, whatever Retry-After says
_PAUSE = 0.1  # and where it says nothing
_TIMEOUT = 600.0  # seconds for one answer, unless told
_BUSY = {429, 503}  # a server that is full or starting: it may answer later

__all__ = ["Arrival", "Call", "LoadReport", "Percentiles", "Progress", "poisson", "run_closed_loop", "run_trace"]

Progress = Callable[[float, int, int], None]  # seconds so far, requests answered, requests failed


class LoadOptions(TypedDict, total=False):
    """What any load may set."""

    api_key: str | None
    model: str | None  # default: the first that the server lists
    chat: bool | None  # default: true; false asks /v1/completions, None whichever of the two answers
    extra: Mapping[str, Any] | None  # further fields of each request (temperature is 0 unless named here)
    timeout: float  # seconds for one answer
    give_up: int | None  # first requests that may fail, none being answered, before the run ends with an error
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
    list its models raises a CrelleError before anything is sent, and with `give_up` so does one that answers nothing.
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

            await _all(client() for _ in range(clients))
            return load.report(clients, seconds)

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

            await _all(map(client, arrivals))
            return load.report(None, load.now())

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
    chat: bool | None = True,
    extra: Mapping[str, Any] | None = None,
    timeout: float = _TIMEOUT,
    give_up: int | None = None,
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
        model = model or await _first_model(session, base)
        if chat is None:
            chat = await _can_chat(session, base, model)
        yield _Load(session, base, model, chat, dict(extra or {}), give_up, progress)


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


async def _can_chat(session: "ClientSession", base: str, model: str) -> bool:
    """Ask for one token as a chat, then as a completion: a model without a chat template answers the second only."""
    refusals = []
    asked = {"model": model, "max_tokens": 1}
    for chat, prompt in ((True, {"messages": [{"role": "user", "content": "Hello"}]}), (False, {"prompt": "Hello"})):
        try:
            async with session.post(base + _path(chat), json={**asked, **prompt}) as response:
                if response.status < 400 or response.status in _BUSY:
                    return chat
                refusals.append(f"{_path(chat)} {await _refusal(response)}")
        except _broken() as e:
            refusals.append(f"{_path(chat)} {_why(e)}")
    raise CrelleError(f"{base} answers neither chats nor completions: {'; '.join(refusals)}")


class _Load:
    """The clients' common side: a session, a clock, and the calls so far."""

    def __init__(
        self,
        session: "ClientSession",
        base: str,
        model: str,
        chat: bool,
        extra: dict[str, Any],
        give_up: int | None,
        progress: Progress | None,
    ) -> None:
        self.session, self.base, self.model, self.chat, self.extra = session, base, model, chat, extra
        self.calls: list[Call] = []
        self.failures = 0
        self._give_up, self._progress = give_up, progress
        self._begun = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begun

    async def call(self, begun: float, prompt: str, max_tokens: int, until: float) -> Call:
        """Ask once, note how it went, and return that."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        body = {"model": self.model, "max_tokens": max_tokens, **asked, **options, **self.extra}
        received = _Response()
        try:
            async with self.session.post(self.base + _path(self.chat), json=body) as response:
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
        if self._give_up is not None and call.error is not None and call.status not in _BUSY:
            self._require_an_answer(self._give_up)
        return call

    def _require_an_answer(self, least: int) -> None:
        """Raise where at least so many requests have failed and none was answered."""
        if self.failures == len(self.calls) >= least:
            which, said = "all" if least == 1 else "the first", self._sum_up(None, self.now()).reasons
            raise CrelleError(f"{which} {self.failures} requests to {self.base}{_path(self.chat)} failed ({said})")

    def report(self, clients: int | None, seconds: float) -> LoadReport:
        """Sum up; a run without one answer is no measurement where `give_up` is set."""
        if self._give_up is not None:
            self._require_an_answer(1)
        return self._sum_up(clients, seconds)

    def _sum_up(self, clients: int | None, seconds: float) -> LoadReport:
        return LoadReport.of(self.base, self.model, clients, seconds, self.calls, chat=self.chat)

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


async def _all(clients: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all clients; the first error ends them."""
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
    except ExceptionGroup as e:
        raise e.exceptions[0] from None


def _path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


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
