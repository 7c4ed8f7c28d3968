"""Samples the tokens of a step in which some sequences have a draft: guessed tokens, whose logits are there already.

    logits    of the last token, of draft[0], of draft[1], …      1 + len(draft) rows of a sequence
    sampled   t0 ──equals draft[0]?──▶ t1 ──equals draft[1]?──▶ … until one differs, or the sequence ends

Each token is taken by the sequence's own sampler, from the logits and with the state (random numbers, penalties,
grammar) that it has in steps of one token. So answers are those without drafts, also for a seed, and not only their
distribution; and a draft of one token for each position is accepted as often as by rejection sampling: with the
probability that the sampler takes it.
"""

from collections.abc import Sequence as List
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from crelle.engine.requests.output import OutputState, TokenLogprob
from crelle.engine.requests.sequence import Sequence
from crelle.engine.sampling.batch_sampler import sample_batch
from crelle.engine.sampling.sampler import likeliest, not_finite
from crelle.engine.sampling.upload import upload


class SampledToken(NamedTuple):
    """A token and its log-probability, where that was asked for."""

    token: int
    logprob: TokenLogprob | None = None


class Verified(NamedTuple):
    """A sequence of a step, and what was guessed of it."""

    sequence: Sequence
    state: OutputState
    draft: List[int]


def accept(best: List[int], draft: List[int], end_ids: frozenset[int], room: int) -> list[int]:
    """Return the tokens that follow a sequence which samples greedily: guesses, as far as right, and one more.

    best: the likeliest tokens after the last one and after each guess, below 0 where logits are not finite; room:
    tokens to the sequence's end. Nothing, if the first one is not finite; after others that is left to the next step.
    """
    found = list[int]()
    for i, token in enumerate(best):
        if token < 0:
            break
        found.append(token)
        if i >= len(draft) or token != draft[i] or token in end_ids or len(found) >= room:
            break
    return found


def sample_drafts(logits: Tensor, rows: List[Verified]) -> list[list[SampledToken] | BaseException]:
    """Return for each sequence the tokens that follow it, all but the last of them as guessed; or why there is none."""
    first, starts = 0, list[int]()
    for row in rows:
        starts.append(first)
        first += 1 + len(row.draft)
    found: list[list[SampledToken] | BaseException] = [[] for _ in rows]
    going, depth = list(range(len(rows))), 0
    if first > len(rows) and (fast := [i for i in going if rows[i].state.fast]):
        best: list[int] = likeliest(logits).tolist()  # of all rows at once: on a GPU, one wait
        for i in fast:
            found[i] = _greedy(rows[i], best[starts[i] : starts[i] + 1 + len(rows[i].draft)])
        going = [i for i in going if not rows[i].state.fast]
    while going:
        if depth == 0 and first == len(rows):
            picked = logits
        else:
            picked = logits[upload([starts[i] + depth for i in going], logits.device)]
        sampled = sample_batch(picked, [(rows[i].state, _so_far(rows[i], found[i])) for i in going])
        for i, token in zip(going, sampled, strict=True):
            tokens = found[i]
            assert isinstance(tokens, list)
            if isinstance(token, int):
                tokens.append(SampledToken(token, rows[i].state.pending))
            elif not tokens:
                found[i] = token  # after others it is left to the next step, which begins there
        going = [i for i in going if _goes_on(rows[i], found[i], depth)]
        depth += 1
    return found


def _greedy(row: Verified, best: List[int]) -> list[SampledToken] | BaseException:
    """Return what `sample_drafts` does, for a sequence of which the likeliest tokens are all that is needed."""
    s, state = row.sequence, row.state
    tokens = accept(best, row.draft, s.request.end_ids, s.limit - len(s.ids))
    if not tokens:
        return not_finite(len(s.ids))
    state.first = state.first or perf_counter()
    return [SampledToken(token) for token in tokens]


def _so_far(row: Verified, tokens: list[SampledToken] | BaseException) -> list[int]:
    assert isinstance(tokens, list)
    return [*row.sequence.ids, *(t.token for t in tokens)] if tokens else row.sequence.ids


def _goes_on(row: Verified, tokens: list[SampledToken] | BaseException, depth: int) -> bool:
    """Whether the logits after the token just sampled are there, and the sequence does not end with it."""
    if isinstance(tokens, BaseException) or len(tokens) <= depth or depth >= len(row.draft):
        return False
    s, token = row.sequence, tokens[depth].token
    ended = token in s.request.end_ids or len(s.ids) + len(tokens) >= s.limit
    grammar = row.state.grammar
    return token == row.draft[depth] and not ended and not (grammar is not None and grammar.finished)
