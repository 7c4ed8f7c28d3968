"""What the engine gives back: an event for every token, and at the end of a sequence all of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from crelle.engine.requests.sequence import Reason
from crelle.engine.sampling.grammar import GrammarState
from crelle.engine.sampling.sampler import Sampler, not_finite, require_finite
from crelle.engine.sampling.stop_filter import StopFilter
from crelle.errors import CapacityError, SchemeError

_NEVER = -9999.0  # the log-probability of what has probability 0: JSON has no infinity


class QueueFullError(CapacityError):
    """Too many requests wait already; the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt was continued with."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop": an end token or a stop string; "length": max_tokens or the context is full
    prompt_tokens: int
    first_token_seconds: float  # from the call to the first token
    tokens_per_second: float  # of the tokens after the first
    drafted: int = 0  # tokens that were guessed and verified (crelle.engine.speculation)
    accepted: int = 0  # of these, those that were right


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One step of a stream: the text that became certain; the last piece carries the completion."""

    text: str
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token, before temperature, penalties and truncation."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the k most likely tokens, the likeliest first
    rank: int | None = None  # 1: the likeliest; known of prompts


@dataclass(frozen=True, slots=True)
class Output:
    """One finished sequence of a request."""

    index: int  # among the n of the request
    completion: Completion  # its finish_reason is one of sequence.Reason
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each token, where they were asked for
    error: BaseException | None = None  # what failed, where the reason is "error"
    reused: int = 0  # tokens of the prompt that were in the cache already
    preemptions: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # of each token of the prompt but the first


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one sequence: the token sampled, the text that became certain; the last one carries the output."""

    index: int
    text: str = ""
    token: int | None = None  # None: nothing was sampled, or an end token, which is not part of the text
    logprob: TokenLogprob | None = None
    output: Output | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # with the first token


OnEvent = Callable[[Event], None]


class OutputState:
    """The output of a running sequence: what the scheduler, which knows ids only, lacks. Survives preemptions."""

    def __init__(
        self,
        index: int,
        prompt_tokens: int,
        sampler: Sampler,
        text: StopFilter,
        top: int | None,
        prompt: "PromptLogprobs | None" = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """Begin now; top: how many likely tokens to tell of with each one sampled; None: no logprobs."""
        self.index, self.prompt_tokens, self.sampler, self.text = index, prompt_tokens, sampler, text
        self.top, self.logprobs, self.tokens = top, list[TokenLogprob](), list[int]()
        self.grammar = grammar  # what the answer must match
        self.prompt = prompt  # shared by the n sequences of a request
        self.begun = perf_counter()
        self.first: float | None = None  # when the first token came
        self.pending: TokenLogprob | None = None  # of the token just sampled
        self.verdict: tuple[Reason, BaseException | None] | None = None  # why it ends, where ids do not show it

    @property
    def processed(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.sampler.processor is not None or self.grammar is not None

    @property
    def fast(self) -> bool:
        """Whether the token of the largest logit is all that is needed of a step."""
        return self.top is None and self.sampler.greedy and self.grammar is None

    def take(self, token: int, logits: Callable[[], Tensor], position: int) -> int:
        """Return the next token once the grammar and the log-probability are those after it; below 0: there is none.

        logits: the model's, [V], asked for where they are needed.
        """
        if token < 0:
            raise not_finite(position)
        if self.grammar is not None:
            self.grammar.accept(token)
        self.pending = None if self.top is None else logprob(logits(), token, self.top)
        self.first = self.first or perf_counter()
        return token

    def push(self, token: int) -> Event:
        """Add a token that is part of the text."""
        prompt = self.prompt.all(self.prompt_tokens) if self.prompt is not None and not self.tokens else None
        event = Event(self.index, self.text.push(token), token, self.pending, prompt_logprobs=prompt)
        self.tokens.append(token)
        if self.pending is not None:
            self.logprobs.append(self.pending)
        return event

    def finish(
        self,
        reason: Reason,
        error: BaseException | None,
        *,
        whole: bool = True,
        reused: int = 0,
        preemptions: int = 0,
        drafted: int = 0,
        accepted: int = 0,
    ) -> Event:
        """Return the last event; whole=False: without the text that was held back; others: fields of its output."""
        tokens = self.tokens
        rest = self.text.finish() if whole else ""
        said = "stop" if self.text.stopped and reason in ("stop", "length") else reason
        first = (self.first or self.begun) - self.begun
        seconds = perf_counter() - self.begun - first
        speed = (len(tokens) - 1) / seconds if len(tokens) > 1 and seconds > 0 else 0.0
        completion = Completion(self.text.text, tokens, said, self.prompt_tokens, first, speed, drafted, accepted)
        logprobs = None if self.top is None else tuple(self.logprobs)
        prompt = None if self.prompt is None else self.prompt.all(self.prompt_tokens)
        found = Output(self.index, completion, logprobs, error, reused, preemptions, prompt)
        return Event(self.index, rest, output=found)


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, chunk by chunk; the first token has none."""

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._prompt, self._top = prompt, top
        self._found: dict[int, TokenLogprob] = {}

    def add(self, start: int, logits: Tensor) -> None:
        """Take note of the logits [R, V] of the prompt's tokens from `start` on; a preempted one is computed again."""
        tokens = self._prompt[start + 1 : start + 1 + len(logits)]
        if not tokens or start + 1 in self._found:
            return
        rows = logits[: len(tokens)]
        require_finite(float(rows.amax(-1).min()), start + 1)
        for i, found in enumerate(logprobs(rows, tokens, self._top), start + 1):
            self._found[i] = found

    def all(self, tokens: int) -> tuple[TokenLogprob | None, ...]:
        return tuple(self._found.get(i) for i in range(tokens))


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probability and rank of a token, and the `top` most likely ones, for each row of [R, V]."""
    logs = torch.log_softmax(logits.float(), -1)
    own = logs.gather(1, torch.tensor(tokens, device=logs.device)[:, None])  # [R, 1]
    ranks = (1 + (logs > own).sum(-1)).tolist()
    best = logs.topk(min(top, logs.shape[1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    each = zip(tokens, own[:, 0].tolist(), pairs, ranks, strict=True)
    return [
        TokenLogprob(token, _finite(p), tuple((t, _finite(q)) for t, q in zip(*some, strict=True)), rank)
        for token, p, some, rank in each
    ]


def nothing_allowed(position: int) -> SchemeError:
    """Return the error of a sequence of which every token is forbidden."""
    return SchemeError(f"no token is allowed at token {position}: logit_bias, min_tokens and a grammar exclude all")


def logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Return the log-probability of a token and of the `top` most likely ones, for logits [V]."""
    logs = torch.log_softmax(logits.float(), -1)
    best = logs.topk(min(top, logs.numel()))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, _finite(float(logs[token])), tuple((t, _finite(p)) for t, p in pairs))


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER
