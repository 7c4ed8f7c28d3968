"""The scheduler under random traffic: every sequence gets its tokens, in bounded time, and every page comes back."""

import pytest
from fake_model import END, VOCABULARY, Runner, alone, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sampled_cases import share_of

from crelle.engine.block_manager import BlockManager
from crelle.engine.requests.sequence import Request, Sequence, State
from crelle.engine.scheduler import Scheduler, Step
from crelle.errors import CapacityError

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
    cache_salt=st.sampled_from(["", "", "other"]),
    prefill_differs=st.booleans(),
)


class Traffic(RuleBasedStateMachine):
    """Random arrivals, lengths, precisions, cancellations and faults on a tiny cache."""

    @initialize(
        pages=st.integers(2, 14),
        page=st.integers(1, 5),
        max_batch=st.integers(1, 6),
        more=st.integers(0, 12),
        watermark=st.sampled_from([1, 1, 0, 2]),
        sharing=st.sampled_from([True, True, False]),
    )
    def begin(self, pages: int, page: int, max_batch: int, more: int, watermark: int, sharing: bool) -> None:
        self.blocks, budget = BlockManager(pages, page, sharing=sharing), max_batch + more
        self.scheduler = Scheduler(self.blocks, context=30, max_batch=max_batch, budget=budget, watermark=watermark)
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
        early = self.scheduler.watermark > 0 and not all(p in running for p in step.preempted)
        assert not early, "let in and thrown out at once"
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
            hit = {s for run in step.chunks for s in (run.sequence, *run.sequence.forks)}
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
TestTraffic.settings = settings(deadline=None, max_examples=share_of(200), stateful_step_count=30)
