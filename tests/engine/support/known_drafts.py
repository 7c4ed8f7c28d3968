"""Drafts for engines under test: what a sequence's answer is known to be, with some tokens wrong."""

from collections.abc import Sequence
from zlib import crc32

import pytest

from crelle.engine.speculation.ngram import NgramLookup

ALWAYS = "ngram:tokens=3,adaptive=false"


def draft_known(
    monkeypatch: pytest.MonkeyPatch, whole: Sequence[Sequence[int]], vocabulary: int, wrong: int = 4
) -> None:
    """Let n-gram look-up propose what comes next in some whole sequences; one token in `wrong` is another."""

    def propose(self: NgramLookup, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        found = list[int]()
        rest = next((w[len(ids) :] for w in whole if list(w[: len(ids)]) == list(ids)), ())
        for at in range(most):
            luck = crc32(repr((len(ids), at, *ids[-2:])).encode())
            right = at < len(rest) and luck % wrong > 0
            found.append(rest[at] if right else luck % vocabulary)
        return found, 2

    monkeypatch.setattr(NgramLookup, "propose", propose)
