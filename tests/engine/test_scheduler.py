"""The scheduler: whatever comes, every sequence gets exactly its tokens, in bounded time, and every page comes back.

The model is played by a function of everything that lies in the pages: a wrong page anywhere changes the tokens.
"""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from crelle.engine.blocks import BlockManager
from crelle.engine.sampler import Sampling
from crelle.engine.scheduler import Scheduler, Step
from crelle.engine.sequence import Request, Sequence, State
from crelle.errors import CapacityError, SchemeError

VOCABULARY, END = 5, 0
GARBAGE = -1


def mix(*parts: object) -> int:
    return crc32(repr(parts).encode())


def keys_and_values(precision: int | None, before: list[int], token: int) -> int:
    """What a token leaves in the cache: it depends on all that lies before it, and on the model's precision."""
    return mix(precision, before, token)


def draw(last: int, sequence: Sequence) -> int:
    return mix(last, sequence.seed, sequence.index) % VOCABULARY


def alone(s: Sequence) -> list[int]:
    """The tokens of a sequence that has a machine without pages for itself."""
    stored: list[int] = []
    for token in s.request.prompt:
        stored.append(keys_and_values(s.precision, stored, token))
    new: list[int] = []
    while len(s.request.prompt) + len(new) < s.limit:
        token = draw(stored[-1], s)
        if token in s.request.end_ids:
            break
        new.append(token)
        stored.append(keys_and_values(s.precision, stored, token))
    return new


