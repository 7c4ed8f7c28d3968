"""A limit on the time that something may take, by a signal."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in what takes longer; Python's regular expressions look for signals too. May be nested."""

    def stop(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    begun = time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - begun), 1e-3))
