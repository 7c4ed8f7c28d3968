"""Chooses the sequences of each step. Requests join and leave between any two steps (iteration-level, Orca 2022).

The loop around it is the engine's:

    while step := scheduler.schedule():
        try:
            sampled = runner(step)               # copy pages, run the tokens, sample one for each of step.samples
        except Exception as error:
            scheduler.abort(step, error)         # these sequences fail, all others go on
        else:
            scheduler.update(step, sampled)
        for sequence in scheduler.take_finished(): …

The rules, and why no request starves:

Order.       By priority, then by arrival. Sequences are admitted strictly in this order, across precisions: no one is
    let in past another who waits for pages. (So a flood of urgent requests does hold up the others: that is what
    priority means.) Being let in means having the pages for all tokens so far, while `watermark` pages for every
    running sequence stay available, so that who comes in does not throw anyone out at once. More of them: fewer
    preemptions, smaller batches. (300 requests on 600 pages of 16: 28% of the tokens run twice at 0, 10% at 1 with 1%
    more steps, 3% at 2 with 4% more.)
A step.      Every running sequence that decodes runs 1 token; prompts get what is left of the token budget, in order,
    in chunks of any size. Since at most `max_batch` sequences run and the budget is no smaller, the first unfinished
    prompt always gets at least one token. A prompt whose next page is just being computed by an earlier one sits out
    the step and takes the page over in the next.
Precisions.  A step runs one precision. Of those with running sequences it is the one whose last step is longest ago:
    with k precisions each gets every k-th step, however many sequences it has. A step costs about the same whatever
    its batch, so this shares out time, not tokens.
Preemption.  When decoding needs more pages than there are, the last in order gives all of its pages back, at whatever
    precision, and waits in its place in the order. It keeps its tokens; they are its prompt when it comes back, and
    what it left in the prefix cache is found again unless it was evicted.
So the first in order among the running is never preempted and advances in each step of its precision; alone it always
fits, because what could not is refused at submission; hence it finishes, and so does the next.

Ahead.       A step may end before its tokens are known: `update` takes UNKNOWN for them, the next step is chosen on
    lengths alone, and `resolve` fills in the tokens while that step runs. Where one ends its sequence, what the step
    computes for it is dropped: `update` skips it, and pages that were released are written before any other sequence's
    step, since steps run in order.

Drafts.      In a step without prompts, `lookahead` may ask for room for tokens that are guessed: a sequence then runs
    its last token and these, and `update` takes those that were right and the one sampled. They get pages that are
    available, never those of another sequence, and give them back after the step: who is admitted or preempted does
    not depend on them.

Faults.      Whatever is raised in here leaves the lists and the pages in an unknown state. `salvage` ends that: every
    sequence that has begun fails, those that only wait stay, all pages are free. `submit`, `finish` and `take_finished`
    either do their work or can be called again.

Nothing here is thread-safe except `Request.cancel`; one step is under way at a time.
"""

from bisect import insort
from collections import abc
from dataclasses import dataclass, replace
from itertools import chain, count
from operator import attrgetter
from typing import NamedTuple

from crelle.engine.block_manager import BlockManager, Copy, Key
from crelle.engine.requests.sequence import Reason, Request, Sequence, State
from crelle.errors import CapacityError, SchemeError

UNKNOWN = -1  # a token that was sampled, but did not arrive yet
MAX_SCORED = 128  # tokens of a step that logits are wanted of: 80 MB with a vocabulary of 152,000
_QUEUED = (State.WAITING, State.PREEMPTED)
_order = attrgetter("order")
_NONE_ACCEPTED: abc.Mapping[Sequence, int] = {}
Lookahead = abc.Callable[[list[Sequence]], abc.Mapping[Sequence, int]]  # of those that decode: tokens to guess


class ScheduledChunk(NamedTuple):
    """Run over the tokens ids[start:end] of a sequence and store their keys and values in its pages."""

    sequence: Sequence
    start: int
    end: int
    samples: tuple[Sequence, ...]  # sample a token from the last logits: none within a prompt, n after it
    lookahead: int = 0  # tokens after `end` that there is room for
    draft: tuple[int, ...] = ()  # the tokens guessed for them; logits are wanted of each

    @property
    def ids(self) -> list[int]:
        return [*self.sequence.ids[self.start : self.end], *self.draft]

    @property
    def pages(self) -> list[int]:
        return self.sequence.table.pages

    @property
    def scored(self) -> bool:
        """Whether the logits of all of its tokens are wanted, which are the prompt's."""
        request = self.sequence.request
        return request.scored and self.end <= len(request.prompt)


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the model. False when there is nothing to do."""

    precision: int | None
    chunks: tuple[ScheduledChunk, ...]  # those of one token first
    copies: tuple[Copy, ...]  # before anything else; no page is in two of them, except as the source of several
    preempted: tuple[Sequence, ...]

    def __bool__(self) -> bool:
        return bool(self.chunks)

    @property
    def tokens(self) -> int:
        return sum(chunk.end - chunk.start + len(chunk.draft) for chunk in self.chunks)

    @property
    def drafted(self) -> int:
        """How many of the tokens are guessed."""
        return sum(len(chunk.draft) for chunk in self.chunks)

    @property
    def prefills(self) -> bool:
        """Whether some of the tokens are a prompt's, or a chunk of one."""
        return bool(self.chunks) and self.chunks[-1].end - self.chunks[-1].start > 1

    @property
    def scored(self) -> bool:
        """Whether logits of prompts are wanted."""
        return any(chunk.scored for chunk in self.chunks)

    @property
    def samples(self) -> tuple[Sequence, ...]:
        """The sequences that get a token, in the order in which `update` expects them."""
        return tuple(s for chunk in self.chunks for s in chunk.samples)