class Runner:
    """Carries out steps on pages of numbers, and checks what may be asked of any step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.blocks = scheduler, scheduler.blocks
        self.memory = [[GARBAGE] * self.blocks.page for _ in range(self.blocks.pages)]

    def run(self, step: Step, *, fail: bool = False) -> list[int]:
        self.check(step)
        before = [list(page) for page in self.memory]
        for source, target in step.copies:
            self.memory[target] = list(before[source])  # all at once: their order must not matter
        sampled = []
        for run in step.runs:
            for i in range(run.start, run.end):
                page, at = run.pages[i // self.blocks.page], i % self.blocks.page
                seen = [self.memory[run.pages[j // self.blocks.page]][j % self.blocks.page] for j in range(i)]
                self.memory[page][at] = GARBAGE if fail else keys_and_values(step.precision, seen, run.sequence.ids[i])
            last = run.end - 1
            logits = self.memory[run.pages[last // self.blocks.page]][last % self.blocks.page]
            sampled += [draw(logits, s) for s in run.draws]
        if fail:
            raise RuntimeError("the device has fallen off the bus")
        return sampled

    def check(self, step: Step) -> None:
        assert 0 < step.tokens <= self.scheduler.budget
        assert 0 < len(step.runs) <= self.scheduler.max_batch
        assert len({id(run.sequence) for run in step.runs}) == len(step.runs)
        lengths = [run.end - run.start for run in step.runs]
        assert min(lengths) > 0
        assert [n > 1 for n in lengths] == sorted(n > 1 for n in lengths)
        targets = [copy.target for copy in step.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.source for copy in step.copies}
        tables = [s.table for s in self.scheduler.running]
        for run in step.runs:
            s = run.sequence
            assert (s.state, s.precision, s.computed) == (State.RUNNING, step.precision, run.start)
            assert (len(run.draws) > 0) == (run.end == len(s.ids))
            page = self.blocks.page
            written = set(run.pages[run.start // page : self.blocks.pages_for(run.end)])
            assert len(written) == self.blocks.pages_for(run.end) - run.start // page, "a token has no page"
            others = {p for t in tables if t is not s.table for p in t.pages}
            assert not written & others, "a page is written that another sequence sees"


def request(prompt: Iterable[int] = (1, 2, 3), *, tokens: int = 4, seed: int | None = 0, **options: Any) -> Request:
    return Request(prompt=tuple(prompt), sampling=Sampling(max_tokens=tokens, seed=seed), **options)


def scheduler(pages: int = 50, page: int = 4, **options: Any) -> Scheduler:
    sharing = options.pop("sharing", True)
    limits = {"context": 1000, "max_batch": 16, "budget": 64} | options
    return Scheduler(BlockManager(pages, page, sharing=sharing), **limits)


def steps(s: Scheduler, runner: Runner | None = None) -> list[Step]:
    """Run until nothing is left; check the tokens of all that finished."""
    runner, done = runner or Runner(s), list[Step]()
    while step := s.schedule():
        done.append(step)
        s.update(step, runner.run(step))
        assert len(done) < 1000, "it does not come to an end"
    for sequence in s.take_finished():
        assert sequence.new == alone(sequence)
    assert s.blocks.used == 0
    return done


def shape(step: Step) -> list[int]:
    return [run.end - run.start for run in step.runs]


# Steps -------------------------------------------------------------------------------------------------------------


def test_prompts_run_in_chunks_beside_those_that_decode() -> None:
    s = scheduler(budget=16)
    s.submit(request(range(10), tokens=9))
    s.submit(request(range(20, 45), tokens=2))
    assert [shape(step) for step in steps(s)][:5] == [[10, 6], [1, 15], [1, 4], [1, 1], [1]]


def test_requests_join_and_leave_at_any_step() -> None:
    s = scheduler()
    runner = Runner(s)
    s.submit(request([1], tokens=3))
    batches = []
    for i in range(5):
        step = s.schedule()
        batches.append(len(step.runs))
        s.update(step, runner.run(step))
        if i == 0:
            s.submit(request([2], tokens=4))
    assert batches == [1, 2, 2, 1, 1]
    assert not s.schedule()


def test_batch_never_exceeds_its_limit_and_all_come_in_order() -> None:
    s = scheduler(max_batch=3)
    requests = [request([i], tokens=3) for i in range(8)]
    for r in requests:
        s.submit(r)
    done = steps(s)
    assert max(len(step.runs) for step in done) == 3
    first_seen = list(dict.fromkeys(run.sequence.request.arrival for step in done for run in step.runs))
    assert first_seen == list(range(8))


def test_assumed_prompts_decode_at_once() -> None:
    s = Scheduler(BlockManager(20, 4, sharing=False), context=60, max_batch=3, budget=8)
    for _ in range(4):
        s.submit(request(range(10), tokens=3))
    s.assume_prompts()
    step = s.schedule()
    assert shape(step) == [1, 1, 1]  # the fourth waits for a place
    assert [(run.start, run.end) for run in step.runs] == [(9, 10)] * 3
    s.update(step, [1, 2, 3])
    s.blocks.assert_consistent([sequence.table for sequence in s.running])


def test_more_urgent_request_goes_first() -> None:
    s = scheduler(max_batch=1)
    for priority in (1, 0, -1, 0):
        s.submit(request([1], tokens=1, priority=priority))
    assert [step.runs[0].sequence.request.arrival for step in steps(s)] == [2, 1, 3, 0]


def test_empty_scheduler_has_nothing_to_do() -> None:
    step = scheduler().schedule()
    assert (bool(step), step.tokens, step.draws) == (False, 0, ())


def test_precisions_take_turns_whatever_their_crowds() -> None:
    s = scheduler()
    for i in range(6):
        s.submit(request([i], tokens=6, precision=4))
    s.submit(request([9], tokens=6, precision=2))
    s.submit(request([9], tokens=6))
    assert [step.precision for step in steps(s)] == [4, 2, None] * 6


def test_precisions_share_no_pages() -> None:
    s = scheduler()
    runner = Runner(s)
    sequences = [s.submit(request(range(12), precision=precision))[0] for precision in (2, 4, None)]
    steps(s, runner)
    (again,) = s.submit(request(range(12), precision=2))
    steps(s, runner)
    assert [x.reused for x in (*sequences, again)] == [0, 0, 0, 8]


# Pages -------------------------------------------------------------------------------------------------------------


def test_shared_prefix_saves_pages_and_tokens() -> None:
    prefix, used, computed = range(100, 140), {}, {}
    for sharing in (True, False):
        s = scheduler(pages=200, budget=1000, sharing=sharing)
        for i in range(10):
            s.submit(request([*prefix, i]))
        runner, used[sharing], computed[sharing] = Runner(s), 0, 0
        while step := s.schedule():
            computed[sharing] += step.tokens
            s.update(step, runner.run(step))
            if all(x.new for x in s.running):
                used[sharing] = max(used[sharing], s.blocks.used)
    assert used == {True: 10 + 10 * 1, False: 10 * 11}  # ten pages of prefix, once or for each
    assert computed == {True: 40 + 10 * 4, False: 10 * 44}


def test_prompts_of_one_prefix_that_come_together_compute_it_once() -> None:
    s = scheduler(budget=30)
    for i in range(4):
        s.submit(request([*range(100, 124), i], tokens=1))
    assert [shape(step) for step in steps(s)] == [[25], [1, 1, 1]]


def test_realms_share_no_prefix() -> None:
    s = scheduler()
    a, b, c = (s.submit(request(range(9), realm=realm))[0] for realm in ("a", "b", "a"))
    steps(s)
    assert (a.reused, b.reused, c.reused) == (0, 0, 8)


def test_n_texts_compute_their_prompt_once_and_share_its_pages() -> None:
    s = scheduler()
    r = request(range(10), tokens=5, n=3)
    s.submit(r)
    first, second, *_ = done = steps(s)
    assert (shape(first), len(first.draws), shape(second), len(second.copies)) == ([10], 3, [1, 1, 1], 2)
    assert len(done) == 5
    assert len({tuple(x.new) for x in r.sequences}) > 1  # each has its own seed


def test_latest_is_preempted_keeps_its_tokens_and_comes_back() -> None:
    s = scheduler(pages=6, page=4, sharing=False)
    first, second = (s.submit(request(range(i, i + 7), tokens=10))[0] for i in (0, 20))
    done = steps(s)
    assert [x for step in done for x in step.preempted] == [second]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert max(shape(step)[0] for step in done[1:]) > 7  # its own tokens were part of its prompt


def test_preempted_sequence_finds_its_pages_again() -> None:
    s = scheduler(pages=6, page=4)
    _, second = (s.submit(request(range(i, i + 7), tokens=10))[0] for i in (0, 20))
    steps(s)
    assert (second.preemptions, second.reused) == (1, 8)


def test_nobody_is_let_in_who_would_throw_another_out_at_once() -> None:
    s = scheduler(pages=4, page=4)
    s.submit(request(range(8), tokens=4))
    s.submit(request(range(20, 26), tokens=4))
    assert not any(step.preempted for step in steps(s))


# Refusals and ends -------------------------------------------------------------------------------------------------


def test_what_could_never_fit_is_refused_with_a_sentence() -> None:
    s = scheduler(pages=4, page=4)
    with pytest.raises(CapacityError, match="10 tokens and up to 8 new ones need 5 pages of 4 tokens, the whole cache"):
        s.submit(request(range(10), tokens=8))
    s.submit(request(range(10), tokens=7))  # 16 are stored; the last is only drawn
    assert steps(s)


def test_prompt_that_fills_the_context_is_refused() -> None:
    s = scheduler(context=8)
    with pytest.raises(CapacityError, match="the prompt has 8 tokens, the model's context holds 8"):
        s.submit(request(range(8)))
    (x,) = s.submit(request(range(6), tokens=100))
    steps(s)
    assert (len(x.new), x.reason) == (2, "length")


def test_more_texts_than_a_batch_are_refused() -> None:
    with pytest.raises(CapacityError, match="n is 3, but at most 2 sequences run at once"):
        scheduler(max_batch=2).submit(request(n=3))


@pytest.mark.parametrize(("max_batch", "budget"), [(0, 8), (9, 8)])
def test_budget_below_a_token_each_is_refused(max_batch: int, budget: int) -> None:
    with pytest.raises(SchemeError, match="a token for each"):
        scheduler(max_batch=max_batch, budget=budget)


def test_runner_fault_fails_exactly_the_sequences_of_the_step() -> None:
    s = scheduler()
    hit = [s.submit(request([1, 2, i], precision=2))[0] for i in range(2)] + s.submit(request(n=2, precision=2))
    spared = s.submit(request(precision=4))[0]
    step, fault = s.schedule(), RuntimeError("no")
    s.abort(step, fault)
    assert [(x.reason, x.error) for x in s.take_finished()] == [("error", fault)] * 4
    assert all(x.finished for x in hit)
    steps(s)
    assert (spared.reason, spared.new) == ("length", alone(spared))


def test_pages_of_a_failed_step_are_not_shared() -> None:
    s = scheduler()
    runner = Runner(s)
    s.submit(request(range(9)))
    step = s.schedule()
    with pytest.raises(RuntimeError):
        runner.run(step, fail=True)
    s.abort(step, RuntimeError())
    assert s.blocks.cached == 0
    s.take_finished()
    s.submit(request(range(9)))
    steps(s, runner)


@pytest.mark.parametrize("when", ["waiting", "between", "within", "flag"])
def test_cancelled_request_ends_and_its_pages_are_free(when: str) -> None:
    s = scheduler()
    runner = Runner(s)
    r, other = request(range(9), n=2), request([7])
    s.submit(r)
    s.submit(other)
    if when == "waiting":
        s.cancel(r)
    step = s.schedule()
    if when == "within":
        s.cancel(r)
        sampled = [0] * len(step.draws)
    else:
        sampled = runner.run(step)
    s.update(step, sampled)
    if when == "between":
        s.cancel(r)
    if when == "flag":
        r.cancel()
    s.schedule()
    assert [x.reason for x in r.sequences] == ["cancelled"] * 2
    assert s.take_finished() == r.sequences
    assert s.blocks.used == len(other.sequences[0].table.pages)
    s.blocks.assert_consistent(x.table for x in s.running)


def test_one_of_n_can_end_before_the_prompt_is_computed_and_the_others_go_on() -> None:
    s = scheduler(budget=4, max_batch=4)
    runner, r = Runner(s), request(range(9), n=3)
    s.submit(r)
    step = s.schedule()
    s.update(step, runner.run(step))
    s.finish(r.sequences[0])
    s.finish(r.sequences[2])
    s.finish(r.sequences[2])  # twice is once
    assert [x.reason for x in s.take_finished()] == ["stop", "stop"]
    steps(s, runner)
    assert (r.sequences[1].reason, r.sequences[1].new) == ("length", alone(r.sequences[1]))


# Under random traffic ----------------------------------------------------------------------------------------------

prompts = st.builds(
    lambda which, shared, own: tuple([which] * shared + own),
    st.sampled_from([1, 2]),
    st.integers(0, 12),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
)
requests = st.builds(
    request,
    prompts,
    tokens=st.integers(1, 12),
    n=st.integers(1, 3),
    precision=st.sampled_from([None, 2, 4]),
    end_ids=st.sampled_from([frozenset[int](), frozenset({END})]),
    priority=st.sampled_from([0, 0, 0, 1]),
    seed=st.sampled_from([None, 1, 2]),
    realm=st.sampled_from(["", "", "other"]),
)


class Traffic(RuleBasedStateMachine):
    """Random arrivals, lengths, precisions, cancellations and faults on a tiny cache."""

    @initialize(
        pages=st.integers(2, 14),
        page=st.integers(1, 5),
        max_batch=st.integers(1, 6),
        more=st.integers(0, 12),
        spare=st.sampled_from([1, 1, 0, 2]),
        sharing=st.sampled_from([True, True, False]),
    )
    def begin(self, pages: int, page: int, max_batch: int, more: int, spare: int, sharing: bool) -> None:
        self.blocks, budget = BlockManager(pages, page, sharing=sharing), max_batch + more
        self.scheduler = Scheduler(self.blocks, context=30, max_batch=max_batch, budget=budget, spare=spare)
        self.runner = Runner(self.scheduler)
        self.sequences: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.stopped: list[Sequence] = []  # by a stop string
        self.last_turn: dict[int | None, int] = {}
        self.turns = 0

    @rule(r=requests)
    def submit(self, r: Request) -> None:
        limit = min(len(r.prompt) + r.sampling.max_tokens, 30)
        fits = r.n <= self.scheduler.max_batch and self.blocks.pages_for(limit - 1) <= self.blocks.pages
        try:
            self.sequences += self.scheduler.submit(r)
        except CapacityError:
            assert not fits
        else:
            assert fits

    def next_step(self) -> Step:
        """Schedule, and check what preemption, admission and turns promise."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        step = self.scheduler.schedule()
        now = self.scheduler.running
        assert bool(step) == self.scheduler.unfinished
        assert sum(s.slots for s in now) <= self.scheduler.max_batch
        assert self.scheduler.spare == 0 or all(p in running for p in step.preempted), "let in and thrown out at once"
        assert all(p.order > s.order for p in step.preempted for s in now), "an earlier one was preempted for a later"
        let_in = [s for s in (*now, *step.preempted) if s not in running]
        passed_over = [s for s in waiting if s in self.scheduler.waiting and s not in step.preempted]
        assert all(a.order < s.order for a in let_in for s in passed_over), "a later one was let in past an earlier"
        if step:
            self.turns += 1
            standing = {s.precision for s in now if s in running}
            for precision in standing - {step.precision}:
                assert self.turns - self.last_turn.get(precision, self.turns) <= 3, "a precision misses its turn"
            self.last_turn[step.precision] = self.turns
            for precision in {None, 2, 4} - standing - {step.precision}:
                self.last_turn.pop(precision, None)
        return step

    @rule()
    def step(self) -> None:
        if step := self.next_step():
            self.scheduler.update(step, self.runner.run(step))

    @rule(times=st.integers(2, 12))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()
            self.pages_are_consistent()

    @rule()
    def faulty_step(self) -> None:
        if step := self.next_step():
            hit = {s for run in step.runs for s in (run.sequence, *run.sequence.heirs)}
            before = {s: s.state for s in self.sequences if s not in hit}
            with pytest.raises(RuntimeError) as caught:
                self.runner.run(step, fail=True)
            self.scheduler.abort(step, caught.value)
            assert all((s.reason, s.error) == ("error", caught.value) for s in hit)
            assert {s: s.state for s in before} == before

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), at_once=st.booleans(), within=st.booleans())
    def cancel(self, data: st.DataObject, at_once: bool, within: bool) -> None:
        r = data.draw(st.sampled_from(self.sequences)).request
        step = self.next_step() if within else None
        sampled = self.runner.run(step) if step else []
        if at_once:
            self.scheduler.cancel(r)
            assert r.finished
        else:
            r.cancel()
        if step:
            self.scheduler.update(step, sampled)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(self.sequences))
        was = s.reason
        if not s.finished:
            self.stopped.append(s)
        self.scheduler.finish(s)
        assert s.reason == (was or "stop")

    @invariant()
    def pages_are_consistent(self) -> None:
        self.blocks.assert_consistent(s.table for s in self.scheduler.running)
        assert all(not s.table.pages for s in self.sequences if s.state is not State.RUNNING)
        assert 0 <= self.blocks.used <= self.blocks.pages

    @invariant()
    def ends_are_reported_once(self) -> None:
        self.ended += self.scheduler.take_finished()
        assert len({id(s) for s in self.ended}) == len(self.ended)
        assert {id(s) for s in self.ended} == {id(s) for s in self.sequences if s.finished}

    @invariant()
    def tokens_are_those_of_a_sequence_alone(self) -> None:
        for s in self.sequences:
            expected = alone(s)
            assert s.new == expected[: len(s.new)]
            if s.reason == "length" or (s.reason == "stop" and s not in self.stopped):
                assert s.new == expected

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        bound = 3 * sum(s.limit + 1 for s in self.sequences if not s.finished)
        while step := self.next_step():
            self.scheduler.update(step, self.runner.run(step))
            self.pages_are_consistent()
            bound -= 1
            assert bound >= 0, "somebody starves"
        self.ends_are_reported_once()
        self.tokens_are_those_of_a_sequence_alone()
        assert all(s.finished and s.reason for s in self.sequences)
        assert self.blocks.used == 0
        self.blocks.assert_consistent([])


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(deadline=None, max_examples=200, stateful_step_count=30)
