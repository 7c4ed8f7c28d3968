"""Clients of an acceptance run: the openai client, and what each kind of request must get.

completion, stream, chat    the three ways to ask; a third of the prompts are those with known answers
seed                        sampled, with a seed
stop                        a stop string out of the middle of the known answer
n = 2                       two answers to one prompt
cancel                      the client leaves in mid-stream: nothing to check but that nobody else is harmed
bad request                 must get its status and OpenAI's JSON error
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from openai import APIStatusError, AsyncOpenAI

KINDS = {"completion": 30, "stream": 30, "chat": 12, "seed": 6, "stop": 6, "n = 2": 6, "cancel": 5, "bad request": 5}
LENGTHS = ((16, 128, 70), (128, 1024, 25), (1024, 4000, 5))  # tokens of a prompt: from, to, share in percent
ANSWERS = (1, 4, 8, 16, 32)  # tokens
LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


@dataclass(frozen=True)
class Known:
    """A prompt whose answer is known: what LLM.generate says."""

    prompt: str
    tokens: int
    seed: int | None  # None: greedy
    text: str = ""

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        return {"prompt": self.prompt, "max_tokens": self.tokens, **sampling}


@dataclass
class Outcome:
    """What became of one request."""

    kind: str
    begun: float
    seconds: float = 0.0
    first: float | None = None  # seconds until the first token, of streams
    tokens: int = 0
    prompt_tokens: int = 0
    compared: bool = False
    error: str | None = None


class WrongAnswerError(Exception):
    """An answer is not what it must be."""


def random_prompt(rng: random.Random, longest: int) -> str:
    """Return a prompt of 16 to 4000 tokens, BOS included, as far as the context holds them."""
    low, high, _ = rng.choices(LENGTHS, [share for *_, share in LENGTHS])[0]
    length = min(rng.randint(low, high), longest)
    return "".join(rng.choices(LETTERS, k=length - 1))


def known_prompts(count: int, longest: int, seed: int = 0) -> list[Known]:
    """Return prompts to be answered by LLM.generate first; the last fourth are sampled."""
    rng = random.Random(seed)
    return [
        Known(f"{i:03} {random_prompt(rng, longest - 4)}", rng.choice(ANSWERS[1:]), i if i >= count * 3 // 4 else None)
        for i in range(count)
    ]


@dataclass
class Crowd:
    """Clients of one server address, of which each asks again when it is answered."""

    url: str
    model: str
    known: Sequence[Known]
    context: int
    exact: bool  # answers have the same bits in any batch, so those under load are compared, too
    outcomes: list[Outcome] = field(default_factory=list)
    active: int = 0  # requests under way
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # requests are only sent while it is set

    async def run(self, requests: int, clients: int, seed: int, beside: Callable[[], Awaitable[None]]) -> None:
        """Send requests, with `beside` at the same time."""
        self.gate.set()
        left, rng = iter(range(requests)), random.Random(seed)
        kinds = rng.choices(list(KINDS), list(KINDS.values()), k=requests)
        kinds[: len(KINDS)] = list(KINDS)[:requests]  # each at least once
        async with self.client() as client, aiohttp.ClientSession() as raw:

            async def one() -> None:
                for i in left:
                    await self.gate.wait()
                    await self.ask(kinds[i], random.Random(f"{seed} {i}"), client, raw)

            await asyncio.gather(*(one() for _ in range(clients)), beside())

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    async def alone(self) -> None:
        """Ask for all known answers, one at a time, and compare them."""
        async with self.client() as client:
            for it in self.known:
                await self._record("alone", self._stream(client, it.body, it, alone=True))

    async def ask(self, kind: str, rng: random.Random, client: AsyncOpenAI, raw: aiohttp.ClientSession) -> None:
        """Send one request and record what became of it."""
        greedy = [it for it in self.known if it.seed is None]
        body: dict[str, Any] = {"max_tokens": rng.choice(ANSWERS), "temperature": rng.choice((0, 0.8))}
        it = rng.choice(greedy) if rng.random() < 1 / 3 else None
        body |= it.body if it else {"prompt": random_prompt(rng, self.context - max(ANSWERS))}
        if kind == "completion":
            work = self._whole(client, body, it)
        elif kind in ("stream", "cancel"):
            work = self._stream(client, body, it, leave=rng.randint(1, 3) if kind == "cancel" else None)
        elif kind == "chat":
            work = self._chat(client, body, stream=rng.random() < 0.5)
        elif kind == "seed":
            it = rng.choice([it for it in self.known if it.seed is not None])
            work = self._whole(client, it.body, it)
        elif kind == "stop":
            work = self._stop(client, rng.choice([it for it in greedy if len(it.text) > 2]))
        elif kind == "n = 2":
            it = rng.choice(greedy)
            work = self._whole(client, it.body | {"n": 2}, it)
        else:
            work = self._bad(client, raw, rng)
        await self._record(kind, work)

    async def _record(self, kind: str, work: Awaitable[Outcome]) -> None:
        begun = time.monotonic()
        self.active += 1
        try:
            found = await work
        except Exception as e:  # whatever a client may meet is a failure of the run, not of this script
            sentence = e.message if isinstance(e, APIStatusError) else str(e)
            found = Outcome(kind, begun, error=f"{type(e).__name__}: {sentence}"[:300])
        self.active -= 1
        found.kind, found.begun, found.seconds = kind, begun, time.monotonic() - begun
        self.outcomes.append(found)

    # What a request must get --------------------------------------------------------------------------------------

    async def _whole(self, client: AsyncOpenAI, body: dict[str, Any], it: Known | None) -> Outcome:
        answer = await client.completions.create(model=self.model, **body)
        if [c.index for c in answer.choices] != list(range(body.get("n", 1))):
            raise WrongAnswerError(f"asked for {body.get('n', 1)} answers, got {[c.index for c in answer.choices]}")
        for choice in answer.choices:
            self._check_end(choice.finish_reason, getattr(choice, "cut", None))
        same = [c for c in answer.choices if c.index == 0 or body["temperature"] == 0]
        for choice in same:
            self._compare(choice.text, it)
        assert answer.usage is not None
        if answer.usage.completion_tokens > body.get("n", 1) * body["max_tokens"]:
            raise WrongAnswerError(f"asked for {body['max_tokens']} tokens, got {answer.usage.completion_tokens}")
        return self._outcome(answer.usage, compared=self.exact and it is not None)

    async def _stream(
        self,
        client: AsyncOpenAI,
        body: dict[str, Any],
        it: Known | None,
        leave: int | None = None,
        alone: bool = False,
    ) -> Outcome:
        begun, first, text, reason, usage, cut = time.monotonic(), None, "", None, None, None
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.completions.create(model=self.model, **body, **options)
        events = 0
        async for chunk in stream:
            first = first or time.monotonic() - begun
            events += 1
            if leave is not None and events >= leave:
                await stream.close()
                return Outcome("", 0, first=first)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.text
                reason, cut = choice.finish_reason or reason, getattr(choice, "cut", cut)
        self._check_end(reason, cut)
        self._compare(text, it, alone)
        if usage is None:
            raise WrongAnswerError("a stream with include_usage ended without counts")
        return self._outcome(usage, first, compared=it is not None and (self.exact or alone))

    async def _chat(self, client: AsyncOpenAI, body: dict[str, Any], stream: bool) -> Outcome:
        messages: Any = [{"role": "user", "content": body["prompt"][: self.context // 2]}]
        rest: Any = {"max_tokens": body["max_tokens"], "temperature": body["temperature"]}
        if not stream:
            answer = await client.chat.completions.create(model=self.model, messages=messages, **rest)
            self._check_end(answer.choices[0].finish_reason, getattr(answer.choices[0], "cut", None))
            assert answer.usage is not None
            return self._outcome(answer.usage)
        begun, first, reason, usage = time.monotonic(), None, None, None
        rest |= {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(model=self.model, messages=messages, **rest):
            if chunk.choices and (chunk.choices[0].delta.content or chunk.choices[0].finish_reason):
                first = first or time.monotonic() - begun
                reason = chunk.choices[0].finish_reason or reason
            usage = chunk.usage or usage
        self._check_end(reason, None)
        if usage is None:
            raise WrongAnswerError("a stream with include_usage ended without counts")
        return self._outcome(usage, first)

    async def _stop(self, client: AsyncOpenAI, it: Known) -> Outcome:
        middle = len(it.text) // 2
        stop = it.text[middle : middle + 3]
        answer = await client.completions.create(model=self.model, **it.body, stop=[stop])
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        if stop in text:
            raise WrongAnswerError(f"the answer {text!r} holds its stop string {stop!r}")
        if self.exact and (text, reason) != (it.text.split(stop)[0], "stop"):
            raise WrongAnswerError(f"with the stop string {stop!r}: {text!r}, {reason}; without it: {it.text!r}")
        assert answer.usage is not None
        return self._outcome(answer.usage, compared=self.exact)

    async def _bad(self, client: AsyncOpenAI, raw: aiohttp.ClientSession, rng: random.Random) -> Outcome:
        wrong: list[tuple[int, dict[str, Any]]] = [
            (400, {"n": 0}),
            (400, {"temperature": -1}),
            (400, {"max_tokens": -1}),
            (400, {"prompt": "a" * (self.context + 10)}),
            (400, {"stop": [1, 2]}),
            (404, {"model": "no-such-model"}),
        ]
        status, changes = rng.choice([*wrong, (400, {})])
        if not changes:  # no JSON at all
            head = {"Content-Type": "application/json"}
            async with raw.post(f"{self.url}/v1/completions", data=b'{"prompt": ', headers=head) as answer:
                said, body = answer.status, (await answer.json()).get("error")
        else:
            try:
                await client.completions.create(**{"model": self.model, "prompt": "Hello", "max_tokens": 1} | changes)
                raise WrongAnswerError(f"{str(changes)[:60]} was answered")
            except APIStatusError as e:
                said, body = e.status_code, e.body
        if said != status or not isinstance(body, dict) or not isinstance(body.get("message"), str):
            raise WrongAnswerError(f"{str(changes)[:60] or 'no JSON'} got {said} and {str(body)[:100]}, not {status}")
        return Outcome("", 0)

    def _compare(self, text: str, it: Known | None, alone: bool = False) -> None:
        if it is not None and (self.exact or alone) and text != it.text:
            raise WrongAnswerError(f"the answer is {text[:80]!r}, LLM.generate says {it.text[:80]!r}")

    @staticmethod
    def _check_end(reason: str | None, cut: str | None) -> None:
        if reason not in ("stop", "length") or cut is not None:
            raise WrongAnswerError(f"the answer ended with {reason}" + (f", cut by {cut}" if cut else ""))

    @staticmethod
    def _outcome(usage: Any, first: float | None = None, compared: bool = False) -> Outcome:
        return Outcome(
            "",
            0,
            first=first,
            tokens=usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            compared=compared,
        )