class Scheduler:
    """First come, first served, as many as fit."""

    def __init__(self, blocks: BlockManager, *, context: int, max_batch: int, budget: int, watermark: int = 1) -> None:
        """Store the limits: tokens of a sequence, sequences at once, tokens of a step; `watermark`: see above."""
        if max_batch < 1 or budget < max_batch:
            raise SchemeError(
                f"max_batch must be at least 1 and at most the token budget, got {max_batch} and {budget}"
            )
        self.blocks, self.context, self.watermark = blocks, context, watermark
        self.max_batch, self.budget = max_batch, budget
        self._waiting: list[Sequence] = []  # both in order
        self._running: list[Sequence] = []
        self._finished: list[Sequence] = []
        self._last_turn: dict[int | None, int] = {}
        self._arrivals, self._turns = count(), count()
        self._under_way: Step | None = None
        self.lookahead: Lookahead = lambda decoding: {}

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> list[Sequence]:
        """Queue a request, or say why it can never be served; return its n sequences."""
        self.prepare(request)
        self.enqueue(request)
        return request.sequences

    def prepare(self, request: Request) -> list[Sequence]:
        """Make a request's n sequences, or say why it can never be served; nothing is queued. From any thread."""
        assert request.arrival < 0, "a request is submitted once"
        prompt = len(request.prompt)
        if prompt >= self.context:
            raise CapacityError(
                f"the prompt has {prompt} tokens, but the model's context of {self.context} must also hold one "
                "new token; "
                "shorten the prompt"
            )
        if request.n > self.max_batch:
            raise CapacityError(
                f"n is {request.n}, but at most {self.max_batch} sequences can run concurrently; lower n"
            )
        limit = min(prompt + request.sampling.max_tokens, self.context)
        need = self.blocks.pages_for(limit - 1)  # the last token is sampled, not stored
        if need > self.blocks.max_pages:
            raise CapacityError(
                f"a prompt of {prompt} tokens and up to {limit - prompt} new tokens need {need} pages of "
                f"{self.blocks.page} tokens, but the whole cache has {self.blocks.max_pages}; shorten the prompt, "
                "lower max_tokens or give the cache more memory"
            )
        root = (request.precision, request.cache_salt), prompt if request.prefill_differs else None
        request.sequences = [Sequence(request, i, limit, self.blocks.table(*root)) for i in range(request.n)]
        return request.sequences

    def enqueue(self, request: Request) -> None:
        """Queue a request whose sequences were made; the last thing in here is the one that counts."""
        assert request.arrival < 0, "a request is submitted once"
        request.arrival = next(self._arrivals)
        first, *first.forks = request.sequences
        insort(self._waiting, first, key=_order)

    def withdraw(self, request: Request) -> None:
        """Undo `enqueue`, or what there is of it; no step has been chosen since."""
        self._waiting = [s for s in self._waiting if s.request is not request]

    def missing_pages(self) -> int:
        """Count the pages that are missing for one more token of all who run, and for the first that waits."""
        if not self._waiting and self.blocks.available >= 2 * len(self._running):  # a new page and a copy for each
            return 0
        need = self.blocks.need([(s.table, len(s.ids)) for s in self._running])
        need += self.blocks.pages_for(len(self._waiting[0].ids)) if self._waiting else 0
        return max(0, need - self.blocks.available)

    # A step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose the next step; it is empty only when no work is left. End it with `update` or `abort`."""
        assert self._under_way is None, "the last step is still under way"
        for s in [s for s in chain(self._running, self._waiting) if s.request.cancelled]:
            self.cancel(s.request)
        self._admit()
        preempted: list[Sequence] = []
        groups: dict[int | None, list[Sequence]] = {}
        for s in self._running:
            groups.setdefault(s.precision, []).append(s)
        for precision in sorted(groups, key=lambda p: self._last_turn.get(p, -1)):  # else as their first ones came
            copies, chunks = self._decode(groups[precision], preempted)
            chunks += self._prefill(groups[precision], self.budget - sum(1 + chunk.lookahead for chunk in chunks))
            if chunks:  # else all of this precision were preempted for others
                chunks.sort(key=lambda chunk: chunk.end - chunk.start > 1)
                self._last_turn[precision] = next(self._turns)
                self._under_way = Step(precision, tuple(chunks), tuple(copies), tuple(preempted))
                return self._under_way
        assert not self.unfinished
        return Step(None, (), (), ())

    def assume_prompts(self) -> None:
        """Let in who fits, and take their prompts but for the last token as computed: to measure decoding alone."""
        assert self._under_way is None, "the last step is still under way"
        assert not self.blocks.sharing, "what was not computed must not be found by others"
        self._admit()
        for s in self._running:
            self.blocks.commit(s.table, s.ids, max(s.computed, len(s.ids) - 1))

    def _admit(self) -> None:
        while self._waiting:
            s, slots = self._waiting[0], sum(r.slots for r in self._running)
            if slots + s.slots > self.max_batch or not self.blocks.open(s.table, s.ids, self.watermark * slots):
                return
            s.reused += s.computed
            s.state = State.RUNNING
            insort(self._running, self._waiting.pop(0), key=_order)

    def _decode(self, group: list[Sequence], preempted: list[Sequence]) -> tuple[list[Copy], list[ScheduledChunk]]:
        """One token for each that decodes. First all pages are found, then copies are planned: they never collide."""
        decoding = [s for s in group if s.state is State.RUNNING and s.remaining == 1]
        while self.blocks.need((s.table, len(s.ids)) for s in decoding) > self.blocks.available:
            last = self._running.pop()
            self.blocks.release(last.table)
            last.state = State.PREEMPTED
            last.preemptions += 1
            insort(self._waiting, last, key=_order)
            preempted.append(last)
            decoding = [s for s in decoding if s is not last]
        more = self._look_ahead(group, decoding)
        copies = [copy for s in decoding for copy in self.blocks.grow(s.table, len(s.ids) + more.get(s, 0))]
        return copies, [_chunk(s, 1, more.get(s, 0)) for s in decoding]

    def _look_ahead(self, group: list[Sequence], decoding: list[Sequence]) -> abc.Mapping[Sequence, int]:
        """Return how many tokens may be guessed for some sequences, as far as pages and limits allow."""
        if not decoding or any(s.state is State.RUNNING and s.remaining > 1 for s in group):
            return {}
        room = self.budget - len(decoding)
        more = dict[Sequence, int]()
        for s, wanted in self.lookahead(decoding).items():
            most = s.limit - 1 - len(s.ids) if s.answering else 0  # the last token is sampled after them
            if (n := min(wanted, room, most)) > 0:
                more[s], room = n, room - n
        while more and self.blocks.need((s.table, len(s.ids) + more.get(s, 0)) for s in decoding) > (
            self.blocks.available
        ):
            more.popitem()
        return more

    def _prefill(self, group: list[Sequence], budget: int) -> list[ScheduledChunk]:
        """Share out tokens to prompts; their pages are there already."""
        chunks: list[ScheduledChunk] = []
        coming: set[Key] = set()  # pages that this step will compute
        scored = MAX_SCORED
        for s in group:
            if budget == 0:
                break
            if s.state is not State.RUNNING or s.remaining == 1:
                continue
            s.reused += self.blocks.adopt(s.table, s.ids)
            if key := self.blocks.next_key(s.table, s.ids) if self.blocks.sharing else None:
                if key in coming:
                    continue
                coming.add(key)
            most = min(budget, scored) if s.request.scored else budget
            if most == 0:
                continue
            chunks.append(_chunk(s, min(s.remaining, most)))
            tokens = chunks[-1].end - chunks[-1].start
            budget -= tokens
            scored -= tokens if s.request.scored else 0
        return chunks

    def propose(self, drafts: abc.Mapping[Sequence, abc.Sequence[int]]) -> Step:
        """Put guessed tokens into the step under way, for sequences that have room for them."""
        assert self._under_way is not None
        chunks = tuple(
            chunk._replace(draft=tuple(drafts.get(chunk.sequence, ()))[: chunk.lookahead]) if chunk.lookahead else chunk
            for chunk in self._under_way.chunks
        )
        self._under_way = replace(self._under_way, chunks=chunks)
        return self._under_way

    def update(
        self, step: Step, sampled: abc.Sequence[int], accepted: abc.Mapping[Sequence, int] = _NONE_ACCEPTED
    ) -> None:
        """End a step that succeeded; `sampled` has a token for each of `step.samples`.

        accepted: how many tokens of a sequence's draft come before it; none of them ends the sequence.
        """
        assert step is self._under_way
        tokens = dict(zip(step.samples, sampled, strict=True))
        self._under_way = None
        for chunk in step.chunks:
            first = chunk.sequence
            if first.finished:  # cancelled meanwhile
                continue
            right = accepted.get(first, 0)
            first.ids += chunk.draft[:right]
            first.drafted += len(chunk.draft)
            first.accepted += right
            self.blocks.commit(first.table, first.ids, chunk.end + right)
            if chunk.lookahead:
                self.blocks.trim(first.table)
            if chunk.samples:
                for fork in first.forks:
                    fork.table, fork.reused, fork.state = self.blocks.fork(first.table), chunk.end, State.RUNNING
                    insort(self._running, fork, key=_order)
                first.forks = []
            for s in chunk.samples:
                if reason := s.push(tokens[s]):
                    self._end(s, reason)

    def resolve(self, s: Sequence, token: int) -> bool:
        """Fill in a token that `update` got as UNKNOWN, in the step after; False: the sequence had ended before it.

        UNKNOWN again: it is lost, and the caller will end the sequence.
        """
        if s.ids[-1] != UNKNOWN:
            return False
        s.ids.pop()
        if token in s.request.end_ids:
            if not s.finished:
                self._end(s, "stop")
            elif s.reason == "length":
                s.reason = "stop"
        elif token != UNKNOWN:
            s.ids.append(token)
        return True

    def trim(self) -> Step:
        """Drop from the step under way what has ended since it was chosen."""
        assert self._under_way is not None
        chunks = tuple(chunk for chunk in self._under_way.chunks if not chunk.sequence.finished)
        self._under_way = replace(self._under_way, chunks=chunks)
        return self._under_way

    def abort(self, step: Step, error: BaseException) -> None:
        """End a step that raised: its sequences, and those that wait to be forked from them, fail; no others."""
        assert step is self._under_way
        self._under_way = None
        for chunk in step.chunks:
            if not chunk.sequence.finished:
                forks, chunk.sequence.forks = chunk.sequence.forks, []
                for s in (chunk.sequence, *forks):
                    self._end(s, "error", error)

    # Ends ----------------------------------------------------------------------------------------------------------

    def cancel(self, request: Request) -> None:
        """End all of a request's sequences now and free their pages; also while a step is under way."""
        request.cancelled = True
        for s in request.sequences:
            s.forks = []
        for s in request.sequences:
            if not s.finished:
                self._end(s, "cancelled")

    def finish(self, sequence: Sequence, reason: Reason = "stop") -> None:
        """End one sequence for a reason that ids do not show (stop string, time limit); no step samples for it now."""
        if sequence.finished:
            return
        for s in sequence.request.sequences:
            s.forks = [fork for fork in s.forks if fork is not sequence]
        if sequence.forks:  # the next of the request does its work
            fork, *others = sequence.forks
            insort(self._waiting, fork, key=_order)
            fork.forks, sequence.forks = others, []
        self._end(sequence, reason)

    def take_finished(self) -> list[Sequence]:
        """Return what finished since the last call, for whatever reason: each sequence once."""
        done, self._finished = self._finished, []
        return done

    def salvage(self, sequences: abc.Iterable[Sequence], error: BaseException) -> None:
        """Start anew after a fault in here; `sequences`: all that were submitted and not taken as finished.

        Who has begun fails, since its pages may hold anything; who only waits stays.
        """
        waiting = [s for s in dict.fromkeys(self._waiting) if s.state in _QUEUED and s.ids[-1] != UNKNOWN]
        stay = {s for first in waiting for s in (first, *first.forks)}
        self._under_way, self._running, self._waiting = None, [], waiting
        self.blocks.reset()
        for s in sequences:
            s.table.pages.clear()
            s.table.length = 0
            if s not in stay and not s.finished:
                s.forks = []
                s.state, s.reason, s.error = State.FINISHED, "error", error
                self._finished.append(s)

    def clear(self) -> None:
        """Forget all sequences, those that wait and those that finished; after `salvage`, for an end."""
        self._waiting, self._finished = [], []

    def _end(self, s: Sequence, reason: Reason, error: BaseException | None = None) -> None:
        """End a sequence. Its state changes last: a call that was interrupted can be repeated."""
        assert not s.forks
        for queue in (self._running, self._waiting):
            if s in queue:
                queue.remove(s)
        self.blocks.release(s.table)
        s.state, s.reason, s.error = State.FINISHED, reason, error
        self._finished.append(s)


def _chunk(s: Sequence, tokens: int, lookahead: int = 0) -> ScheduledChunk:
    end = s.computed + tokens
    return ScheduledChunk(s, s.computed, end, (s, *s.forks) if end == len(s.ids) else (), lookahead)
