"""Untrusted text for a terminal: names in a model's files may hold escape sequences, which a terminal would obey."""

import re

# Control characters but for line feed and tab, overrides of the writing direction, and halves of surrogate pairs.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return text with a visible sign of one column in place of each character that a terminal would act upon."""
    return CONTROL.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"
