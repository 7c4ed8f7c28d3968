"""Prompts shared out to calls: everyone once and in order, never more tokens than allowed where it can be helped."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from crelle.kernels.cuda.attention.varlen import pack_prefills

LENGTHS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=12)


def test_three_prompts() -> None:
    first, second = pack_prefills([(0, 10), (30, 4), (0, 9)], most=50)
    assert (first.prompts, first.rows, first.new, first.all) == (slice(0, 2), slice(0, 14), [0, 10, 14], [0, 10, 44])
    assert (first.longest_new, first.longest) == (10, 34)
    assert (second.prompts, second.rows, second.new, second.all) == (slice(2, 3), slice(14, 23), [0, 9], [0, 9])


@given(lengths=LENGTHS, most=st.integers(1, 200))
def test_everyone_attends_once_within_the_bound(lengths: list[tuple[int, int]], most: int) -> None:
    found = pack_prefills(lengths, most)
    assert [i for some in found for i in range(some.prompts.start, some.prompts.stop)] == list(range(len(lengths)))
    new = [0, *accumulate(more for _, more in lengths)]
    for some in found:
        mine = lengths[some.prompts]
        assert some.rows == slice(new[some.prompts.start], new[some.prompts.stop])
        assert some.new == [0, *accumulate(more for _, more in mine)]
        assert some.all == [0, *accumulate(before + more for before, more in mine)]
        assert some.all[-1] <= most or len(mine) == 1
        assert some.longest_new == max(more for _, more in mine)
        assert some.longest == max(before + more for before, more in mine)
    for one, other in pairwise(found):  # none ends before it must
        assert one.all[-1] + other.all[1] > most
