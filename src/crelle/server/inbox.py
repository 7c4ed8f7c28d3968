"""Events on their way from the engine's thread to the event loop. Neither ever waits for the other."""

import asyncio
from collections import deque
from collections.abc import Callable

from crelle.engine.engine import Handle
from crelle.engine.output import Event

Item = tuple[int, Event]  # number of the prompt among those of the HTTP request, event


class Inbox:
    """The events of one HTTP request. A reader who lags too far behind loses the request, nobody else notices."""

    def __init__(self, limit: int | None, too_slow: Callable[[], None]) -> None:
        """limit: events that may wait to be read; None: any number.  too_slow: called once, when there are more."""
        self.handles: list[Handle] = []
        self._items, self._limit, self._too_slow = list[Item](), limit, too_slow
        self._came = asyncio.Event()
        self._closed = False

    def put(self, prompt: int, event: Event) -> None:
        """Take an event in; in the loop's thread."""
        if self._closed:
            return
        self._items.append((prompt, event))
        self._came.set()
        if self._limit is not None and len(self._items) > self._limit:
            self.close()
            self._too_slow()

    async def take(self, patience: float) -> list[Item]:
        """Return all events that came since the last call, at least one; none when `patience` seconds passed."""
        if not self._items:
            try:
                async with asyncio.timeout(patience):
                    await self._came.wait()
            except TimeoutError:
                return []
        self._came.clear()
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """End what still runs; later events are dropped."""
        self._closed, self._items = True, []
        for handle in self.handles:
            if not handle.finished:
                handle.cancel()


class Post:
    """Carries events over: one call into the loop for all that come before it wakes up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._bag: deque[tuple[Inbox, int, Event]] = deque()
        self._called = False

    def callback(self, inbox: Inbox, prompt: int) -> Callable[[Event], None]:
        """Return what the engine is to call, in its own thread, with each event of a prompt."""

        def send(event: Event) -> None:
            self._bag.append((inbox, prompt, event))
            if not self._called:
                self._called = True
                self._loop.call_soon_threadsafe(self._deliver)

        return send

    def _deliver(self) -> None:
        self._called = False  # before looking: what comes later calls again
        while self._bag:
            inbox, prompt, event = self._bag.popleft()
            inbox.put(prompt, event)
