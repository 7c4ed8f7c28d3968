"""Every error that Crelle raises on purpose, on one page.

    CrelleError                 a sentence for the user; the command line prints it and exits with code 2
    ├── FormatError             bytes on disk do not mean what they claim (truncated, altered, unknown version)
    ├── SchemeError             a scheme string, an option or an argument that makes no sense
    ├── UnsupportedError        the request is sound, but nothing here can do it; lists every reason
    ├── CapacityError           it does not fit: context, memory or disk
    ├── NumericsError           the model computed NaN or infinity: a broken checkpoint or kernel, a diverged training
    ├── ProcessError            one of several processes that work together was killed
    └── BuildError              a compiler said no: the command, where its log lies, its first error line

A message names the value that was wrong and the remedy. A parameter stands in it as Python has it, in backticks:
`rows`, `overwrite=True`. The command line prints its own option instead (crelle.cli.common.options_in_errors): --rows,
--overwrite. `assert` is for our own invariants only.
"""

from crelle.printable import printable

MAX_MESSAGE = 2500  # characters: a message may quote names of a file, and a file's names may have millions


def _shortened(message: str) -> str:
    """Return a message without its middle if it is too long: it begins with the fault and ends with the remedy."""
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[:1600]} … ({len(message):,} characters) … {message[-600:]}"


class CrelleError(Exception):
    """Base of all errors whose message is written for the person at the keyboard; it holds no control characters."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(_shortened(a)) if isinstance(a, str) else a for a in args))


class FormatError(CrelleError):
    """A file or directory is not what it claims to be."""


class SchemeError(CrelleError):
    """A scheme, option or argument that cannot be understood."""


class UnsupportedError(CrelleError):
    """Nothing installed can carry out this (sound) request."""


class CapacityError(CrelleError):
    """Context, memory or disk is too small."""


class NumericsError(CrelleError):
    """The model computed NaN or infinity where a finite value must be."""


class ProcessError(CrelleError):
    """One of several processes that work together has ended before its work did."""


class BuildError(CrelleError):
    """Compiling a kernel failed."""
