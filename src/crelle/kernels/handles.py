"""Numbers for custom ops, which take tensors and numbers only: an op finds the object that it works with by its number.

n = number(prepared)              # once; known as long as the object lives, which its owner sees to
by_number(n, Prepared)            # inside the op
"""

import itertools
import weakref
from typing import TypeVar

from crelle.errors import UnsupportedError

Kind = TypeVar("Kind")
_numbers = itertools.count()
_objects: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def number(thing: object) -> int:
    """Return a number by which custom ops of this process find an object; the caller keeps it alive."""
    n = next(_numbers)
    _objects[n] = thing
    return n


def by_number(n: int, kind: type[Kind]) -> Kind:
    """Return the object of a number, which must be of that kind."""
    found = _objects.get(n)
    if found is None:
        raise UnsupportedError(f"weight {n} of a Crelle op is gone: its layer was deleted, or another process's")
    if not isinstance(found, kind):
        raise UnsupportedError(f"weight {n} of a Crelle op is a {type(found).__name__}, not a {kind.__name__}")
    return found
