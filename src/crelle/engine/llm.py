"""LLM: a model, its tokenizer, and text out of it. One object from quantizer to server.

Threads. An LLM may be used by any number of threads at once, and beside engines and services over it: each call has its
own cache, sampler and detokenizer, and `LLM.lock` is held for one step of the model at a time (and while a precision is
built), since the model itself has working memory: the C++ step, CUDA graphs. It is never held while a stream waits to
be read. Who calls `llm.model(...)` directly beside others takes the lock.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import overload

import torch

from crelle.engine.sampler import Sampler, Sampling
from crelle.engine.tokenizer import Detokenizer, Message, Tokenizer
from crelle.errors import CapacityError, SchemeError
from crelle.formats.io import read_json
from crelle.formats.kv import KVFormat
from crelle.formats.open import Weights, open_weights
from crelle.kernels.threads import set_threads
from crelle.models import precisions
from crelle.models.loader import Model, build, choose_device
from crelle.models.settings import token_ids

Prompt = str | list[int]  # text, or token ids that are taken as they are


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt was continued with."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop": an end token or a stop string; "length": max_tokens or the context is full
    prompt_tokens: int
    first_token_seconds: float  # from the call to the first token
    tokens_per_second: float  # of the tokens after the first


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of a stream: the text that became certain; the last piece carries the completion."""

    text: str
    completion: Completion | None = None


class LLM:
    """A language model that is ready to speak.

    >>> llm = LLM.load("out/smollm2-3bit")                                     # doctest: +SKIP
    >>> llm.generate("Once upon a time", Sampling(max_tokens=40)).text         # doctest: +SKIP
    >>> [c.text for c in llm.generate(["Once upon a time", "There was"])]      # doctest: +SKIP
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, weights: Weights, kv: KVFormat | None = None) -> None:
        self.model, self.tokenizer, self.weights = model, tokenizer, weights
        self.kv = kv or KVFormat()  # how caches store keys and values
        self.end_ids = _end_ids(weights)
        self.precisions = precisions.offered(weights)  # of a nested checkpoint; () where there is only one
        self.lock = RLock()  # held by whoever runs a step of the model, at any precision
        self._at = {model.build.bits or precisions.default(weights): model}

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        kernel: str | None = None,
        bits: int | None = None,
        kv: KVFormat | str | int = 16,
    ) -> "LLM":
        """Load a Crelle checkpoint, a Hugging Face directory or a .gguf file.

        device: cpu, cuda or auto.  threads: on the CPU.  kernel: insist on one (see `crelle explain`).
        bits: of a nested checkpoint, the precision for calls that ask for none; default: the finest.
        kv: bits of the cache, 16, 8 or 4, or a string with settings: see crelle.formats.kv.
        """
        stored = KVFormat.parse(kv)
        if threads is not None:
            set_threads(threads)
        weights = open_weights(path)
        with ThreadPoolExecutor(1) as beside:  # preparing weights is C++, which leaves Python to the tokenizer
            tokenizer = beside.submit(Tokenizer.of, weights)
            model = build(weights, choose_device(device), kernel=kernel, bits=bits)
            return cls(model, tokenizer.result(), weights, stored)

    def at(self, bits: int | None) -> Model:
        """Return the model at a precision of a nested checkpoint; None: as it was loaded.

        It is built when it is first asked for and shares with the others all but the matrices in the kernel's layout.
        """
        if bits is None:
            return self.model
        if (found := self._at.get(bits)) is None:
            with self.lock:
                if (found := self._at.get(bits)) is None:  # nobody has built it meanwhile
                    found = self._at[bits] = self.model.at(bits)
        return found

    @overload
    def generate(self, prompt: Prompt, sampling: Sampling | None = None, *, bits: int | None = None) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        bits: int | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        bits: int | None = None,
    ) -> Completion | list[Completion]:
        """Continue a prompt (text or token ids), or all of a list of prompts side by side; `bits` as in `at`.

        A list goes through the engine (docs/engine.md): its texts share every reading of the weights. Each has the
        sampling, or the one at its place in a list of them, and gets what it would get in any other list.
        """
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            from crelle.engine.offline import generate_all  # it is built on this class

            return generate_all(self, prompt, sampling, bits=bits)
        if isinstance(sampling, Sequence):
            raise SchemeError("one prompt takes one sampling, not a list of them")
        return self._run(prompt, sampling, bits)  # type: ignore[arg-type]

    def _run(self, prompt: Prompt, sampling: Sampling | None, bits: int | None) -> Completion:
        for piece in self.stream(prompt, sampling, bits=bits):
            if piece.completion:
                return piece.completion
        raise AssertionError("a stream ends with its completion")

    def chat(
        self, messages: list[Message], sampling: Sampling | None = None, *, bits: int | None = None
    ) -> Iterator[Piece]:
        """Stream the assistant's answer to a conversation."""
        with self.lock:  # the template is compiled when it is first used
            ids = self.tokenizer.encode_chat(messages)
        return self.stream(ids, sampling, bits=bits)

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, *, bits: int | None = None) -> Iterator[Piece]:
        """Continue a prompt, piece by piece as the text becomes certain."""
        sampling = sampling or Sampling()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids)
        return self._steps(self.at(bits), ids, sampling)

    def _check(self, ids: Sequence[int]) -> None:
        c = self.model.c
        if not ids:
            raise SchemeError("the prompt is empty: it needs at least one token")
        if len(ids) >= c.context:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens, the model's context holds {c.context} with at least one to come; "
                "shorten the prompt"
            )
        if bad := [i for i in ids if not 0 <= i < c.vocabulary]:
            raise SchemeError(f"token id {bad[0]} is outside the vocabulary of {c.vocabulary}")

    def _steps(self, model: Model, ids: list[int], sampling: Sampling) -> Iterator[Piece]:
        begun = perf_counter()
        with self.lock:  # the first cache with centred keys runs the model
            cache, sampler = model.new_cache(kv=self.kv), Sampler(sampling, model.device)
        text, new = StopFilter(Detokenizer(self.tokenizer, ids), sampling.stop), list[int]()
        room = min(sampling.max_tokens, model.c.context - len(ids))
        feed, first, reason = ids, 0.0, "length"
        while len(new) < room:
            with self.lock:
                tokens = torch.tensor([feed], device=model.device)
                token = sampler.draw(model(tokens, cache, last=True)[0, -1], ids + new)
            first = first or perf_counter() - begun
            if token in self.end_ids:
                reason = "stop"
                break
            new.append(token)
            feed = [token]
            if piece := text.push(token):
                yield Piece(piece)
            if text.stopped:
                break
        rest = text.finish()
        reason = "stop" if text.stopped else reason
        seconds = perf_counter() - begun - first
        speed = (len(new) - 1) / seconds if len(new) > 1 and seconds > 0 else 0.0
        yield Piece(rest, Completion(text.text, new, reason, len(ids), first, speed))


