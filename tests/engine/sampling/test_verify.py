"""The tokens that drafts are compared with: those of the sequence's own sampler, one after the other."""

from types import SimpleNamespace
from typing import Any

import torch

from crelle import Sampling
from crelle.engine.sampling.sampler import Sampler, not_finite
from crelle.engine.sampling.verify import Verified, sample_drafts
from crelle.errors import NumericsError

V, TRIALS = 6, 3000


class State:
    """As much of an OutputState as sampling needs."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampler, self.grammar, self.pending = Sampler(sampling), None, None
        self.processed = self.sampler.processor is not None
        self.fast = False  # position by position

    def take(self, token: int, logits: Any, position: int) -> int:
        if token < 0:
            raise not_finite(position)
        return token


def row(sampling: Sampling, draft: tuple[int, ...]) -> Verified:
    s: Any = SimpleNamespace(ids=[1], limit=100, request=SimpleNamespace(end_ids=frozenset()))
    state: Any = State(sampling)
    return Verified(s, state, draft)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_distribution_is_that_of_sampling_token_by_token() -> None:
    """Chi-square of two tokens, with every first token drafted, at the 0.999 quantile."""
    first = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 1.5
    behind = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.5  # logits after each first token
    counts = torch.zeros(V, V)
    for seed in range(TRIALS):
        draft = seed % V
        r = row(Sampling(temperature=1.0, seed=seed), (draft,))
        (found,) = sample_drafts(torch.stack([first, behind[draft]]), [r])
        assert isinstance(found, list)
        t0 = found[0].token
        if t0 == draft:
            t1 = found[1].token
        else:  # rejected: the next step computes the logits after the token sampled
            assert len(found) == 1
            (more,) = sample_drafts(behind[t0][None], [r._replace(draft=())])
            assert isinstance(more, list)
            t1 = more[0].token
        counts[t0, t1] += 1
    expected = TRIALS * first.softmax(-1)[:, None] * behind.softmax(-1)
    assert chi_square(counts, expected) < 66.6  # 35 degrees of freedom
    assert chi_square(counts, TRIALS * first.softmax(-1)[:, None] / V) > 66.6  # it can fail


def test_a_seed_gives_the_same_tokens_with_any_draft() -> None:
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(2))
    for seed in range(40):
        plain = row(Sampling(temperature=1.0, seed=seed), ())
        want = []
        for at in range(4):
            (found,) = sample_drafts(logits[at : at + 1], [plain])
            assert isinstance(found, list)
            want.append(found[0].token)
        for right in range(4):
            draft = (*want[:right], *((t + 1) % V for t in want[right:3]))
            (found,) = sample_drafts(logits, [row(Sampling(temperature=1.0, seed=seed), draft)])
            assert isinstance(found, list)
            assert [t.token for t in found] == want[: right + 1]


def test_rows_of_several_sequences_are_their_own_and_ends_end() -> None:
    best = [3, 1, 4, 2, 0]
    logits = torch.nn.functional.one_hot(torch.tensor(best), V).float()
    rows = [row(Sampling(), (3, 1)), row(Sampling(), ()), row(Sampling(), (5,))]
    rows[0].sequence.request.end_ids = frozenset({1})
    logits = torch.cat([logits, logits[:1]])
    found = [[t.token for t in tokens] for tokens in sample_drafts(logits, rows) if isinstance(tokens, list)]
    assert found == [[3, 1], [2], [0]]  # 1 ends the first one: what follows is not sampled
    rows[0].sequence.request.end_ids, rows[0].sequence.limit = frozenset(), 2
    rows = [rows[0], *[row(Sampling(), r.draft) for r in rows[1:]]]
    found = [[t.token for t in tokens] for tokens in sample_drafts(logits, rows) if isinstance(tokens, list)]
    assert found[0] == [3]


def test_what_fails_behind_a_right_token_is_left_to_the_next_step() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1]), V).float()
    logits[1] = torch.nan
    (found,) = sample_drafts(logits, [row(Sampling(temperature=1.0, seed=1, top_k=1), (3,))])
    assert isinstance(found, list)
    assert [t.token for t in found] == [3]
    (found,) = sample_drafts(logits[1:], [row(Sampling(temperature=1.0, seed=1, top_k=1), ())])
    assert isinstance(found, NumericsError)
