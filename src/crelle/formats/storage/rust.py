"""A panic of a Rust library arrives as a BaseException, which no `except Exception` stops."""

from collections.abc import Iterator
from contextlib import contextmanager

from crelle.errors import FormatError


@contextmanager
def panics_are(sentence: str) -> Iterator[None]:
    """Turn a panic within the block into a FormatError that begins with a sentence."""
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise FormatError(f"{sentence} ({e})") from e
