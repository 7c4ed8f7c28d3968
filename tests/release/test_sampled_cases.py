"""What `@pytest.mark.sample` leaves in `make test`."""

from itertools import product

import pytest
from sampled_cases import sampled_cases

CROSS = [list(zip("abc", values, strict=True)) for values in product(range(7), range(4), range(2))]


@pytest.mark.parametrize("n", [2, 3, 4, 8, 1000])
def test_every_value_is_there_and_no_more_cases_than_that_takes(n: int) -> None:
    chosen = sampled_cases("test", CROSS, n)
    assert {value for case in chosen for value in CROSS[case]} == {value for case in CROSS for value in case}
    assert len(chosen) == max(7, -(-len(CROSS) // n))


def test_the_choice_is_the_same_in_every_process_and_another_for_another_test() -> None:
    assert sorted(sampled_cases("test", CROSS, 20)) == [4, 11, 18, 30, 32, 44, 50]
    assert sampled_cases("other", CROSS, 20) != sampled_cases("test", CROSS, 20)


def test_cases_that_share_no_value_are_taken_one_in_n() -> None:
    alone = [[("case", i)] for i in range(9)]
    assert len(sampled_cases("test", alone, 3)) == 3
    assert sampled_cases("test", [[]], 5) == {0}
