"""A sequence knows when its text ends, and its seed is its own."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crelle.engine.block_manager import BlockManager
from crelle.engine.requests.sequence import Request, Sequence, State
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import SchemeError


def request(**options: Any) -> Request:
    usual: dict[str, Any] = {"prompt": (5, 6, 7), "sampling": Sampling(seed=11)}
    return Request(**usual | options)


def sequence(index: int = 0, limit: int = 8, **options: Any) -> Sequence:
    return Sequence(request(**options), index, limit, BlockManager(4, 4).table(None))


def test_limit_ends_the_text_with_the_token_that_reaches_it() -> None:
    s = sequence(limit=5)
    assert [s.push(8), s.push(9)] == [None, "length"]
    assert (s.new, s.ids) == ([8, 9], [5, 6, 7, 8, 9])


def test_end_token_ends_the_text_and_is_no_part_of_it() -> None:
    s = sequence(end_ids=frozenset({2, 3}))
    assert [s.push(8), s.push(3)] == [None, "stop"]
    assert s.new == [8]


def test_end_token_in_the_prompt_ends_nothing() -> None:
    s = sequence(prompt=(3, 3), end_ids=frozenset({3}))
    assert s.push(8) is None


def test_fresh_sequence_waits_and_has_its_whole_prompt_to_run() -> None:
    s = sequence()
    assert (s.state, s.finished, s.computed, s.remaining, s.new) == (State.WAITING, False, 0, 3, [])


def test_first_text_has_the_seed_of_the_request_and_the_others_have_their_own() -> None:
    seeds = [sequence(i, n=50).seed for i in range(50)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 50
    assert seeds == [sequence(i, n=50).seed for i in range(50)]


@given(st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_every_seed_is_one_that_sampling_accepts(seed: int, index: int) -> None:
    Sampling(seed=sequence(index, sampling=Sampling(seed=seed)).seed)


def test_without_a_seed_no_text_has_one() -> None:
    assert [sequence(i, sampling=Sampling()).seed for i in range(3)] == [None] * 3


def test_order_is_priority_then_arrival_then_place() -> None:
    def order(priority: int, arrival: int, index: int) -> tuple[int, int, int]:
        return sequence(index, priority=priority, arrival=arrival).order

    wanted = [order(-1, 9, 0), order(0, 1, 0), order(0, 1, 1), order(0, 2, 0), order(1, 0, 0)]
    assert wanted == sorted(wanted)


def test_requests_have_ids_of_their_own() -> None:
    assert len({request().id for _ in range(10)}) == 10
    assert request(id="mine").id == "mine"


def test_request_is_finished_when_all_of_its_sequences_are() -> None:
    r = request(n=2)
    assert not r.finished  # nobody has made its sequences yet
    r.sequences = [sequence(), sequence(1)]
    r.sequences[0].state = State.FINISHED
    assert not r.finished
    r.sequences[1].state = State.FINISHED
    assert r.finished


@pytest.mark.parametrize(
    ("options", "said"), [({"prompt": ()}, "the prompt is empty"), ({"n": 0}, "n must be at least 1, got 0")]
)
def test_senseless_request_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemeError, match=said):
        request(**options)


def test_repr_says_where_it_stands() -> None:
    s = sequence(id="r")
    assert repr(s) == "<r/0 waiting, 0 of 3 computed>"
    s.state, s.reason = State.FINISHED, "cancelled"
    assert repr(s) == "<r/0 finished, cancelled, 0 of 3 computed>"
