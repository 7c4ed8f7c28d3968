"""How much longer a tokenizer may make a text: a bound from its file, before any text is encoded.

A normalizer or decoder may replace text by longer text, and a file may chain any number of them: replacing "a" by "aa"
29 times turns one letter into 2^29. The factors of all steps are multiplied. Steps whose growth Unicode limits (NFKC,
bytes as characters, …) count from the second one of their kind on: most change nothing in their own output, unless a
replacement came in between.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 64  # characters that one may become; 36 in T5's and XLM-R's: U+FDFA is 18, and runs of spaces are replaced
MAX_TEMPLATE_TOKENS = 1 << 10  # that a post-processor puts around a text
_STEPS = ("normalizers", "pretokenizers", "decoders", "processors")  # what a sequence calls its parts
_UNICODE: dict[str, tuple[str, float]] = {  # kind and most characters for one
    "NFKC": ("compatibility", 18),
    "NFKD": ("compatibility", 18),
    "NFC": ("canonical", 4),
    "NFD": ("canonical", 4),
    "Lowercase": ("case", 3),
    "BertNormalizer": ("bert", 12),
    "ByteLevel": ("bytes", 4),
    "BPEDecoder": ("decoder", 2),
    "CTC": ("decoder", 2),
    "WordPiece": ("decoder", 2),
}
_ASSERTS = re.compile(r"\(\?(?!:)|\\[bBAZzGKyY]|(?<!\[)\^|\$")  # may match between characters


def growth(*parts: Any) -> float:
    """Return how many characters one may become in steps that follow each other, given as their JSON; None: no step."""
    factor, seen = 1.0, set[str]()
    for step in _flat(parts):
        kind, most = _UNICODE.get(str(step.get("type")), ("", _factor(step)))
        factor *= most if kind in seen or not kind else 1.0
        seen |= {kind} - {""}
    return factor


def template_tokens(part: Any) -> int:
    """Return how many tokens a post-processor adds to a text."""
    count = 0
    for step in _flat([part]):
        known: dict[str, Any] = step.get("special_tokens") or {}
        for piece in step.get("single") or ():
            if "SpecialToken" in piece:
                count += len(known.get(piece["SpecialToken"]["id"], {}).get("ids", ()))
    return count


def _flat(parts: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of sequences, and of sequences in them, in order."""
    for part in parts:
        if isinstance(part, dict):
            inner = next((part[name] for name in _STEPS if isinstance(part.get(name), list)), None)
            yield from [part] if inner is None else _flat(inner)


def _factor(step: dict[str, Any]) -> float:
    match step.get("type"):
        case "Replace":
            return max(1.0, _replaced(step["pattern"], len(step["content"])))
        case "Prepend":
            return 1.0 + len(step["prepend"])  # to every stretch between added tokens, of one character at least
        case "Precompiled":
            return max(1.0, _longest_string(step["precompiled_charsmap"]))
    return 1.0


def _replaced(pattern: dict[str, str], content: int) -> float:
    if text := pattern.get("String"):
        return content / len(text)
    regex = pattern.get("Regex", "")
    return content if regex and not _matches_nothing(regex) else 1.0 + content


def _matches_nothing(regex: str) -> bool:
    """Tell whether an expression may match the empty string, which is found between any two characters."""
    if _ASSERTS.search(regex):
        return True
    from tokenizers import Regex
    from tokenizers.normalizers import Replace

    found: str = Replace(Regex(f"(?:{regex})(?=\x01)"), "found").normalize_str("\x01")
    return found != "\x01"


def _longest_string(charsmap: str) -> int:
    """Return the characters of the longest replacement in SentencePiece's table: a trie, then strings that end in 0."""
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):  # the library would have refused it
        return 1
    strings = data[4 + int.from_bytes(data[:4], "little") :]
    longest = max(strings.split(b"\0"), key=len)
    return len(longest.decode(errors="replace"))
