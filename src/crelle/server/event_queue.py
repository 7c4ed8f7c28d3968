"""Events on their way from the engine's thread to the event loop. Neither ever waits for the other."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from crelle.engine.engine import Handle
from crelle.engine.requests.output import Event

Item = tuple[int, Event]  # number of the prompt among those of the HTTP request, event


class EventQueue:
    """The events of one HTTP request. A reader who lags too far behind loses the request; others are not affected."""

    def __init__(self, limit: int | None, too_slow: Callable[[], None]) -> None:
        """limit: events that may wait to be read; None: no limit.  too_slow: called once, when there are more."""
        self.handles: list[Handle] = []
        self.closed = False
        self.error: BaseException | None = None  # why an event could not be delivered
        self._items, self._limit, self._too_slow = list[Item](), limit, too_slow
        self._came = asyncio.Event()

    def add(self, handle: Handle) -> None:
        """Take note of a request of the engine; from any thread. One that comes too late is cancelled."""
        self.handles.append(handle)
        if self.closed:
            handle.cancel()

    def put(self, prompt: int, event: Event) -> None:
        """Take an event in; in the loop's thread."""
        if self.closed:
            return
        self._items.append((prompt, event))
        self._came.set()
        if self._limit is not None and len(self._items) > self._limit:
            self.close()
            self._too_slow()

    def fail(self, error: BaseException) -> None:
        """Wake the reader up with an error; in the loop's thread."""
        self.error = self.error or error
        self._came.set()

    async def take(self, patience: float) -> list[Item]:
        """Return the events that came since the last call; none when `patience` seconds passed, or on an error."""
        if not self._items and self.error is None:
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
        self.closed, self._items = True, []
        for handle in self.handles:
            if not handle.finished:
                handle.cancel()


class EventBridge:
    """Batches engine events into one call_soon_threadsafe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._bag: deque[tuple[EventQueue, int, Event]] = deque()
        self._called = False

    def callback(self, queue: EventQueue, prompt: int) -> Callable[[Event], None]:
        """Return what the engine is to call, in its own thread, with each event of a prompt. It never raises."""

        def send(event: Event) -> None:
            try:
                self._send(queue, prompt, event)
            except BaseException as e:  # the engine would drop the request, and its client would wait for ever
                queue.error = queue.error or e
                with suppress(BaseException):
                    self._loop.call_soon_threadsafe(queue.fail, e)

        return send

    def _send(self, queue: EventQueue, prompt: int, event: Event) -> None:
        self._bag.append((queue, prompt, event))
        if self._called:
            return
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except BaseException:
            self._called = False  # the next event tries again
            raise

    def _deliver(self) -> None:
        self._called = False  # before looking: what comes later calls again
        while self._bag:
            queue, prompt, event = self._bag.popleft()
            try:
                queue.put(prompt, event)
            except BaseException as e:  # the events behind it are others'
                queue.fail(e)
