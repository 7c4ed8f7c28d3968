"""An engine in a thread of its own."""

from threading import Event as Flag
from threading import Lock, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self

from crelle.engine.engine import Engine
from crelle.engine.loaded_model import Prompt
from crelle.engine.requests.handle import Handle
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError


class AsyncEngine:
    """An engine in a thread of its own. Requests come from any thread; slow readers never hold up a step.

    with AsyncEngine(Engine(llm)) as engine:
        for event in engine.submit("Once upon a time"):
            print(event.text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._closing = False
        self._began: float | None = None  # when the step that runs now did
        self._gate, self._work = Lock(), Flag()
        self._thread = Thread(target=self._loop, name="crelle-engine", daemon=True)
        engine.thread, engine.on_work = self._thread, self._work.set
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What ended the engine before its time."""
        return self.engine.stopped

    @property
    def stop_reason(self) -> str | None:
        """The same in words, for anyone: without what an exception quotes."""
        return self.engine.stop_reason

    @property
    def step_seconds(self) -> float:
        """How long the step that runs now has taken; a device that hangs never ends it."""
        began = self._began
        return 0.0 if began is None else monotonic() - began

    def submit(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> Handle:
        """Queue a request (options: those of Engine.add); iterate over what is returned, or give `on_event`."""
        with self._gate:
            if self._closing:
                raise CapacityError("the engine is shutting down and accepts no more requests")
            return self.engine.add(prompt, sampling, **options)

    def close(self, *, finish: bool = True, timeout: float | None = None) -> None:
        """Take no more requests; finish what runs (at most `timeout` seconds), cancel the rest, end the thread."""
        with self._gate:
            self._closing = True
        if not finish:
            self.engine.cancel_all()
        self._work.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.engine.cancel_all()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(finish=kind is None)

    def _loop(self) -> None:
        strikes = 0
        while True:
            closing = self._closing  # before looking for work: what came before it was set is found
            try:
                self._work.clear()  # so too: what comes later sets it again
                self._began = monotonic()
                worked = self.engine.step()
                strikes = 0
            except BaseException as e:  # a mistake of ours: no caller may wait for ever
                worked, strikes = True, strikes + 1
                if strikes > 1:
                    self.engine.stop(e)
            self._began = None
            if self.engine.stopped is not None or (closing and not worked):
                return
            if not worked:
                self._work.wait()
