"""How many tokens are guessed: as many as pay, by what was measured; and where they come from."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from fake_model import Runner, alone, mix, request, scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.engine.requests.sequence import Sequence as Text
from crelle.engine.speculation.ngram import LEAST, LONGEST, NgramLookup
from crelle.engine.speculation.pace import Odds, Pauses, StepTimes, best_lengths, trial
from crelle.engine.speculation.settings import Speculation
from crelle.engine.speculation.speculator import Speculator


def looked_up(ids: Sequence[int]) -> tuple[int, int]:
    """Where the longest match of the last tokens ends, the latest of those, and its length; token by token."""
    best = -1, 0
    for end in range(len(ids) - 1):
        n = 0
        while n < LONGEST and n <= end and ids[end - n] == ids[len(ids) - 1 - n]:
            n += 1
        if n and n >= best[1]:
            best = end, n
    return best


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 20), st.data())
def test_ngram_lookup_matches_oracle(ids: list[int], most: int, data: st.DataObject) -> None:
    lookup, seen = NgramLookup(), 0
    while seen < len(ids):  # it may be asked at any length
        seen = data.draw(st.integers(seen + 1, len(ids)))
        found, matched = lookup.propose(ids[:seen], most)
        end, n = looked_up(ids[:seen])
        assert matched == (n if n >= LEAST else 0)
        whole = ids[:seen]
        for _ in range(most if matched else 0):
            whole.append(whole[len(whole) - (seen - 1 - end)])
        assert found == whole[seen:]


def test_ngram_lookup_grows() -> None:
    ids = [i % 1999 for i in range(5000)]
    lookup = NgramLookup()
    assert lookup.propose(ids[:100], 4) == ([], 0)
    assert lookup.propose(ids, 4) == ([1002, 1003, 1004, 1005], LONGEST)
    assert NgramLookup().propose([7] * 100_000, 3) == ([7] * 3, LONGEST)


def flat(drafted: int, longest: int) -> float:
    return 1.0


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.3, 1.0, 3.0])
def test_lengths_are_those_of_the_best_rate(slope: float) -> None:
    chances = [0.9, 0.3, 0.7]

    def rate(lengths: Sequence[int]) -> float:
        tokens = sum(p ** (j + 1) for p, n in zip(chances, lengths, strict=True) for j in range(n))
        return (3 + tokens) / (1 + slope * sum(lengths))

    found = best_lengths(3, chances, [5, 5, 2], 9, lambda drafted, longest: 1 + slope * drafted)
    every = [(a, b, c) for a in range(6) for b in range(6) for c in range(3) if a + b + c <= 9]
    assert math.isclose(rate(found), max(map(rate, every)))


def test_lengths_keep_their_limits_and_are_none_where_nothing_is_won() -> None:
    assert best_lengths(1, [0.98], [15], 15, flat) == [15]
    assert best_lengths(1, [0.98], [15], 4, flat) == [4]
    assert best_lengths(1, [0.9], [15], 15, lambda drafted, longest: 1 + drafted) == [0]
    assert best_lengths(1, [0.0], [15], 15, lambda drafted, longest: 1 + 0.01 * drafted) == [0]
    slow_model = best_lengths(1, [0.8], [15], 15, lambda drafted, longest: 1 + 0.1 * drafted + 0.9 * longest)
    assert slow_model == [0]


def test_times_follow_what_is_measured_and_never_fall_with_rows() -> None:
    times = StepTimes()
    assert not times.measured("k", 1)
    for _ in range(3):
        times.add("k", 1, 2.0)
    assert times.measured("k", 1)
    assert not times.measured("k", 2)
    for _ in range(8):
        times.add("k", 4, 8.0)
    times.add("k", 2, 90.0)  # a step that was interrupted
    found = times.seconds("k", 1, 16)
    assert len(found) == 16
    assert found[0] == 2.0
    assert found == sorted(found)
    assert 6.0 < found[3] < 9.0
    assert found[1] <= found[3]  # bounded by what more rows take
    for _ in range(300):
        times.add("other", 1, 1.0)
    assert not times.measured("k", 1)  # too long ago


def test_it_tries_ever_more_rarely_while_that_fails() -> None:
    pauses, tries = Pauses(), list[int]()
    for step in range(4000):
        if pauses.waiting:
            pauses.skipped()
        else:
            pauses.tried(paid=False)
            tries.append(step)
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert len(tries) < 16
    assert gaps[-1] > 500
    pauses.tried(paid=True)
    while pauses.waiting:
        pauses.skipped()
        gaps.append(0)
    assert gaps.count(0) == 16


def test_odds_follow_what_was_right_and_a_new_sequence_takes_those_of_all() -> None:
    everyone, mine = Odds(3, 7), Odds.of_sequence()
    assert mine.chance(0.5) == 0.5
    for _ in range(50):
        mine.add(4, 0)
    assert mine.chance(everyone.chance()) > 0.9
    for _ in range(50):
        mine.add(0, 1)
    assert mine.chance(0.5) < 0.2
    assert trial([0.1, 0.4, 0.3], [2, 9, 9], 5) == [0, 2, 0]
    assert trial([0.9, 0.4], [0, 1], 5) == [0, 1]


class Replay:
    """Runs the engine's loop without an engine: tokens are known, steps take what they are said to take."""

    def __init__(self, right: float, slope: float, sequences: int = 1) -> None:
        self.right, self.slope = right, slope
        self.speculator = Speculator(Speculation())
        self.scheduler = scheduler(pages=4000, budget=64, context=100_000)
        self.scheduler.lookahead = self.speculator.lookahead
        for i in range(sequences):
            self.scheduler.submit(request((1, 2, 3, i, 1, 2, 3, i), tokens=3000))

    def run(self, steps: int) -> tuple[int, float, int]:
        """Return tokens, time, and tokens drafted."""
        tokens, seconds, drafted = 0, 0.0, 0
        for _ in range(steps):
            step = self.scheduler.propose(self.speculator.fill(self.scheduler.schedule()))
            accepted = dict[Text, int]()
            for chunk in step.chunks:
                luck = [mix(len(chunk.sequence.ids), j) % 1000 / 1000 < self.right for j in range(len(chunk.draft))]
                accepted[chunk.sequence] = (*luck, False).index(False)
            took = 1 + self.slope * step.drafted
            self.speculator.note(step, accepted, took)
            self.scheduler.update(step, [5 + mix(len(s.ids)) % 3 for s in step.samples], accepted)
            seconds += took
            drafted += step.drafted
            tokens += len(step.samples) + sum(accepted.values())
        return tokens, seconds, drafted


