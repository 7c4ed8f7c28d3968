"""Continuous batching. docs/notes/engine.md follows a request from arrival to its last event.

    engine = Engine(llm, memory="24GB")
    handles = [engine.add(prompt, Sampling(max_tokens=64)) for prompt in prompts]
    engine.run()                                        # or: for event in handles[0]: …  which steps as far as needed
    texts = [handle.outputs[0].completion.text for handle in handles]

A step is: the scheduler chooses (under a lock), the runner computes (without it: requests may come in meanwhile), each
sequence samples its token with its own sampler, the scheduler takes note. On a GPU, as long as all sample greedily, the
next step is chosen and started before the tokens of the last one are here (`Scheduler`, "Ahead"): the device never
waits for Python. Where tokens are guessed (crelle.engine.speculation), a step verifies several of a sequence: its
sampler takes a token from the logits of each in turn, as long as it takes what was guessed. Such a step needs the
tokens of the last one. If all sample greedily, it is started as well, its tokens come from the device at once, and what
they mean as text is worked out while the next step runs.

Whatever is thrown, BaseException included, every sequence gets exactly one last event and no page is lost:

    add                     everything is built before the request is queued: nothing is left of one that raised
    the runner              exactly the sequences of the step fail (`_abort`)
    sampler, detokenizer    that sequence fails: `_doom` notes why, `_reap` tells the scheduler
    callback                its request is cancelled (`Handle.put`)
    scheduler, and the rest all sequences that have begun fail, those that wait stay (`Scheduler.salvage`)

The engine stops (`stop`: all sequences fail, and it takes no more requests) after two faults of its own code in a row,
after FAILED_STEPS failed runs of the model without a good one between them, and at once when the CUDA context is lost:
whoever owns the process then starts another one.

`_deliver` is the only place where a last event is made. KeyboardInterrupt and SystemExit do the same, and are raised
again at the end of the step where the caller's own thread steps the engine.

`AsyncEngine` runs an engine in a thread of its own: what a server needs. Any number of engines, services and calls of
LLM.generate may work on one LLM at once: a step holds `LLM.lock`.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from threading import Lock, RLock, Thread

from torch import Tensor

from crelle.engine.block_manager import BlockManager
from crelle.engine.faults import OWN_FAULT, Faults
from crelle.engine.loaded_model import LoadedModel, Prompt
from crelle.engine.memory.defaults import choose_plan
from crelle.engine.memory.experts import expert_uses
from crelle.engine.memory.machine import out_of_memory
from crelle.engine.memory.plan import show_bytes
from crelle.engine.model_runner import ModelRunner
from crelle.engine.requests.admission import MAX_LOGPROBS, require_possible
from crelle.engine.requests.handle import Handle
from crelle.engine.requests.output import OnEvent, OutputState, PromptLogprobs, QueueFullError
from crelle.engine.requests.sequence import Reason, Request, Sequence
from crelle.engine.sampling.grammar import GrammarSpec
from crelle.engine.sampling.sampler import Sampler, Sampling, not_finite
from crelle.engine.sampling.stop_filter import StopFilter
from crelle.engine.sampling.verify import SampledToken, Verified, accept, sample_drafts
from crelle.engine.scheduler import UNKNOWN, Scheduler, Step
from crelle.engine.speculation.draft_model import DraftModel
from crelle.engine.speculation.settings import Speculation, chosen_speculation
from crelle.engine.speculation.speculator import Speculator
from crelle.engine.stats import Stats, StepClock
from crelle.engine.tokenization.tokenizer import Detokenizer
from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.step.graph_inputs import PendingTokens

__all__ = ["MAX_LOGPROBS", "Engine", "Handle", "Stats"]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that was started."""

    step: Step
    pending: PendingTokens  # a token for each sequence that samples, and one after each token of its draft
    overlaps: bool  # it was started before the tokens of the one before it were known
    captured: bool  # graphs were captured to start it


_Known = list[tuple[Sequence, list[int]]]  # tokens that sequences have, but that are not text yet


