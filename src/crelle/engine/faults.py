"""What an engine remembers of errors until its step is over: whether it must stop, and what its caller must be told.

The parts of a step that went well set plain attributes: a call could fail itself, where nothing is caught any more.

It stops after FAILED_STEPS failed runs of the model without a good one between them, after two faults in a row of its
own bookkeeping, and at once when the CUDA context is lost. A step never stops half way: the engine asks at its end.
"""

from collections.abc import Callable
from threading import Thread, current_thread

from crelle.kernels.cuda.runtime.context_errors import context_error

FAILED_STEPS = 3  # without a good one between them: the engine stops
OWN_FAULT = "a fault in the engine's own code"
_Quit = KeyboardInterrupt | SystemExit  # the user wants out: the thread that steps is told


class Faults:
    """Of one engine."""

    def __init__(self, thread: Callable[[], Thread | None]) -> None:
        """thread: the engine's own, where it has one."""
        self._thread = thread
        self.strikes = 0  # steps one after the other in which the bookkeeping failed
        self.failed_runs = 0  # of the model, since the last good one
        self.quit: BaseException | None = None  # to be raised when the step is over
        self.fatal: tuple[BaseException, str] | None = None  # why the engine stops when the step is over

    def note(self, error: BaseException) -> bool:
        """Remember what the user's own thread must be told; a thread of the engine's own goes on."""
        self.is_fatal(error)
        told = isinstance(error, _Quit) and self._thread() is not current_thread()
        if told:
            self.quit = self.quit or error
        return told

    def is_fatal(self, error: BaseException) -> bool:
        """Whether an error says that the CUDA context is lost; then the engine stops when the step is over."""
        if (name := context_error(error)) is not None:
            self.fatal = self.fatal or (error, f"the CUDA context is lost ({name})")
        return name is not None

    def run_failed(self, error: BaseException) -> None:
        """Count a run of the model that failed; a device that fails every time is gone."""
        self.failed_runs += not self.note(error)
        if self.failed_runs >= FAILED_STEPS and self.fatal is None:
            self.fatal = error, f"{FAILED_STEPS} consecutive steps failed"

    def bookkeeping_failed(self, fault: BaseException) -> None:
        """Count a step whose bookkeeping failed."""
        self.strikes += not self.note(fault)
        if self.strikes > 1:
            self.fatal = self.fatal or (fault, OWN_FAULT)
