"""Changes to inputs of the fuzzer: bytes or JSON values, broken, grown, and edited so that they stay consistent.

    broken       bytes cut, flipped and copied; values of other types; keys lost and renamed
    numbers      near those that the input holds, powers of two, 10^7 to 10^18, products, negative, integers as floats;
                 inside strings too: `group=99999999999`, `layers.0-99999999999`, 400 digits
    growth       lists, strings and parts of bytes repeated 2^k times; a value nested 2^k deep
    crossover    a part of another input, under the same key if there is one
    consistent   one number changed wherever it stands, or two numbers by the same factor: a check that two fields
                 agree passes, and what comes after it is reached

An input never has more than MAX_SIZE bytes or MAX_VALUES values, nor more than MAX_DEPTH levels.
"""

import marshal
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 127, 255, 256, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
NUMBERS += [10**7, 10**9, 10**12, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**15]
ODD: list[Any] = [None, True, False, -1, *NUMBERS, -(2**63), 10**400, 0.5, -0.0, 1e-30, 1e308, "", "x", "0", "x" * 999]
ODD += ["\x00", "\ud800", "é" * 50, "../../x", "/dev/zero", "re:(a+)+$", "{{ 9**9 }}", [], {}, [[]], [0], {"a": None}]
MAX_SIZE, MAX_VALUES, MAX_DEPTH = 1 << 18, 1 << 14, 300
_DIGITS, _DIGIT_BYTES = re.compile(r"\d+"), re.compile(rb"\d+")

Place = tuple[Any, Any]  # a list or an object, and an index or a key in it


def changed(random: Random, corpus: list[Any], words: list[Any]) -> Any:
    """Return an input of the corpus with one to seven changes."""
    # Half of the time one of the newest: what was reached last is where the next branch is.
    value = random.choice(corpus[-8:] if random.random() < 0.5 else corpus)
    for _ in range(1 + min(int(random.expovariate(0.7)), 6)):
        if isinstance(value, bytes):
            value = _change_bytes(random, value, corpus, words)[:MAX_SIZE]
        else:
            value = _change_json(random, copied(value), corpus, words)
    return value


def copied(value: Any) -> Any:
    """Return a copy of a JSON value; copy.deepcopy takes thirty times as long."""
    return marshal.loads(marshal.dumps(value, 2))  # later versions would keep shared parts shared


def number(random: Random, held: list[int]) -> Any:
    """Return a number: one near those that an input holds, or far above them."""
    near = random.choice(held) if held else random.choice(NUMBERS)
    match random.randrange(9):
        case 0:
            return near + random.choice([-2, -1, 1, 2])
        case 1:
            return near * random.choice([2, 3, 10, 1000, 2**10, 2**16, 2**20, -1])
        case 2:
            return near // random.choice([2, 3, 10])
        case 3:
            return near * random.choice(held) if held else near
        case 4:
            return 2 ** random.randrange(70) + random.choice([-1, 0, 0, 1])
        case 5:
            return random.randrange(1, 10) * 10 ** random.randrange(7, 19)
        case 6:
            return float(near) if abs(near) < 2**60 else 1e18
        case 7:
            return -random.choice(NUMBERS)
        case _:
            return random.choice([*NUMBERS, *NUMBERS, 10**400])


# Bytes ---------------------------------------------------------------------------------------------------------------


