"""The scheduler, step by step: who runs, which pages are shared, who is refused and how things end."""

import pytest
from fake_model import Runner, alone, request, scheduler, shape, steps

from crelle.engine.block_manager import BlockManager
from crelle.engine.scheduler import Scheduler
from crelle.errors import CapacityError, SchemeError

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
        batches.append(len(step.chunks))
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
    assert max(len(step.chunks) for step in done) == 3
    first_seen = list(dict.fromkeys(run.sequence.request.arrival for step in done for run in step.chunks))
    assert first_seen == list(range(8))


def test_assumed_prompts_decode_at_once() -> None:
    s = Scheduler(BlockManager(20, 4, sharing=False), context=60, max_batch=3, budget=8)
    for _ in range(4):
        s.submit(request(range(10), tokens=3))
    s.assume_prompts()
    step = s.schedule()
    assert shape(step) == [1, 1, 1]  # the fourth waits for a place
    assert [(run.start, run.end) for run in step.chunks] == [(9, 10)] * 3
    s.update(step, [1, 2, 3])
    s.blocks.assert_consistent([sequence.table for sequence in s.running])


def test_more_urgent_request_goes_first() -> None:
    s = scheduler(max_batch=1)
    for priority in (1, 0, -1, 0):
        s.submit(request([1], tokens=1, priority=priority))
    assert [step.chunks[0].sequence.request.arrival for step in steps(s)] == [2, 1, 3, 0]


def test_empty_scheduler_has_nothing_to_do() -> None:
    step = scheduler().schedule()
    assert (bool(step), step.tokens, step.samples) == (False, 0, ())


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
    a, b, c = (s.submit(request(range(9), cache_salt=cache_salt))[0] for cache_salt in ("a", "b", "a"))
    steps(s)
    assert (a.reused, b.reused, c.reused) == (0, 0, 8)


def test_n_texts_compute_their_prompt_once_and_share_its_pages() -> None:
    s = scheduler()
    r = request(range(10), tokens=5, n=3)
    s.submit(r)
    first, second, *_ = done = steps(s)
    assert (shape(first), len(first.samples), shape(second), len(second.copies)) == ([10], 3, [1, 1, 1], 2)
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
    with pytest.raises(CapacityError, match="10 tokens and up to 8 new tokens need 5 pages of 4 tokens, but the whole"):
        s.submit(request(range(10), tokens=8))
    s.submit(request(range(10), tokens=7))  # 16 are stored; the last is only drawn
    assert steps(s)


def test_prompt_that_fills_the_context_is_refused() -> None:
    s = scheduler(context=8)
    with pytest.raises(CapacityError, match="the prompt has 8 tokens, but the model's context of 8"):
        s.submit(request(range(8)))
    (x,) = s.submit(request(range(6), tokens=100))
    steps(s)
    assert (len(x.new), x.reason) == (2, "length")


def test_more_texts_than_a_batch_are_refused() -> None:
    with pytest.raises(CapacityError, match="n is 3, but at most 2 sequences can run concurrently"):
        scheduler(max_batch=2).submit(request(n=3))


@pytest.mark.parametrize(("max_batch", "budget"), [(0, 8), (9, 8)])
def test_budget_below_a_token_each_is_refused(max_batch: int, budget: int) -> None:
    with pytest.raises(SchemeError, match="at most the token budget"):
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
        sampled = [0] * len(step.samples)
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
