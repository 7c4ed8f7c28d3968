"""Packs prefills into varlen attention calls.

    pack_prefills([(0, 100), (3000, 24), (0, 900)], most=4096)      (tokens before, new tokens) of each prompt, in order

A call reads the keys and values of all tokens that its prompts have, dequantized; `most` bounds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """Prompts that attend in one call; `new` and `all` are its cu_seqlens of queries and of keys."""

    prompts: slice
    rows: slice  # their new tokens among those of all prompts
    new: list[int]  # where the new tokens of each begin in the call, and at last how many there are
    all: list[int]  # the same of all its tokens, those of earlier passes first

    @property
    def longest_new(self) -> int:
        return max(end - begin for begin, end in pairwise(self.new))

    @property
    def longest(self) -> int:
        return max(end - begin for begin, end in pairwise(self.all))


def pack_prefills(lengths: Sequence[tuple[int, int]], most: int) -> list[VarlenBatch]:
    """Group prompts in order; a group has at most `most` tokens, or one prompt."""
    found, at, row = list[VarlenBatch](), 0, 0
    while at < len(lengths):
        new, all_ = [0], [0]
        for before, more in lengths[at:]:
            if len(new) > 1 and all_[-1] + before + more > most:
                break
            new.append(new[-1] + more)
            all_.append(all_[-1] + before + more)
        some = VarlenBatch(slice(at, at + len(new) - 1), slice(row, row + new[-1]), new, all_)
        found.append(some)
        at, row = some.prompts.stop, some.rows.stop
    return found
