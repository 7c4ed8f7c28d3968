"""The part of long tests that `make test` runs; with `--every-case`, as in `make test-slow`, they run whole.

Cases of a parametrized test: `@pytest.mark.sample(n)`. Random examples and injected faults: `share_of(150)`.
"""

import random
from collections import Counter
from collections.abc import Hashable, Sequence

every_case = False  # set before test modules are imported
Case = Sequence[tuple[str, Hashable]]  # (parameter, value), one pair for each parameter


def sampled_cases(test: str, cases: Sequence[Case], n: int) -> set[int]:
    """Return the indices of about one of n cases, with every value that several cases share at least once.

    The same cases in every run and every process: the name of the test seeds the choice. Random, because every n-th
    case of a cross product may always have the same value of the last parameter.
    """
    order = list(range(len(cases)))
    random.Random(test).shuffle(order)
    left = {value for value, times in Counter(v for case in cases for v in case).items() if times > 1}
    chosen = set[int]()
    while left:
        best = max(order, key=lambda case: len(left.intersection(cases[case])))  # the first of the best
        chosen.add(best)
        left.difference_update(cases[best])
    for case in order:
        if len(chosen) * n >= len(cases):
            break
        chosen.add(case)
    return chosen


def share_of(count: int) -> int:
    """Return a third of that many, or all with `--every-case`."""
    return count if every_case else -(-count // 3)
