"""What a caller holds of a request: its events as they come, its outputs as they finish."""

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Protocol

from crelle.engine.requests.output import Event, OnEvent, Output
from crelle.engine.requests.sequence import Request
from crelle.errors import CapacityError

_LOOK = 0.5  # seconds after which someone who waits for an event looks whether the engine still runs


class Stepper(Protocol):
    """What a handle knows of its engine."""

    stopped: BaseException | None

    @property
    def driven(self) -> bool: ...  # whether a thread of its own steps it

    def step(self) -> bool: ...


class Handle:
    """A request that was let in. Iterate over it for its events, unless it was given a callback for them."""

    def __init__(self, request: Request, on_event: OnEvent | None, engine: Stepper) -> None:
        self.request = request
        self.outputs: list[Output] = []  # as they finish; complete when `finished`
        self.failure: BaseException | None = None  # what the callback raised first; the request is cancelled then
        self._on_event, self._engine = on_event, engine
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._left = request.n  # sequences whose last event has not been taken out of it

    @property
    def finished(self) -> bool:
        return len(self.outputs) == self.request.n

    def cancel(self) -> None:
        """Ask for an end before the next step; from any thread. Every sequence still gets its last event."""
        self.request.cancel()

    def __iter__(self) -> Iterator[Event]:
        """Yield events until all n sequences are finished. An engine without a thread of its own is stepped meanwhile.

        Raises CapacityError where the engine ended and no event can come any more.
        """
        while self._left and (event := self._next()) is not None:
            self._left -= event.output is not None
            yield event

    def _next(self) -> Event | None:
        """Return the next event; None: all of them were told to the callback."""
        while True:
            driven = self._engine.driven
            try:
                return self._events.get(block=driven, timeout=_LOOK)
            except Empty:
                pass
            if self.finished and self._events.empty():
                return None
            if not driven and not self._engine.step() and self._events.empty() and not self.finished:
                why = self._engine.stopped
                raise CapacityError("the engine stopped before the request was finished" + (f": {why}" if why else ""))

    def put(self, event: Event) -> BaseException | None:
        """Take note of an event, the engine's part; return what the callback raised.

        A last event counts once: one more for the same sequence is ignored. The callback gets it whatever it raised
        before.
        """
        if event.output is not None:
            if any(output.index == event.index for output in self.outputs):
                return None
            self.outputs = sorted([*self.outputs, event.output], key=lambda output: output.index)
        if self._on_event is None:
            self._events.put(event)
        elif self.failure is None or event.output is not None:
            try:
                self._on_event(event)
            except BaseException as e:  # SystemExit, a panic of some library: it is this request's alone
                self.failure = self.failure or e
                self.cancel()
                return e
        return None