def _change_bytes(random: Random, data: bytes, corpus: list[Any], words: list[Any]) -> bytes:
    at = random.randrange(len(data) + 1)
    match random.randrange(13):
        case 0:
            return data[:at]
        case 1 | 2 if at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case 3:
            n = random.choice([1, 4, 8, 8])
            return data[:at] + _packed(random, len(data), n) + data[at + n :]
        case 4:
            return data[:at] + random.randbytes(random.randrange(1, 9)) + data[at:]
        case 5:
            return data[:at] + data[at + random.randrange(1, 17) :]
        case 6:
            begin = random.randrange(len(data) + 1)
            return data[:at] + data[begin : begin + random.randrange(1, 65)] + data[at:]
        case 7:
            other = random.choice(corpus)
            return data[:at] + other[random.randrange(len(other) + 1) :]
        case 8:  # the same integer wherever it stands
            n = random.choice([4, 8])
            if (old := data[at : at + n]).strip(b"\0"):
                return data.replace(old, _packed(random, len(data), n))
        case 9 | 10 if found := _some(random, list(_DIGIT_BYTES.finditer(data))):
            held = [int(found[0][:20])]
            new = str(number(random, [*held, len(data)])).encode()
            if random.random() < 0.5:
                return re.sub(rb"(?<!\d)" + found[0] + rb"(?!\d)", new, data)
            return data[: found.start()] + new + data[found.end() :]
        case 11:
            part = data[at : at + random.choice([1, 1, 8, 64, 512])]
            return data[:at] + part * min(2 ** random.randrange(1, 17), MAX_SIZE // max(1, len(part))) + data[at:]
    word = random.choice([w for w in words if isinstance(w, str)]).encode("utf-8", "replace")
    return data[:at] + word + data[at + random.choice([0, len(word)]) :]


def _packed(random: Random, held: int, size: int) -> bytes:
    return struct.pack("<Q", int(number(random, [held, held // 4, held // 8])) & (2**64 - 1))[:size]


# JSON ----------------------------------------------------------------------------------------------------------------


def _change_json(random: Random, value: Any, corpus: list[Any], words: list[Any]) -> Any:
    places = _places(value)
    if not places:
        return copied(random.choice(words))
    _CHANGES[random.randrange(len(_CHANGES))](random, places, corpus, words)
    return value


def _delete(random: Random, places: list[Place], _: list[Any], __: list[Any]) -> None:
    holder, key = random.choice(places)
    del holder[key]


def _rename(random: Random, places: list[Place], _: list[Any], words: list[Any]) -> None:
    holder, key = random.choice(places)
    if type(holder) is dict:
        holder[random.choice([w for w in words if isinstance(w, str)])] = holder[key]
    else:
        holder[key] = copied(random.choice(words))


def _replace(random: Random, places: list[Place], _: list[Any], words: list[Any]) -> None:
    holder, key = random.choice(places)
    holder[key] = copied(random.choice(words))


def _cross(random: Random, places: list[Place], corpus: list[Any], _: list[Any]) -> None:
    """Take a part of another input: half of the time the one of the same name."""
    holder, key = random.choice(places)
    theirs = _places(random.choice(corpus))
    if random.random() < 0.5 and type(key) is str:
        theirs = [(h, k) for h, k in theirs if k == key and type(h) is dict] or theirs
    if theirs and len(places) + len(theirs) < MAX_VALUES:
        other, name = random.choice(theirs)
        holder[key] = _fitting(copied(other[name]), holder[key])


def _wrap(random: Random, places: list[Place], _: list[Any], __: list[Any]) -> None:
    """Nest a value 2^k deep, in a list, an object, or an object like the one that holds it."""
    holder, key = random.choice(places)
    old, kind = holder[key], random.randrange(4)
    if kind == 3:
        holder[key] = str(old)[:2000] if type(old) in (int, float, str, bool) else "{}"
        return
    alike = type(holder) is dict and type(old) is dict and kind == 2 and len(holder) < 20
    new, each = old, 1 + len(_places(holder) if alike else ())
    for _ in range(min(2 ** random.choice([0, 0, 0, 1, 2, 5, 8]), max(1, (MAX_VALUES - len(places)) // each))):
        new = {**holder, key: new} if alike else {"a": new} if kind == 1 else [new]
    holder[key] = _fitting(copied(new), old)


def _number(random: Random, places: list[Place], _: list[Any], __: list[Any]) -> None:
    numbers = [(h, k) for h, k in places if type(h[k]) is int]
    if place := _some(random, numbers):
        held = [h[k] for h, k in numbers if abs(h[k]) < 2**64]
        held += [len(h) for h, _ in places[:8]]
        place[0][place[1]] = number(random, held)


def _consistent(random: Random, places: list[Place], _: list[Any], __: list[Any]) -> None:
    """Change numbers together: equal ones alike, or a few by one factor."""
    numbers = [(h, k) for h, k in places if type(h[k]) is int and 0 < h[k] < 2**64]
    if not numbers:
        return
    holder, key = random.choice(numbers)
    old = holder[key]
    match random.randrange(4):
        case 0:  # wherever it stands
            new = number(random, [old])
            for h, k in numbers:
                if h[k] == old:
                    h[k] = new
        case 1:  # two or three of them by one factor: their ratios stay
            factor = random.choice([2, 3, 5, 2**10, 2**20, 10**6, 10**9])
            for h, k in {id(p[0]) ^ hash(p[1]): p for p in [(holder, key), *random.choices(numbers, k=2)]}.values():
                h[k] *= factor
        case 2:  # one up and another down: their product stays
            other, name = random.choice(numbers)
            if other[name] > 1 and (other is not holder or name != key):
                holder[key], other[name] = old * other[name], 1
        case _:  # two get the same value
            other, name = random.choice(numbers)
            other[name] = holder[key] = number(random, [old, other[name]])


def _string(random: Random, places: list[Place], _: list[Any], words: list[Any]) -> None:
    if place := _some(random, [(h, k) for h, k in places if type(h[k]) is str]):
        place[0][place[1]] = text(random, place[0][place[1]], words)


def _repeat(random: Random, places: list[Place], _: list[Any], __: list[Any]) -> None:
    """Repeat a list, or one of its entries: a step that doubles something, many times in a row."""
    lists = [(h, k) for h, k in places if type(h[k]) is list and h[k]]
    if not (place := _some(random, lists)):
        return
    old = place[0][place[1]]
    times = 2 ** random.choice([0, 0, 1, 2, 4, 5, 8, 12])
    part = [random.choice(old)] if random.random() < 0.7 else old
    each = 1 + len(_places(part))
    place[0][place[1]] = old + copied(part * max(0, min(times, (MAX_VALUES - len(places)) // each)))


_CHANGES: list[Callable[[Random, list[Place], list[Any], list[Any]], None]] = [
    _delete,
    _rename,
    _replace,
    _replace,
    _cross,
    _wrap,
    _number,
    _number,
    _consistent,
    _string,
    _string,
    _repeat,
]


def _places(value: Any) -> list[Place]:
    """Return where a JSON value holds others, level by level."""
    found: list[Place] = []
    level = [value] if type(value) in (dict, list) else []
    while level:
        here = [(h, k) for h in level for k in (list(h) if type(h) is dict else range(len(h)))]
        found += here
        level = [h[k] for h, k in here if type(h[k]) in (dict, list)]
    return found


def _fitting(new: Any, old: Any) -> Any:
    """Return the new value, or the old one if the new one is too deep."""
    depth, level = 0, [new]
    while level and depth <= MAX_DEPTH:
        level = [v for h in level if type(h) in (dict, list) for v in (h.values() if type(h) is dict else h)]
        depth += 1
    return new if depth <= MAX_DEPTH else old


def _some(random: Random, found: list[Any]) -> Any:
    return random.choice(found) if found else None


# Strings -------------------------------------------------------------------------------------------------------------


def text(random: Random, old: str, words: list[Any]) -> str:
    """Return a string with one change."""
    at, end = sorted(random.randrange(len(old) + 1) for _ in range(2))
    match random.randrange(9):
        case 0:
            return old[:at] + old[end:]
        case 1 | 2 if place := _some(random, list(_DIGITS.finditer(old))):
            new = str(number(random, [int(place[0][:20]), len(old)]))
            if random.random() < 0.3:  # a range, from or to here
                new = random.choice([f"{place[0]}-{new}", f"{new}-{place[0]}", f"0-{new}"])
            return old[: place.start()] + new + old[place.end() :]
        case 3:
            return old[:end] + old[at:]
        case 4:
            return old[:at] + chr(random.choice([0, 10, 32, 37, 42, 43, 92, 123, 125, 0x3B1, 0x1F600])) + old[end:]
        case 5:  # a repeated part, e.g. the last field of a scheme
            part = old[at:end] or old[-8:]
            return (old[:end] + part * min(2 ** random.randrange(1, 14), MAX_SIZE // 4 // max(1, len(part))))[:MAX_SIZE]
        case 6:
            return f"{old[:at]}{random.choice([',', ':', '=', ''])}{number(random, [len(old)])}{old[at:]}"
        case _:
            return old[:at] + random.choice([w for w in words if isinstance(w, str)]) + old[at:]
