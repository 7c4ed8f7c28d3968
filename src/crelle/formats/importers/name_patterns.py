r"""Patterns for names of modules, as compressed-tensors has them after `re:`, matched in time linear in the name.

The language is the part of Python's regular expressions that such files use:

    characters, `\.` and other escaped punctuation      `.`  `\d`  `\w`  `\s`  `[a-z_]`  `[^.]`
    `x*`  `x+`  `x?`  `x{2}`  `x{2,5}` (up to 100; a `?` behind them changes nothing here)
    `(ab|c)`  `(?:ab|c)`  `^`  `$`

Python's own matcher tries one way after the other, and some patterns have exponentially many; here all ways are
followed at once. Like `re.match`, a pattern must fit the beginning of a name. Everything else (look-ahead, back
references, flags) is refused.
"""

import string
from collections.abc import Callable
from functools import lru_cache

from crelle.errors import UnsupportedError

MAX_PATTERN, MAX_STATES, _MAX_REPEAT, _MAX_DEPTH = 1000, 4000, 100, 30
MAX_WORK = 15_000_000  # states that all patterns of a directory may visit, some seconds; real ones visit thousands
Test = Callable[[str], bool]
_CLASSES: dict[str, Test] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}


class NamePattern:
    """A pattern as a nondeterministic automaton: of each state, what it reads and where it leads without reading."""

    def __init__(self, pattern: str, work: list[int] | None = None) -> None:
        """work: what is left of MAX_WORK, in a list that patterns share."""
        self.pattern, self._work = pattern, [MAX_WORK] if work is None else work
        if len(pattern) > MAX_PATTERN:
            raise UnsupportedError(
                f"a pattern may have at most {MAX_PATTERN} characters, this one has {len(pattern):,}"
            )
        self._at, self._depth = 0, 0
        self._reads: list[tuple[Test, int] | None] = []
        self._skips: list[list[int]] = []
        self._anchors: dict[int, str] = {}  # states that are passed only at the beginning or end of the name
        self._start, self._final = self._alternatives()
        if self._at < len(pattern):
            raise self._refused(f"'{pattern[self._at]}' at position {self._at + 1} closes no group")
        self.match = lru_cache(maxsize=4096)(self._match)

    def _refused(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"the pattern '{self.pattern[:100]}' cannot be read: {why}")

    # Building: each method returns the first and the last state of what it read.

    def _state(self) -> int:
        if len(self._skips) >= MAX_STATES:
            raise self._refused(f"its repeats need more than {MAX_STATES} states")
        self._reads.append(None)
        self._skips.append([])
        return len(self._skips) - 1

    def _peek(self) -> str:
        return self.pattern[self._at : self._at + 1]

    def _alternatives(self) -> tuple[int, int]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._refused(f"it nests more than {_MAX_DEPTH} groups")
        first, last = self._state(), self._state()
        while True:
            begin, end = self._sequence()
            self._skips[first].append(begin)
            self._skips[end].append(last)
            if self._peek() != "|":
                break
            self._at += 1
        self._depth -= 1
        return first, last

    def _sequence(self) -> tuple[int, int]:
        first = last = self._state()
        while self._peek() not in ("", "|", ")"):
            begin, end = self._repeated()
            self._skips[last].append(begin)
            last = end
        return first, last

    def _repeated(self) -> tuple[int, int]:
        began = self._at
        piece = self._atom()
        low, high = self._count()
        if (low, high) == (1, 1):
            return piece
        ended, first = self._at, self._state()
        last, made = first, 0
        while made < max(low, high or 1):
            self._at = began
            begin, end = self._atom() if made else piece  # a further copy is read anew
            self._skips[last].append(begin)
            after = self._state()
            self._skips[end].append(after)
            if high is None and made >= low - 1:
                self._skips[after].append(begin)
            if made >= low:
                self._skips[last].append(after)  # this copy may be left out
            last, made = after, made + 1
        self._at = ended
        return first, last

    def _count(self) -> tuple[int, int | None]:
        """Read how often the piece before is repeated; None: without end."""
        sign = self._peek()
        if sign in ("*", "+", "?") and sign:
            self._at += 1
            found: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif sign == "{":
            end = self.pattern.find("}", self._at)
            low, comma, high = self.pattern[self._at + 1 : max(end, self._at)].partition(",")
            digits = set(low + high) <= set(string.digits) and len(low) < 4 and len(high) < 4
            if not digits or not low or end < 0:
                raise self._refused("'{' should begin a count such as {2} or {2,5}")
            most = (int(high) if high else None) if comma else int(low)
            if max(int(low), most or 0) > _MAX_REPEAT or (most is not None and most < int(low)) or most == 0:
                raise self._refused(f"a count must ascend and be at most {_MAX_REPEAT}")
            self._at, found = end + 1, (int(low), most)
        else:
            return 1, 1
        if self._peek() == "?":
            self._at += 1
        if self._peek() in ("*", "+", "{", "?") and self._peek():
            raise self._refused("it repeats a repeat")
        return found

    def _atom(self) -> tuple[int, int]:
        c = self._peek()
        self._at += 1
        if c == "(":
            return self._group()
        if c and c in "^$":
            state = self._state()
            self._anchors[state] = c
            after = self._state()
            self._skips[state].append(after)
            return state, after
        if c in ("*", "+", "?", "{", ""):
            raise self._refused(f"'{c}' repeats nothing")
        return self._reading(self._test(c))

    def _group(self) -> tuple[int, int]:
        if self._peek() == "?":
            if self.pattern[self._at : self._at + 2] != "?:":
                raise self._refused(
                    "look-ahead, flags and named groups are not supported (docs/guide/import-export.md)"
                )
            self._at += 2
        found = self._alternatives()
        if self._peek() != ")":
            raise self._refused("a group is not closed")
        self._at += 1
        return found

    def _reading(self, test: Test) -> tuple[int, int]:
        first, last = self._state(), self._state()
        self._reads[first] = (test, last)
        return first, last

    def _test(self, c: str) -> Test:
        if c == ".":
            return lambda x: x != "\n"
        if c == "[":
            return self._class()
        if c == "\\":
            return self._escaped()
        return lambda x: x == c

    def _escaped(self) -> Test:
        c = self._peek()
        self._at += 1
        if c in _CLASSES:
            return _CLASSES[c]
        if c.lower() in _CLASSES and c:
            inner = _CLASSES[c.lower()]
            return lambda x: not inner(x)
        if not c or c.isalnum():
            raise self._refused(f"'\\{c}' is not supported (docs/guide/import-export.md)")
        return lambda x: x == c

    def _class(self) -> Test:
        negated = self._peek() == "^"
        self._at += negated
        tests: list[Test] = []
        first = True
        while (c := self._peek()) != "]" or first:
            if not c or c == "[":
                raise self._refused("a class such as [a-z] is not closed")
            self._at += 1
            first = False
            if c == "\\":
                tests.append(self._escaped())
            elif self._peek() == "-" and self.pattern[self._at + 1 : self._at + 2] not in ("", "]", "\\"):
                top = self.pattern[self._at + 1]
                self._at += 2
                if top < c:
                    raise self._refused(f"the range {c}-{top} is descending")
                tests.append(lambda x, low=c, top=top: low <= x <= top)  # type: ignore[misc]
            else:
                tests.append(lambda x, c=c: x == c)  # type: ignore[misc]
        self._at += 1
        return lambda x: any(t(x) for t in tests) != negated

    # Matching: all states that the name so far can lead to, character by character.

    def _match(self, name: str) -> bool:
        states = self._closure(frozenset({self._start}), True, not name)
        for i, c in enumerate(name, start=1):
            if self._final in states:
                return True
            read = frozenset(r[1] for s in states if (r := self._reads[s]) is not None and r[0](c))
            if not read:
                return False
            states = self._closure(read, False, i == len(name))
        return self._final in states

    def _closure(self, states: frozenset[int], begins: bool, ends: bool) -> frozenset[int]:
        found = _closure_of(self, states, begins, ends)
        self._work[0] -= len(found)
        if self._work[0] < 0:
            raise self._refused("matching it against all tensor names takes too long")
        return found

    def follow(self, states: frozenset[int], begins: bool, ends: bool) -> frozenset[int]:
        """Return where these states lead without reading: at the beginning of a name, at its end or between."""
        shut = [anchor for anchor, open_here in (("^", begins), ("$", ends)) if not open_here]
        found, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            if self._anchors.get(state) in shut:
                continue
            for following in self._skips[state]:
                if following not in found:
                    found.add(following)
                    waiting.append(following)
        return frozenset(found)


@lru_cache(maxsize=256)  # few, as a set of states may be large; the same sets come back for name after name
def _closure_of(pattern: NamePattern, states: frozenset[int], begins: bool, ends: bool) -> frozenset[int]:
    return pattern.follow(states, begins, ends)