@pytest.mark.parametrize("sequences", [1, 4, 12])
@pytest.mark.parametrize(("right", "slope"), [(0.95, 0.1), (0.9, 0.3), (0.5, 0.1), (0.5, 0.6), (0.0, 0.1), (0.0, 1.0)])
@pytest.mark.sample(3)
def test_an_engine_is_never_much_slower_and_faster_where_guesses_are_right(
    right: float, slope: float, sequences: int
) -> None:
    replay = Replay(right, slope, sequences)
    replay.run(100)
    tokens, seconds, drafted = replay.run(200)
    rate = tokens / seconds / sequences  # without drafts: 1
    assert rate > 0.97
    if right >= 0.9 and sequences == 1:
        assert rate > 1.5
    if right == 0.0:
        assert drafted < 40


GRAPHS = {0: 0.8, 2: 0.85, 4: 0.9, 8: 0.95, 16: 1.0}  # seconds on the device; with what the host does, 0.3 more


class StartedReplay:
    """The engine's loop on a GPU: steps are started before the last one's tokens are known, unless those are needed."""

    def __init__(self, answer: Callable[[int], int], graphs: dict[int, float] = GRAPHS) -> None:
        self.answer, self.graphs, self.clock = answer, graphs, 0
        self.speculator = Speculator(Speculation())
        self.speculator._times.take_graphs(graphs)
        self.scheduler = scheduler(pages=4000, budget=64, context=100_000)
        self.scheduler.lookahead = self.speculator.lookahead
        (self.sequence,) = self.scheduler.submit(request((1, 2), tokens=5000))
        self.drafts = list[int]()

    def run(self, tokens: int, odd: float = 1.0) -> float:
        """Return the seconds of this number of tokens; odd: how much longer each 50th step takes."""
        s, seconds, end = self.sequence, 0.0, len(self.sequence.ids) + tokens
        while len(s.ids) < end:
            looks = self.speculator.looks([s])
            room = self.speculator.lookahead
            self.scheduler.lookahead = room if looks else lambda decoding: {}
            step = self.scheduler.propose(self.speculator.fill(self.scheduler.schedule()))
            right = dict[Text, int]()
            for chunk in step.chunks:
                true = [self.answer(len(s.ids) + j) for j in range(len(chunk.draft))]
                right[s] = ([a == b for a, b in zip(true, chunk.draft, strict=True)] + [False]).index(False)
                self.drafts.append(len(chunk.draft))
            took = self.graphs[self.speculator._times.size(1 + step.drafted)] + 0.3 if looks else 1.0
            self.clock += 1
            took *= odd if self.clock % 50 == 0 else 1.0
            self.speculator.note(step, right, took, overlaps=not looks)
            self.scheduler.update(step, [self.answer(len(s.ids) + right[s])], right)
            seconds += took
        return seconds