class Engine:
    """Continuous batching over one model and one paged cache."""

    def __init__(
        self,
        llm: LoadedModel,
        *,
        kv: KVFormat | str | int | None = None,
        memory: str | int | None = None,
        pages: int | None = None,
        max_pages: int | None = None,
        max_batch: int | None = None,
        budget: int | None = None,
        watermark: int = 1,
        sharing: bool = True,
        queue_limit: int | None = None,
        batch_invariant: bool | None = None,
        speculate: Speculation | str | None = None,
    ) -> None:
        """Allocate the cache.

        kv: how it stores keys and values; default: as the LLM was loaded.
        memory: a budget like 24GB for weights, working space and cache; or pages: of the cache. Default: the limit that
            the LLM was loaded with, else what fits the machine (memory.defaults).  max_pages: to which the cache grows
            where `pages` do not suffice.
        max_batch: sequences that run at once.  budget: tokens of a step. Defaults: what fits the memory; with `pages`
            32 and 512.  watermark: see Scheduler.  sharing: see BlockManager.
        queue_limit: sequences that may wait; one more is refused.
        batch_invariant: see crelle.models.eager_executor.
        speculate: off, ngram or draft (Speculation.parse); default: as the LLM was loaded, else default_speculation.
        """
        if memory is not None and pages is not None:
            raise SchemeError("give either a memory limit or a number of pages, not both")
        memory = llm.memory if memory is None and pages is None else memory
        self.llm, self.kv = llm, llm.kv if kv is None else KVFormat.parse(kv)
        several = memory is not None or (pages is None and llm.model.device.type == "cuda")
        models = [llm.model] + ([llm.at(bits) for bits in llm.precisions] if several else [])
        limits = {"memory": memory, "pages": pages, "max_batch": max_batch, "budget": budget}
        invariant = llm.model.device.type == "cpu" if batch_invariant is None else batch_invariant
        wanted, self.speculation_reason = chosen_speculation(
            llm.speculation if speculate is None else speculate, batch_invariant=invariant, draft=llm.draft is not None
        )
        draft = llm.draft if wanted.method == "draft" else None
        self.plan = choose_plan(models, self.kv, draft=draft and draft.model, **limits)  # type: ignore[arg-type]
        self.blocks = BlockManager(self.plan.pages, self.kv.page, sharing=sharing, max_pages=max_pages)
        self.scheduler = Scheduler(
            self.blocks,
            context=llm.model.spec.context,
            max_batch=self.plan.max_batch,
            budget=self.plan.budget,
            watermark=watermark,
        )
        try:
            self.runner = ModelRunner(llm, self.kv, self.plan.pages, batch_invariant=invariant)
            sizes = llm.model.spec.vocabulary, self.plan.pages, self.kv.page
            # A GPU's draft model runs as fast as it can: answers do not depend on its bits.
            bits_matter = invariant and llm.model.device.type == "cpu"
            drafts = None if draft is None else DraftModel(draft, *sizes, batch_invariant=bits_matter)
        except (RuntimeError, MemoryError) as e:
            if not out_of_memory(e):
                raise
            raise CapacityError(
                f"the cache of {show_bytes(self.plan.cache)} cannot be allocated: {self.plan}"
            ) from None
        self.speculator = Speculator(wanted, drafts)
        self.scheduler.lookahead = self.speculator.lookahead
        self.queue_limit = queue_limit
        self.thread: Thread | None = None  # which steps the engine, where it has one: see AsyncEngine
        self.on_work: Callable[[], None] | None = None  # called when a request comes
        self.stopped: BaseException | None = None  # what ended it; it takes no more requests then
        self.stop_reason: str | None = None  # the same in words, without what an exception quotes
        self._active: dict[Sequence, tuple[Handle, OutputState]] = {}  # all that have not had their last event
        self._doomed: list[Sequence] = []  # have a verdict that the scheduler does not know yet
        self._done: deque[Sequence] = deque()  # finished, and the last event is due
        self._ahead: _Ahead | None = None  # the step that was started last, where its tokens are not known yet
        self._faults = Faults(lambda: self.thread)
        self._lock, self._stepping = RLock(), Lock()
        counted = ("steps", "run", "sampled", "reused", "preemptions", "finished", "failed", "drafted", "accepted")
        self._counts = dict.fromkeys(counted, 0)
        self._clock = StepClock()

    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        bits: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        priority: int = 0,
        cache_salt: Hashable = None,
        ignore_end: bool = False,
        grammar: GrammarSpec | None = None,
        speculate: bool = True,
        on_event: OnEvent | None = None,
    ) -> Handle:
        """Queue a request, or say why it can never be served. From any thread, also while a step is under way.

        n: sequences to sample.  bits: precision of a nested checkpoint.  logprobs: how many likely tokens come with
        each one sampled (0: only its own).  prompt_logprobs: with each one of the prompt, which is then computed anew.
        priority: smaller goes first.  cache_salt: prefixes are shared only among requests with the same one.
        ignore_end: continue past the model's end tokens, up to max_tokens; for measurements.  grammar: what each answer
        must match.  speculate: False: guess no tokens for this request.
        on_event: called with each event between steps, in the thread that steps; it should return at once.
        """
        sampling = sampling or Sampling()
        self._require_room()
        ids = self.llm.encode(prompt)
        require_possible(self.llm, sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        if (
            bits is not None and self.llm.at(bits) is self.llm.model
        ):  # the same model: one precision for the scheduler, not two
            bits = None
        compiled = None if grammar is None else self.llm.grammars.compile(grammar)
        request = Request(
            prompt=tuple(ids),
            sampling=sampling,
            n=n,
            precision=bits,
            end_ids=frozenset() if ignore_end else self.llm.end_ids,
            priority=priority,
            cache_salt=cache_salt if prompt_logprobs is None else (cache_salt, object()),
            prefill_differs=self.runner.prefill_differs(bits),
            scored=prompt_logprobs is not None,
            speculate=speculate,
        )
        scores = None if prompt_logprobs is None else PromptLogprobs(ids, prompt_logprobs)
        handle, sequences = Handle(request, on_event, self), dict[Sequence, tuple[Handle, OutputState]]()
        for s in self.scheduler.prepare(request):
            sampler = self._sampler(replace(sampling, seed=s.seed), len(ids), request.end_ids)
            text = StopFilter(Detokenizer(self.llm.tokenizer, ids), sampling.stop, sampling.min_tokens)
            state = None if compiled is None else compiled.start()
            sequences[s] = handle, OutputState(s.index, len(ids), sampler, text, logprobs, scores, state)
        with self._lock:
            self._require_room()
            try:
                self._active.update(sequences)
                if self.on_work is not None:
                    self.on_work()  # who wakes up now waits for the lock
                self.scheduler.enqueue(request)
            except BaseException:
                self.scheduler.withdraw(request)
                for s in sequences:
                    self._active.pop(s, None)
                raise
        return handle

    def _sampler(self, sampling: Sampling, prompt_tokens: int, end_ids: frozenset[int]) -> Sampler:
        """Return a sampler, whose generator of random numbers lies on the device."""
        try:
            return Sampler(sampling, prompt_tokens, end_ids)
        except BaseException as e:
            if self._faults.is_fatal(e) and self.on_work is not None:
                self.on_work()  # no step may be due, but the engine must stop
            raise

    def _require_room(self) -> None:
        """Say why no request is taken now, if so."""
        if self.stopped is not None:
            raise CapacityError(f"the engine has stopped: {self.stopped}")
        waiting = len(self.scheduler.waiting)
        if self.queue_limit is not None and waiting >= self.queue_limit:
            raise QueueFullError(
                f"the queue is full: {waiting} requests are waiting (limit {self.queue_limit}); try again later"
            )

    def warm_up(self) -> None:
        """Capture what decoding a sequence launches on a GPU, drafts included, so that no request waits for it."""
        with self._stepping, self.llm.lock:
            if (executor := self.runner.cuda_executor(None)) is not None:
                executor.graph(1)
                self.speculator.prepare(None, executor)

    def reserve(self, pages: int) -> None:
        """Let the cache grow to so many pages, within `max_pages`, unless it has them."""
        with self._stepping:
            self._grow(pages - self.blocks.pages)

    @property
    def driven(self) -> bool:
        """Whether a thread of its own steps it; else those who want events do."""
        return self.thread is not None and self.thread.is_alive()

    def cancel_all(self) -> None:
        """Ask for an end of everything; the next step hands it out."""
        with self._lock:
            for s in self._active:
                s.request.cancel()

    @property
    def stats(self) -> Stats:
        with self._lock:
            n, s, b = self._counts, self.scheduler, self.blocks
            now = (len(s.waiting), len(s.running), b.pages, b.used, b.cached)
        more: dict[str, float] = {"prefill_seconds": self._clock.prefill, "decode_seconds": self._clock.decode}
        more["expert_uses"], more["expert_hits"] = expert_uses(self.llm.model)
        return replace(Stats(*now, *n.values()), **more)  # type: ignore[arg-type]

    # Steps ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until no work is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Run one step and hand out its events; False when there was nothing to do.

        Where tokens can be taken on the GPU, the step is only started, and the one before it is handed out meanwhile.
        """
        with self._stepping, self._clock.running():
            worked = self.stopped is None and self._guarded()
            leave, self._faults.quit = self._faults.quit, None
        if leave is not None:
            raise leave
        return worked

    def _guarded(self) -> bool:
        """Run a step; what is raised here is a fault of the bookkeeping, and does not leave."""
        worked, fault = True, None
        try:
            worked = self._faults.fatal is None and self._advance()
        except BaseException as e:
            fault = e
            self._salvage(e)
        try:
            self._hand_out(idle=not worked)
        except BaseException as e:
            fault = fault or e
        if fault is None:
            self._faults.strikes = 0
        else:
            self._faults.bookkeeping_failed(fault)
        if self._faults.fatal is not None and self.stopped is None:
            self.stop(*self._faults.fatal)
        return worked or bool(self._active)

    def _advance(self) -> bool:
        before, self._ahead = self._ahead, None
        worked, known = before is not None, _Known()
        if before and (before.step.drafted or self._looks(before.step)):
            known, before = self._settle(before), None
        try:
            with self._lock:
                if before:
                    self.scheduler.update(before.step, [UNKNOWN] * len(before.step.samples))
                missing = self.scheduler.missing_pages() if self.blocks.pages < self.blocks.max_pages else 0
            if before and missing:
                self._resolve(before)  # its tokens lie with an executor that does not outlive the old pages
                before = None
            if missing:
                self._grow(max(missing, self.blocks.pages))  # twice as many: copied once for each token at most
            with self._lock:
                step = self.scheduler.schedule()
            if step:
                self._count(step)
                self._run(step, before, known)
            elif before:
                self._resolve(before)
        finally:
            self._hand_on(known)
        return worked or bool(step)

    @property
    def _captures(self) -> int:
        """How many graphs there are, those of a draft model included."""
        draft = self.speculator.draft
        return self.runner.captures + (0 if draft is None else draft.captures)

    def _looks(self, step: Step) -> bool:
        """Whether the step after one that was started may have drafts, for which the tokens of this one are needed."""
        if not self.speculator.guesses(len(step.samples)):
            return False
        others = set(self.scheduler.running).difference(step.samples)
        if any(s.precision == step.precision for s in others):  # a prompt: no drafts beside it
            return False
        return self.speculator.looks(step.samples)

    def _grow(self, more: int) -> None:
        if (more := min(more, self.blocks.max_pages - self.blocks.pages)) < 1:
            return
        with self.llm.lock:
            self.runner.grow(self.blocks.pages + more)
            if self.speculator.draft is not None:
                self.speculator.draft.grow(self.blocks.pages + more)
        with self._lock:
            self.blocks.grow_pool(more)
            self.plan = replace(self.plan, pages=self.blocks.pages)

    def _run(self, step: Step, before: _Ahead | None, known: _Known) -> None:
        """Start a step and end the one before it; or end that one first and then run this one."""
        started, captures = None, self._captures
        try:
            with self.llm.lock:
                if self.speculator.guesses(len(step.samples)):
                    self.speculator.prepare(step.precision, self.runner.executor(step.precision))
                if self._starts(step):
                    drafts = self.speculator.fill(step)
                    step = self.scheduler.propose(drafts) if drafts else step
                    started = self.runner.start(step)
        except BaseException as e:
            if before:
                self._resolve(before)
            self._hand_on(known)
            self._abort(step, e)
            return
        if before:
            self._resolve(before)
        if started is not None:
            self._ahead = _Ahead(step, started, before is not None, captures != self._captures)
            return
        if before or known:
            self._hand_on(known)
            self._reap()
            with self._lock:
                step = self.scheduler.trim()
        try:
            with self.llm.lock:
                drafts = self.speculator.fill(step)
                step = self.scheduler.propose(drafts) if drafts else step
                sampled = self._sample(step, self.runner.run(step)) if step else []
                self._score(step)
        except BaseException as e:
            self._abort(step, e)
            return
        if step:
            self._faults.failed_runs = 0
        accepted = {s: len(tokens) - 1 for s, tokens in zip(step.samples, sampled, strict=True) if len(tokens) > 1}
        self._ended(step, accepted, usual=captures == self._captures)
        with self._lock:
            self.scheduler.update(step, [tokens[-1].token for tokens in sampled], accepted)
        for s, tokens in zip(step.samples, sampled, strict=True):
            try:
                for found in tokens:
                    self._push(s, found, last=found is tokens[-1])
            except BaseException as e:
                self._doom(s, "error", e)

    def _ended(
        self, step: Step, accepted: Mapping[Sequence, int], *, usual: bool, overlaps: bool | None = None
    ) -> None:
        """Count a step that ended; usual: its time is that of others, no graph was captured.

        overlaps: of one that was started, whether that was before the tokens of the last one were known.
        """
        seconds = self._clock.ended(step.prefills)
        self.speculator.note(step, accepted, seconds if usual else None, overlaps)
        right = sum(accepted.values())
        for name, by in {"run": step.drafted, "sampled": right, "drafted": step.drafted, "accepted": right}.items():
            self._counts[name] += by

    def _starts(self, step: Step) -> bool:
        """Whether all sequences of a step sample greedily, and the device can."""
        return all(self._active[s][1].fast for s in step.samples) and not step.scored and self.runner.starts(step)

    def _settle(self, ahead: _Ahead) -> _Known:
        """Wait for the tokens of a step that was started, and end it with them; return them."""
        step, known, accepted, sampled = ahead.step, _Known(), dict[Sequence, int](), list[int]()
        try:
            with self.llm.lock:
                tokens = ahead.pending.tokens()
        except BaseException as e:
            self._abort(step, e)
            return known
        self._faults.failed_runs = 0
        for chunk, s in ((c, s) for c in step.chunks for s in c.samples):
            own, tokens = tokens[: 1 + len(chunk.draft)], tokens[1 + len(chunk.draft) :]
            found = accept(own, chunk.draft, s.request.end_ids, s.limit - len(s.ids))
            sampled.append(found[-1] if found else 0)
            if s.finished:  # a step before, and has been handed out: the tokens are not used
                self._counts["sampled"] -= 1
            elif found:
                accepted[s] = len(found) - 1
                known.append((s, found))
            else:
                self._doom(s, "error", not_finite(len(s.ids)))
        self._ended(step, accepted, usual=not ahead.captured, overlaps=ahead.overlaps)
        with self._lock:
            self.scheduler.update(step, sampled, accepted)
        return known

    def _hand_on(self, known: _Known) -> None:
        """Make text of tokens that are known, and forget them here."""
        while known:
            s, tokens = known.pop(0)
            try:
                for i, token in enumerate(tokens, 1):
                    state = self._active[s][1]
                    token = state.take(token, _not_looked_at, len(s.ids))
                    self._push(s, SampledToken(token, state.pending), last=i == len(tokens))
            except BaseException as e:
                self._doom(s, "error", e)

    def _resolve(self, ahead: _Ahead) -> None:
        """Wait for the tokens of a step whose end the scheduler knows, and hand them on; negative: not finite."""
        step, lost = ahead.step, None
        try:
            with self.llm.lock:
                tokens = ahead.pending.tokens()
            self._faults.failed_runs = 0
        except BaseException as e:
            tokens, lost = [UNKNOWN] * len(step.samples), e
            self._faults.run_failed(e)
        self._ended(step, {}, usual=not ahead.captured and lost is None, overlaps=ahead.overlaps)
        for s, token in zip(step.samples, tokens, strict=True):
            try:
                with self._lock:
                    there = self.scheduler.resolve(s, token if token >= 0 else UNKNOWN)
                if not there:  # it ended a step before, and has been handed out: the token is not used
                    self._counts["sampled"] -= 1
                    continue
                if token < 0:
                    raise lost or not_finite(len(s.ids))
                state = self._active[s][1]
                self._push(s, SampledToken(state.take(token, _not_looked_at, len(s.ids)), state.pending))
            except BaseException as e:
                self._doom(s, "error", e)
        self._reap()

    def _sample(self, step: Step, logits: Tensor) -> list[list[SampledToken]]:
        """Return the tokens of each that samples: one, or a draft as far as it is right and the token after it.

        One that cannot sample gets any token, and is doomed.
        """
        rows = [Verified(s, self._active[s][1], chunk.draft) for chunk in step.chunks for s in chunk.samples]
        sampled = list[list[SampledToken]]()
        for row, found in zip(rows, sample_drafts(logits, rows), strict=True):
            if isinstance(found, BaseException):
                self._doom(row.sequence, "error", found)
            sampled.append([SampledToken(0)] if isinstance(found, BaseException) else found)
        return sampled

    def _score(self, step: Step) -> None:
        """Note the log-probabilities of the prompts that ran with a step."""
        for s, start, logits in self.runner.take_scored() if step.scored else ():
            try:
                if (prompt := self._active[s][1].prompt) is not None:
                    prompt.add(start, logits)
            except BaseException as e:
                self._doom(s, "error", e)

    def _push(self, s: Sequence, found: SampledToken, *, last: bool = True) -> None:
        """Detokenize a sampled token, and doom the sequence where that ends it; last: of those of the step."""
        handle, state = self._active[s]
        if state.verdict is not None or found.token in s.request.end_ids:
            return
        state.pending = found.logprob
        if (raised := handle.put(state.push(found.token))) is not None:
            self._faults.note(raised)
        if state.text.stopped or (last and state.grammar is not None and state.grammar.finished):
            self._doom(s, "stop")

    # Ends ----------------------------------------------------------------------------------------------------------

    def _abort(self, step: Step, error: BaseException) -> None:
        """Fail the sequences of a step."""
        self._faults.run_failed(error)
        with self._lock:
            self.scheduler.abort(step, error)

    def _doom(self, s: Sequence, reason: Reason, error: BaseException | None = None) -> None:
        """Note that a sequence ends here, for a reason that its ids do not show."""
        if error is not None:
            self._faults.note(error)
        if (found := self._active.get(s)) is not None and found[1].verdict is None:
            found[1].verdict = reason, error
            self._doomed.append(s)

    def _reap(self) -> None:
        """Tell the scheduler of those that are doomed; where that fails, the next step tries again."""
        for s in list(self._doomed):
            try:
                with self._lock:
                    self.scheduler.finish(s, "stop")  # `_deliver` goes by the verdict
                self._doomed.remove(s)
            except BaseException as e:
                self._faults.note(e)

    def _hand_out(self, *, idle: bool) -> None:
        """Give every finished sequence its last event; idle: the scheduler had nothing to run."""
        self._reap()
        with self._lock:
            self._done.extend(self.scheduler.take_finished())
            if idle and not self.scheduler.unfinished:  # then those left were lost in some fault
                self._done.extend(s for s in self._active if s not in self._done)
        while self._done:
            self._deliver(self._done[0])
            self._done.popleft()

    def _deliver(self, s: Sequence) -> None:
        """Make a sequence's last event and forget the sequence; a second call does nothing."""
        if (found := self._active.get(s)) is None:
            return
        handle, state = found
        reason, error = state.verdict or (s.reason or "error", s.error)
        if state.verdict is None and reason in ("stop", "length") and len(state.tokens) != len(s.new):
            reason = "error"  # a fault came between its last token and the text
        if reason == "error" and error is None:
            error = RuntimeError("a fault elsewhere in the engine ended this sequence")
        counts = {"reused": s.reused, "preemptions": s.preemptions, "drafted": s.drafted, "accepted": s.accepted}
        try:
            event = state.finish(reason, error, **counts)  # type: ignore[arg-type]
        except BaseException as e:  # in the detokenizer, say: its text is not whole, but what there is comes
            self._faults.note(e)
            if reason in ("stop", "length"):
                reason, error = "error", e
            event = state.finish(reason, error, whole=False, **counts)
        if (raised := handle.put(event)) is not None:
            self._faults.note(raised)
        with self._lock:
            self.speculator.forget(s)
            del self._active[s]
            self._counts["finished"] += 1
            self._counts["failed"] += reason == "error"
            self._counts["reused"] += s.reused

    def _salvage(self, error: BaseException) -> None:
        """Start the bookkeeping anew after a fault in it."""
        try:
            self._ahead = None
            with self._lock:
                self.scheduler.salvage(list(self._active), error)
        except BaseException:
            self.stop(error)

    def stop(self, error: BaseException, reason: str = OWN_FAULT) -> None:
        """Give every sequence a last event, with the error, and take no more requests."""
        with self._lock:
            self.stop_reason = self.stop_reason or reason
            self.stopped = error  # before all else: no request comes in
            sequences, self._ahead = list(self._active), None
            for s in sequences:
                state = self._active[s][1]
                if not s.finished and state.verdict is None:
                    state.verdict = "error", error
        for s in sequences:
            try:
                self._deliver(s)
            except BaseException as e:  # who waits for it reads in `stopped` that nothing will come
                self._faults.note(e)
        try:
            with self._lock:
                self._active.clear()
                self._doomed.clear()
                self._done.clear()
                self.scheduler.salvage(sequences, error)
                self.scheduler.clear()
        except BaseException as e:
            self._faults.note(e)

    def _count(self, step: Step) -> None:
        more = {"steps": 1, "run": step.tokens, "sampled": len(step.samples), "preemptions": len(step.preempted)}
        for name, by in more.items():
            self._counts[name] += by


def _not_looked_at() -> Tensor:
    raise AssertionError("a token that was taken on the GPU needs no logits here")
