"""A model played by a function of everything that lies in the pages: a wrong page anywhere changes the tokens."""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

from crelle.engine.block_manager import BlockManager
from crelle.engine.requests.sequence import Request, Sequence, State
from crelle.engine.sampling.sampler import Sampling
from crelle.engine.scheduler import Scheduler, Step

VOCABULARY, END = 5, 0
GARBAGE = -1


def mix(*parts: object) -> int:
    return crc32(repr(parts).encode())


def keys_and_values(s: Sequence, at: int, before: list[int], token: int) -> int:
    """What a token leaves in the cache: it depends on all that lies before it, and on the model's precision.

    Where prompts run through other kernels, also on whether it was sampled.
    """
    return mix(s.precision, before, token, s.request.prefill_differs and at >= len(s.request.prompt))


def draw(last: int, sequence: Sequence) -> int:
    return mix(last, sequence.seed, sequence.index) % VOCABULARY


def alone(s: Sequence) -> list[int]:
    """The tokens of a sequence that has a machine without pages for itself."""
    stored: list[int] = []
    for token in s.request.prompt:
        stored.append(keys_and_values(s, len(stored), stored, token))
    new: list[int] = []
    while len(s.request.prompt) + len(new) < s.limit:
        token = draw(stored[-1], s)
        if token in s.request.end_ids:
            break
        new.append(token)
        stored.append(keys_and_values(s, len(stored), stored, token))
    return new


class Runner:
    """Carries out steps on pages of numbers, and checks what may be asked of any step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.blocks = scheduler, scheduler.blocks
        self.memory = [[GARBAGE] * self.blocks.page for _ in range(self.blocks.pages)]

    def run(self, step: Step, *, fail: bool = False) -> list[int]:
        """Return a token for each that samples, and one after each token of its draft."""
        self.check(step)
        before = [list(page) for page in self.memory]
        for source, target in step.copies:
            self.memory[target] = list(before[source])  # all at once: their order must not matter
        sampled = []
        for run in step.chunks:
            for i, token in enumerate(run.ids, run.start):
                page, at = run.pages[i // self.blocks.page], i % self.blocks.page
                seen = [self.memory[run.pages[j // self.blocks.page]][j % self.blocks.page] for j in range(i)]
                self.memory[page][at] = GARBAGE if fail else keys_and_values(run.sequence, i, seen, token)
            for last in range(run.end - 1, run.end + len(run.draft)):
                logits = self.memory[run.pages[last // self.blocks.page]][last % self.blocks.page]
                sampled += [draw(logits, s) for s in run.samples]
        if fail:
            raise RuntimeError("the device has fallen off the bus")
        return sampled

    def check(self, step: Step) -> None:
        assert 0 < step.tokens <= self.scheduler.budget
        assert 0 < len(step.chunks) <= self.scheduler.max_batch
        assert len({id(run.sequence) for run in step.chunks}) == len(step.chunks)
        lengths = [run.end - run.start for run in step.chunks]
        assert min(lengths) > 0
        assert [n > 1 for n in lengths] == sorted(n > 1 for n in lengths)
        targets = [copy.target for copy in step.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.source for copy in step.copies}
        tables = [s.table for s in self.scheduler.running]
        for run in step.chunks:
            s = run.sequence
            assert (s.state, s.precision, s.computed) == (State.RUNNING, step.precision, run.start)
            assert (len(run.samples) > 0) == (run.end == len(s.ids))
            page = self.blocks.page
            last = self.blocks.pages_for(run.end + len(run.draft))
            written = set(run.pages[run.start // page : last])
            assert len(written) == last - run.start // page, "a token has no page"
            assert not run.draft or len(run.samples) == 1
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
    return [run.end - run.start for run in step.chunks]
