"""Which experts get slots: random uses, copies that take their time, and the promises of SlotPolicy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crelle.kernels.cuda.experts.slots import FREE, HALF_LIFE, SlotPolicy, Swap


@given(st.data(), st.integers(1, 40), st.integers(0, 40))
def test_every_expert_has_one_place_whatever_happens(data: st.DataObject, experts: int, slots: int) -> None:
    policy = SlotPolicy(experts, slots)
    for _ in range(data.draw(st.integers(1, 12))):
        policy.record(data.draw(st.lists(st.integers(0, 60), min_size=experts, max_size=experts)))
        most = data.draw(st.integers(0, 5))
        resident, coming = policy.resident, dict(policy.coming)
        swaps = policy.swaps(most)
        assert len(swaps) <= most
        for swap in swaps:
            assert resident[swap.out] == swap.slot
            assert swap.slot not in coming  # no copy goes to a slot that another one is written to
            assert swap.into not in resident
            assert swap.into not in coming.values()
            assert policy.scores[swap.into] > policy.scores[swap.out]
            policy.begin(swap)
        assert not {s.out for s in swaps} & set(policy.resident)  # gone before its slot is written
        for slot in [s for s in policy.coming if data.draw(st.booleans())]:
            expert = policy.coming[slot]
            assert policy.arrived(slot) == expert
            assert policy.resident[expert] == slot
        held = [e for e in policy.holds if e != FREE]
        assert len(set(held)) == len(held)
        assert not set(held) & set(policy.coming.values())
        assert len(held) + len(policy.coming) == min(experts, slots)


def test_the_experts_that_are_taken_most_end_in_slots() -> None:
    random, policy = np.random.default_rng(0), SlotPolicy(64, 16, 4)
    order = random.permutation(64)
    chance = 1 / (1 + np.arange(64.0))
    chance /= chance.sum()
    for _ in range(60):
        uses = np.zeros(64, np.int64)
        np.add.at(uses, order[random.choice(64, 256, p=chance)], 1)
        policy.record(uses)
        for swap in policy.swaps(4):
            policy.begin(swap)
            policy.arrived(swap.slot)
    assert set(order[:8].tolist()) <= set(policy.resident)
    held = sum(chance[np.flatnonzero(order == e)[0]] for e in policy.resident)
    assert held > 0.95 * chance[:16].sum()


def test_equal_experts_hardly_change_places() -> None:
    random, policy, swapped = np.random.default_rng(1), SlotPolicy(128, 32, 8), 0
    for _ in range(200):
        policy.record(np.bincount(random.integers(0, 128, 64), minlength=128))
        for swap in policy.swaps(8):
            policy.begin(swap)
            policy.arrived(swap.slot)
            swapped += 1
    assert swapped < 40  # 12800 uses, three quarters of which were read over PCIe


def test_uses_fade() -> None:
    policy = SlotPolicy(4, 1, 2)
    policy.record([100, 0, 0, 0])
    policy.record([0, int(2 * HALF_LIFE), 0, 0])  # HALF_LIFE tokens of two experts each
    assert policy.scores.tolist() == [50, 2 * HALF_LIFE, 0, 0]
    assert policy.swaps(3) == [Swap(0, 0, 1)]


def test_what_no_slot_holds_cannot_leave_it() -> None:
    policy = SlotPolicy(4, 2)
    with pytest.raises(AssertionError, match="leaves it"):
        policy.begin(Swap(0, 3, 2))