class StopFilter:
    """Passes text on, but holds back what may turn out to be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer, self._stop = detokenizer, stop
        self._all, self._given = "", 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text that was let through."""
        return self._all[: self._given]

    def push(self, token: int) -> str:
        return self._let(self._detokenizer.push(token), hold=True)

    def finish(self) -> str:
        return "" if self.stopped else self._let(self._detokenizer.finish(), hold=False)

    def _let(self, text: str, hold: bool) -> str:
        self._all += text
        if not self._stop:
            self._given = len(self._all)
            return text
        found = [(i + len(s), i) for s in self._stop if (i := self._all.find(s, self._given)) >= 0]
        if found:
            self.stopped, end = True, min(found)[1]  # the one that is complete first, however the text was cut
        else:
            end = len(self._all) - (self._held() if hold else 0)
        piece, self._given = self._all[self._given : end], end
        return piece

    def _held(self) -> int:
        """How many characters at the end could begin a stop string."""
        pending = len(self._all) - self._given
        for n in range(min(pending, max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(s.startswith(self._all[-n:]) for s in self._stop):
                return n
        return 0


def _end_ids(weights: Weights) -> frozenset[int]:
    """The tokens that end a text: what config.json and generation_config.json say."""
    ids = token_ids(weights.config.get("eos_token_id"), str(weights.path))
    if (file := weights.path / "generation_config.json").is_file():
        ids |= token_ids(read_json(file).get("eos_token_id"), str(file))
    return ids
