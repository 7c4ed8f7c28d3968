"""N-gram look-up: what followed the last tokens the last time that they stood in the prompt or the answer.

Of all places where the last two tokens stand, those stay whose tokens before them match as well, as far as any does; of
these the latest counts. What would follow the end is repeated from the match, so that loops are guessed too.
Source: prompt lookup decoding (Saxena 2023); vLLM calls it ngram.

The places of each pair of tokens are a chain, from each to the one before it, as in LZ77's hash chains: a look-up costs
a few comparisons, however long the text is, and a new token costs one entry.
"""

from collections.abc import Sequence

LEAST = 2  # tokens that must match
LONGEST = 16  # beyond which places are alike
_PLACES = 256  # of the last two tokens, the latest ones: what is looked at in a prompt that repeats a pair


class NgramLookup:
    """The tokens of one sequence, to be looked up."""

    def __init__(self) -> None:
        self._before = list[int]()  # for each token: the last place before it where the pair that it ends stands, or -1
        self._last: dict[tuple[int, int], int] = {}  # where a pair stands last

    def propose(self, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that may follow `ids`, and how many tokens matched; ids only ever grow."""
        self._take(ids)
        n, end, matched = len(ids), -1, 0
        place = self._before[-1]
        for _ in range(_PLACES):
            if place < 0:
                break
            if matched < LEAST or (place >= matched and ids[place - matched] == ids[n - 1 - matched]):
                length = _common(ids, place, n - 1)
                if length > matched:
                    end, matched = place, length
                if matched == LONGEST:
                    break
            place = self._before[place]
        if end < 0:
            return [], 0
        after = list(ids[end + 1 : end + 1 + most])  # what lies between the two places, again and again
        while len(after) < most:
            after += after[: most - len(after)]
        return after, matched

    def _take(self, ids: Sequence[int]) -> None:
        if not self._before:
            self._before.append(-1)
        for at in range(len(self._before), len(ids)):
            pair = ids[at - 1], ids[at]
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = at


def _common(ids: Sequence[int], a: int, b: int) -> int:
    """Return how many tokens that end with ids[a] are those that end with ids[b], a < b; at most LONGEST."""
    if a >= LONGEST - 1 and ids[a - LONGEST + 1 : a + 1] == ids[b - LONGEST + 1 : b + 1]:
        return LONGEST
    length = 0
    while length < LONGEST and length <= a and ids[a - length] == ids[b - length]:
        length += 1
    return length