@pytest.mark.parametrize("odd", [1.0, 30.0])
def test_copied_spans_get_long_drafts_on_a_gpu(odd: float) -> None:
    """Tokens that repeat what stands 150 tokens before; now and then a step is interrupted."""
    replay = StartedReplay(lambda at: mix(at % 150) % 1000)
    replay.run(300)  # the first 150 repeat nothing
    replay.drafts.clear()
    seconds = replay.run(900)
    assert sum(replay.drafts) / len(replay.drafts) >= 8
    assert 900 / seconds > 4
    replay.run(300, odd)
    replay.drafts.clear()
    replay.run(600)
    assert sum(replay.drafts) / len(replay.drafts) >= 8


def test_what_repeats_by_chance_keeps_a_gpu_busy() -> None:
    """Pairs of tokens come again, and what follows them is another: hardly a step waits for the host."""
    replay = StartedReplay(lambda at: 5 + random.Random(at).randrange(12))
    replay.run(500)
    replay.drafts.clear()
    assert replay.run(1000) < 1000 * 1.03
    assert sum(n > 0 for n in replay.drafts) < 40


def test_a_graph_that_costs_too_much_is_never_run() -> None:
    """Times that graphs took at the start hold from the first step on."""
    replay = StartedReplay(lambda at: mix(at % 100) % 1000, {0: 0.8, 2: 8.0, 4: 9.0, 8: 10.0, 16: 40.0})
    replay.run(1500)
    assert max(replay.drafts) <= 7
    assert len([n for n in replay.drafts if n]) < 300


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_drafts_change_neither_tokens_nor_pages_nor_who_is_preempted(data: st.DataObject) -> None:
    """Over a played model, by drafts that are right or wrong at random; the same requests without drafts go first."""
    pages, batch = data.draw(st.integers(8, 30)), data.draw(st.integers(1, 5))
    prompts = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=9), min_size=1, max_size=6))
    tokens = data.draw(st.integers(1, 14))
    s = scheduler(pages, max_batch=batch, budget=data.draw(st.integers(batch, 40)), watermark=0)
    requests = [request(p, tokens=tokens, seed=i, end_ids=frozenset({0})) for i, p in enumerate(prompts)]
    whole = {r.id: [*p, *alone(t)] for r, p in zip(requests, prompts, strict=True) for t in s.submit(r)}
    s.lookahead = lambda decoding: {t: mix(len(t.ids), t.index, 1) % 6 for t in decoding}
    runner, preempted = Runner(s), 0
    while step := s.schedule():
        drafts = {}
        for chunk in step.chunks:
            known, at = whole[chunk.sequence.request.id], len(chunk.sequence.ids)
            luck = mix(at, chunk.sequence.index)
            rest = known[at : at + chunk.lookahead]
            drafts[chunk.sequence] = [t if luck >> i & 3 else 4 for i, t in enumerate(rest)]
        step = s.propose(drafts)
        found, accepted, sampled = iter(runner.run(step)), dict[Text, int](), list[int]()
        for chunk in step.chunks:
            for t in chunk.samples:
                rows = [next(found) for _ in (0, *chunk.draft)]
                right = next(
                    (i for i, (a, b) in enumerate(zip(rows, chunk.draft, strict=False)) if a != b or a == 0),
                    len(chunk.draft),
                )
                right = min(right, t.limit - len(t.ids) - 1)
                accepted[t] = right
                sampled.append(rows[right])
        s.update(step, sampled, accepted)
        preempted += len(step.preempted)
        s.blocks.assert_consistent([t.table for t in s.running])
        assert all(len(t.table.pages) <= s.blocks.pages_for(len(t.ids)) for t in s.running)
    for r in requests:
        for t in r.sequences:
            assert t.new == alone(t)
            assert t.accepted <= t.drafted
    assert s.blocks.used == 0
