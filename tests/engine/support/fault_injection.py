"""Raises at the k-th call, or the k-th line, of the engine's own code; and traffic to do it under."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import fake_model
import torch
from fake_model import VOCABULARY
from reference_single import assert_empty

import crelle.engine
from crelle import LLM, Sampling
from crelle.engine.engine import Engine, Handle
from crelle.engine.requests.output import Event
from crelle.engine.requests.sequence import Sequence
from crelle.engine.scheduler import UNKNOWN, Step

ENGINE = str(Path(crelle.engine.__file__).parent)
UNDER_TEST = (ENGINE, __file__, fake_model.__file__)


class Panic(BaseException):
    """What a panic in Rust is in Python: not an Exception."""


@cache
def _enters_or_leaves(file: str, line: int) -> bool:
    return getline(file, line).lstrip().startswith("with ")


@dataclass
class Fault:
    """An exception that waits for its place."""

    at: int  # the how many-th event; 0: never, which counts them
    error: type[BaseException]
    lines: bool = False  # count lines instead of calls
    count: int = 0
    engine: Engine | None = None  # the one it strikes
    raised: BaseException | None = None
    step: set[Any] = field(default_factory=set)  # the requests of the step that was under way
    where: list[str] = field(default_factory=list)  # file:function of all frames of the engine, the innermost first

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if self.raised is not None or not file.startswith(UNDER_TEST):
            return None
        if file == __file__ and frame.f_code.co_name not in ("run", "start", "tokens", "hear"):
            return None  # the traffic is not under test: only what plays the runner and the reader
        if event == "line" and _enters_or_leaves(file, frame.f_lineno):
            return self.trace  # Python reports it on the way out too, where a lock is not released if something raises
        if event == ("line" if self.lines else "call"):
            self.count += 1
            if self.count == self.at:
                at: FrameType | None = frame
                while at is not None:
                    if at.f_code.co_filename.startswith(UNDER_TEST):
                        self.where.append(f"{Path(at.f_code.co_filename).stem}:{at.f_code.co_name}")
                    at = at.f_back
                if self.engine is not None and (step := self.engine.scheduler._under_way) is not None:
                    self.step = {run.sequence.request for run in step.chunks}
                self.raised = self.error("injected")
                raise self.raised
        return self.trace if self.lines else None

    @contextmanager
    def armed(self) -> Iterator[None]:
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)

    @contextmanager
    def armed_in_new_threads(self) -> Iterator[None]:
        threading.settrace(self.trace)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    def inside(self, *functions: str) -> bool:
        """Whether it was raised in a call that one of these made."""
        return any(found in self.where[1:] for found in functions)


class PlayedRunner:
    """Runs steps on pages of numbers (fake_model) and gives logits; `ahead`: keeps tokens until one asks."""

    captures = 0  # graphs

    def __init__(self, engine: Engine, ahead: bool) -> None:
        self.played, self.ahead = fake_model.Runner(engine.scheduler), ahead
        self.vocabulary, self.sampled = engine.llm.model.spec.vocabulary, dict[Sequence, int]()

    def run(self, step: Step) -> torch.Tensor:
        tokens = self.played.run(step)
        logits = torch.zeros(len(tokens), self.vocabulary)
        for row, token in zip(logits, tokens, strict=True):
            row[token] = 10.0
        return logits

    def prefill_differs(self, bits: int | None) -> bool:
        return False

    def executor(self, bits: int | None) -> None:
        """No graphs are captured."""

    def starts(self, step: Step) -> bool:
        return self.ahead

    def start(self, step: Step) -> Any:
        unknown = [run.sequence for run in step.chunks if run.sequence.ids[-1] == UNKNOWN]
        for s in unknown:
            s.ids[-1] = self.sampled[s]
        found = self.run(step).argmax(-1).tolist()
        for s in unknown:
            s.ids[-1] = UNKNOWN
        self.sampled = {} if step.drafted else dict(zip(step.samples, found, strict=True))
        return Told(found)


@dataclass
class Told:
    found: list[int]

    def tokens(self) -> list[int]:
        return self.found


def played_engine(llm: LLM, *, ahead: bool = False, **options: Any) -> Engine:
    """An engine whose model is played: quick, and a wrong page anywhere changes the tokens."""
    limits = {"pages": 9, "max_batch": 6, "budget": 24, "watermark": 0, "kv": "16:page=4"}
    limits["speculate"] = "off" if ahead else "ngram:tokens=3,adaptive=false"
    engine = Engine(llm, **{**limits, **options})
    engine.runner = PlayedRunner(engine, ahead)  # type: ignore[assignment]
    return engine


@dataclass
class Asked:
    """A request and what was heard of it."""

    name: str
    handle: Handle | None = None  # None: it was refused
    events: list[Event] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        self.events.append(event)


GREEDY = Sampling(max_tokens=7)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": [1, 2, 3, 4, 1, 2, 3], "sampling": GREEDY},
    "several": {"prompt": [1, 2, 3, 4, 2, 2], "sampling": Sampling(max_tokens=5, temperature=0.7, seed=3), "n": 3},
    "text": {"prompt": "Hello", "sampling": GREEDY, "logprobs": 2},
    "stops": {"prompt": [4, 4, 2], "sampling": Sampling(max_tokens=9, stop=("\x03", "zz"))},
    "long": {"prompt": [3, 1] * 8, "sampling": Sampling(max_tokens=12)},
    "cancelled": {"prompt": [1, 2, 3, 4, 1], "sampling": Sampling(max_tokens=12), "n": 2},
    "last": {"prompt": [2, 2], "sampling": GREEDY},
}
WAVES = (("greedy", "several", "text"), ("stops", "long"), ("cancelled", "last"))
AHEAD = {name: {k: v for k, v in what.items() if k != "logprobs"} for name, what in REQUESTS.items()}
AHEAD["several"] |= {"sampling": Sampling(max_tokens=5)}


def ask(add: Callable[..., Handle], asked: Asked, requests: dict[str, dict[str, Any]], fault: Fault) -> None:
    """Add a request; one that the fault hits is refused and leaves nothing behind."""
    try:
        asked.handle = add(**requests[asked.name], on_event=asked.hear)
    except BaseException as e:
        if e is not fault.raised:
            raise


def tokens(asked: Asked) -> list[list[int]]:
    assert asked.handle is not None
    return [output.completion.tokens for output in asked.handle.outputs]


def assert_sound(engine: Engine, everyone: list[Asked], want: dict[str, list[list[int]]], fault: Fault) -> None:
    """What must hold wherever a fault struck."""
    at = f"{fault.error.__name__} at {fault.at}: {' < '.join(fault.where[:6])}"
    failed = set()
    for asked in everyone:
        if asked.handle is None:
            assert fault.inside("engine:add") or fault.where[:1] == ["engine:add"], (
                f"refused by a fault elsewhere, {at}"
            )
            continue
        handle = asked.handle
        assert handle.finished, f"'{asked.name}' has no last event, {at}"
        last = [event.index for event in asked.events if event.output is not None]
        unheard = fault.where[0] == "fault_injection:hear" or (fault.lines and fault.where[0] == "handle:put")
        if unheard:  # the event that was being heard is not in the list
            assert len(last) == len(set(last)), at
        else:
            assert sorted(last) == list(range(handle.request.n)), f"'{asked.name}' heard of {last}, {at}"
        for output, whole in zip(handle.outputs, want[asked.name], strict=True):
            got, why = output.completion.tokens, output.completion.finish_reason
            assert got == whole[: len(got)], f"'{asked.name}' got other tokens, {at}"
            assert (why == "error") == (output.error is not None), f"'{asked.name}' ended with {why}, {at}"
            if why == "error":
                failed.add(handle.request)
            elif why != "cancelled":
                assert got == whole, f"'{asked.name}' ended early with {why}, {at}"
    assert_empty(engine)
    assert engine.stopped is None, f"one fault ended the engine, {at}"
    if fault.inside("engine:add"):
        assert not failed, f"a fault in admission failed others, {at}"
    elif fault.inside("engine:_push", "engine:_hand_out", "engine:_reap", "output:sample", "handle:put"):
        assert len(failed) <= 1, f"a fault of one request failed others, {at}"
    elif fault.inside("engine:_sample") or any(f in fault.where for f in ("fault_injection:run", "fake_model:run")):
        assert failed <= fault.step, f"a fault of one step failed others, {at}"


assert VOCABULARY == 5  # the tokens that the played model gives: 0 … 4
