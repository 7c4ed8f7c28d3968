"""Which experts of a layer lie in slots of the GPU: those that tokens took most often lately.

    policy = SlotPolicy(experts, slots)
    policy.record(uses)                 uses [experts]: how often each was taken since the last call
    for swap in policy.swaps(most):     the best exchanges, of which `most` may begin now
        policy.begin(swap)              `out` is in no slot any more: publish that, then copy `into`
        policy.arrived(swap.slot)       the copy is there: publish it

An expert that is in no slot is read from host memory, so that every state in between is right, only slower. Uses fade:
after HALF_LIFE tokens a use counts half. Two experts change places if the difference of their uses is more than
SIGMAS standard deviations of a difference of counts, so that chance alone moves few. Plain Python and numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 512.0  # tokens
SIGMAS = 3.0
FREE = -1


@dataclass(frozen=True, slots=True)
class Swap:
    """An exchange: expert `into` is copied to `slot`, where `out` lies now (FREE: nothing)."""

    slot: int
    out: int
    into: int


class SlotPolicy:
    """The slots of one layer. At first they hold the first experts."""

    def __init__(self, experts: int, slots: int, top: int = 1) -> None:
        """top: experts that a token takes, for HALF_LIFE."""
        self.scores: NDArray[np.float64] = np.zeros(experts)
        self.holds = list(range(min(slots, experts)))  # expert of each slot; FREE while another one is copied there
        self.coming: dict[int, int] = {}  # slot: the expert that is copied there
        self._top = top

    @property
    def resident(self) -> dict[int, int]:
        """The slot of each expert that is in one."""
        return {expert: slot for slot, expert in enumerate(self.holds) if expert != FREE}

    def record(self, uses: Sequence[int] | NDArray[np.int64]) -> None:
        """Add uses of the experts."""
        found = np.asarray(uses, dtype=np.float64)
        self.scores = self.scores * 0.5 ** (found.sum() / self._top / HALF_LIFE) + found

    def swaps(self, most: int) -> list[Swap]:
        """Return up to `most` exchanges that pay, the best first."""
        resident, moving = self.resident, set(self.coming.values())
        order = np.argsort(-self.scores, kind="stable").tolist()
        into = [e for e in order if e not in resident and e not in moving][: max(0, most)]
        out = [e for e in reversed(order) if e in resident]
        found = []
        for new, old in zip(into, out, strict=False):
            a, b = float(self.scores[new]), float(self.scores[old])
            if a - b <= SIGMAS * (a + b) ** 0.5:
                break  # the next pair differs less
            found.append(Swap(resident[old], old, new))
        return found

    def begin(self, swap: Swap) -> None:
        """Take an expert out of its slot, for another one."""
        assert self.holds[swap.slot] == swap.out, "only what a slot holds leaves it"
        assert swap.slot not in self.coming, "one copy at a time goes to a slot"
        self.holds[swap.slot], self.coming[swap.slot] = FREE, swap.into

    def arrived(self, slot: int) -> int:
        """Return the expert that a slot holds from now on."""
        self.holds[slot] = self.coming.pop(slot)
        return self.holds[slot]
