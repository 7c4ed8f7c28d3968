"""N-gram look-up: what followed the last tokens the last time that they stood in the prompt or the answer.

Of all places where the last token stands, those stay whose tokens before it match as well, as far as any does; of these
the latest counts. What would follow the end is repeated from the match, so that loops are guessed too.
Source: prompt lookup decoding (Saxena 2023); vLLM calls it ngram.
"""

from collections.abc import Sequence

import numpy as np

LEAST = 2  # tokens that must match
LONGEST = 16  # beyond which places are alike
_PLACES = 1024  # of the last token, the latest ones: what is looked at in a prompt that repeats one token
_FIRST = 1024  # tokens of a sequence that there is room for before the buffer grows


class NgramLookup:
    """The tokens of one sequence, to be looked up."""

    def __init__(self) -> None:
        self._ids, self._length = np.empty(_FIRST, np.int64), 0

    def propose(self, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that may follow `ids`, and how many tokens matched; ids only ever grow."""
        self._take(ids)
        known, n = self._ids[: self._length], self._length
        found, matched = np.flatnonzero(known[: n - 1] == known[n - 1])[-_PLACES:], 1
        while len(found) and matched < LONGEST:
            longer = found[found >= matched]
            longer = longer[known[longer - matched] == known[n - 1 - matched]]
            if not len(longer):
                break
            found, matched = longer, matched + 1
        if not len(found) or matched < LEAST:
            return [], 0
        after = known[found[-1] + 1 :]  # as many tokens as lie between the two places
        return np.resize(after, most).tolist(), matched

    def _take(self, ids: Sequence[int]) -> None:
        if len(ids) > len(self._ids):
            grown = np.empty(2 * len(ids), np.int64)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : len(ids)] = ids[self._length :]
        self._length = len(ids)
