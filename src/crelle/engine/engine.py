"""Many requests at once. docs/engine.md draws a request's life.

    engine = Engine(llm, memory="24GB")
    handles = [engine.add(prompt, Sampling(max_tokens=64)) for prompt in prompts]
    engine.run()                                        # or: for event in handles[0]: …  which steps as far as needed
    texts = [handle.outputs[0].completion.text for handle in handles]

A step is: the scheduler chooses (under a lock), the runner computes (without it: requests may come in meanwhile), each
sequence draws its token with its own sampler, the scheduler takes note. If the runner raises, exactly the sequences of
that step fail; if drawing or decoding a token of one sequence raises, that one does. On a GPU, as long as all who draw
want the likeliest token and no more, the next step is chosen and started before the tokens of the last one are here
(`Scheduler`, "Ahead"): the device never waits for Python.

`Service` runs an engine in a thread of its own: what a server needs. While it runs, the model is the engine's: the C++
step keeps its working memory in it, so LLM.generate must not run beside it in another thread.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock, RLock, Thread
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from crelle.engine.blocks import BlockManager
from crelle.engine.llm import LLM, Completion, Prompt, StopFilter
from crelle.engine.memory import page_bytes, plan
from crelle.engine.output import Event, Growing, OnEvent, Output, QueueFullError
from crelle.engine.runner import Runner
from crelle.engine.sampler import Sampler, Sampling
from crelle.engine.scheduler import UNKNOWN, Scheduler, Step
from crelle.engine.sequence import Reason, Request
from crelle.engine.sequence import Sequence as Text
from crelle.engine.tokenizer import Detokenizer
from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv import KVFormat
from crelle.models.step_buffers import Drawn

MAX_LOGPROBS = 20  # most likely tokens that can be asked for with each token
_CACHE = 4 << 30  # bytes of pages at most, where nobody gave a budget
_Ahead = tuple[Step, Drawn]


class Handle:
    """A request that was let in. Iterate over it for its events, unless it was given a callback for them."""

    def __init__(self, request: Request, on_event: OnEvent | None, pump: Callable[[], bool] | None) -> None:
        self.request = request
        self.outputs: list[Output] = []  # as they finish; complete when `finished`
        self.failure: Exception | None = None  # what the callback raised; the request is cancelled then
        self._on_event, self._pump = on_event, pump
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._left = request.n  # texts whose last event has not been taken out of it

    @property
    def finished(self) -> bool:
        return len(self.outputs) == self.request.n

    def cancel(self) -> None:
        """Ask for an end before the next step; from any thread. Every text still gets its last event."""
        self.request.cancel()

    def __iter__(self) -> Iterator[Event]:
        """Yield events until all n texts are finished. An engine without a thread of its own is stepped meanwhile."""
        while self._left:
            while self._pump and self._events.empty():
                worked = self._pump()
                assert worked or not self._events.empty(), "the engine has no work, but a text is unfinished"
            event = self._events.get()
            self._left -= event.output is not None
            yield event

    def put(self, event: Event) -> None:
        """Take note of an event; the engine's part."""
        if event.output:
            self.outputs = sorted([*self.outputs, event.output], key=lambda output: output.index)
        if self._on_event is None:
            self._events.put(event)
        elif self.failure is None:
            try:
                self._on_event(event)
            except Exception as e:
                self.failure = e
                self.cancel()


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine is doing and has done."""

    waiting: int
    running: int
    pages: int
    pages_used: int  # in texts that run
    pages_cached: int  # kept for whoever has the same prefix
    steps: int
    tokens_run: int  # the model ran over so many, prompts and repetitions after preemption included
    tokens_drawn: int
    tokens_reused: int  # found in the cache
    preemptions: int
    finished: int
    failed: int


class Engine:
    """Continuous batching over one model and one paged cache."""

    def __init__(
        self,
        llm: LLM,
        *,
        kv: KVFormat | str | int | None = None,
        memory: str | int | None = None,
        pages: int | None = None,
        max_batch: int = 32,
        budget: int = 512,
        spare: int = 1,
        sharing: bool = True,
        queue_limit: int | None = None,
        exact: bool | None = None,
    ) -> None:
        """Allocate the cache.

        kv: how it stores keys and values; default: as the LLM was loaded.
        memory: a budget like 24GB for weights, working space and cache; or pages: of the cache. Default: pages for
            max_batch whole contexts, at most 4 GiB.
        max_batch: texts that run at once.  budget: tokens of a step.  spare, sharing: see Scheduler, BlockManager.
        queue_limit: texts that may wait; one more is refused.  exact: see crelle.models.batched.
        """
        if memory is not None and pages is not None:
            raise SchemeError("give an engine a memory budget or a number of pages, not both")
        self.llm, self.kv = llm, llm.kv if kv is None else KVFormat.parse(kv)
        models = [llm.model] + ([llm.at(bits) for bits in llm.precisions] if memory is not None else [])
        if memory is None and pages is None:
            pages = default_pages(llm, self.kv, [llm.model.c.context] * max_batch)
        self.plan = plan(models, self.kv, memory=memory, pages=pages, max_batch=max_batch, budget=budget)
        self.blocks = BlockManager(self.plan.pages, self.kv.page, sharing=sharing)
        self.scheduler = Scheduler(
            self.blocks, context=llm.model.c.context, max_batch=max_batch, budget=budget, spare=spare
        )
        self.runner = Runner(llm, self.kv, self.plan.pages, exact=exact)
        self.queue_limit = queue_limit
        self.pump: Callable[[], bool] | None = self.step  # what those who wait for events call; None: they block
        self._texts: dict[Text, tuple[Handle, Growing]] = {}
        self._faults: dict[Text, Exception] = {}  # of single texts, in drawing or decoding
        self._ahead: _Ahead | None = None  # the step that was started last, where its tokens are not known yet
        self._lock, self._stepping = RLock(), Lock()
        self._counts = dict.fromkeys(("steps", "run", "drawn", "reused", "preemptions", "finished", "failed"), 0)

    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        bits: int | None = None,
        logprobs: int | None = None,
        priority: int = 0,
        realm: Hashable = None,
        ignore_end: bool = False,
        on_event: OnEvent | None = None,
    ) -> Handle:
        """Queue a request, or say why it can never be served. From any thread, also while a step is under way.

        n: texts to draw.  bits: precision of a nested checkpoint.  logprobs: how many likely tokens to tell of with
        each one drawn (0: only its own).  priority: smaller goes first.  realm: who shares prefixes.
        ignore_end: go on behind the model's end tokens, up to max_tokens; for measurements.
        on_event: called with each event between steps, in the thread that steps; it should return at once.
        """
        sampling = sampling or Sampling()
        ids = self.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.llm._check(ids)
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise SchemeError(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {logprobs}")
        if bits is not None and self.llm.at(bits) is self.llm.model:  # the same model takes one turn, not two
            bits = None
        request = Request(
            prompt=tuple(ids),
            sampling=sampling,
            n=n,
            precision=bits,
            end_ids=frozenset() if ignore_end else self.llm.end_ids,
            priority=priority,
            realm=realm,
        )
        handle = Handle(request, on_event, self.pump)
        with self._lock:
            waiting = len(self.scheduler.waiting)
            if self.queue_limit is not None and waiting >= self.queue_limit:
                raise QueueFullError(f"{waiting} requests wait already, no more than {self.queue_limit} may; try later")
            for s in self.scheduler.submit(request):
                sampler = Sampler(replace(sampling, seed=s.seed), self.llm.model.device)
                text = StopFilter(Detokenizer(self.llm.tokenizer, ids), sampling.stop)
                self._texts[s] = handle, Growing(s.index, len(ids), sampler, text, logprobs)
        return handle

    def run(self) -> None:
        """Step until no work is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Run one step and hand out its events; False when there was nothing to do.

        Where tokens can be taken on the GPU, the step is only started, and the one before it is handed out meanwhile.
        """
        with self._stepping:
            before, self._ahead = self._ahead, None
            with self._lock:
                if before:
                    self.scheduler.update(before[0], [UNKNOWN] * len(before[0].draws))
                step = self.scheduler.schedule()
            if step:
                self._count(step)
                self._run(step, before)
            elif before:
                self._settle(*before)
            self._hand_out()
            return bool(step or before)

    def _run(self, step: Step, before: "_Ahead | None") -> None:
        """Start a step and end the one before it; or end that one first and then run this one."""
        try:
            started = self.runner.start(step) if self._starts(step) else None
        except BaseException as e:
            if before:
                self._settle(*before)
            self._fail(step, e)
            return
        if before:
            self._settle(*before)
        if started is not None:
            self._ahead = step, started
            return
        if before:
            with self._lock:
                step = self.scheduler.trim()
        try:
            drawn = self._draw(step, self.runner.run(step)) if step else []
        except BaseException as e:
            self._fail(step, e)
            return
        with self._lock:
            self.scheduler.update(step, drawn)
        for s, token in zip(step.draws, drawn, strict=True):
            self._push(s, token)

    def _fail(self, step: Step, error: BaseException) -> None:
        with self._lock:
            self.scheduler.abort(step, error)
        if not isinstance(error, Exception):  # the user wants out
            raise error

    def _starts(self, step: Step) -> bool:
        """Whether nobody has to look at logits here to draw a token."""
        texts = (self._texts[s][1] for s in step.draws)
        return all(g.top is None and g.sampler.greedy for g in texts) and self.runner.starts(step)

    def _settle(self, step: Step, started: Drawn) -> None:
        """Wait for the tokens of a step that was started, and hand them on."""
        try:
            tokens = started.tokens()
        except Exception as e:
            tokens = [UNKNOWN] * len(step.draws)
            self._faults |= dict.fromkeys(step.draws, e)
        for s, token in zip(step.draws, tokens, strict=True):
            with self._lock:
                there = self.scheduler.settle(s, token)
            if there:
                self._texts[s][1].draw(_not_looked_at, s.ids, token)
                self._push(s, token)
            else:  # it ended a step before, and has been handed out: drawn for nobody
                self._faults.pop(s, None)
                self._counts["drawn"] -= 1

    def cancel_all(self) -> None:
        """Ask for an end of everything; the next step hands it out."""
        with self._lock:
            for s in self._texts:
                s.request.cancel()

    def fail_all(self, error: BaseException) -> None:
        """Give every unfinished text a last event with an error; for those who must stop stepping."""
        with self._lock:
            texts, self._texts = self._texts, {}
        for handle, growing in texts.values():
            handle.put(growing.finish("error", error))

    @property
    def stats(self) -> Stats:
        with self._lock:
            n, s, b = self._counts, self.scheduler, self.blocks
            now = (len(s.waiting), len(s.running), b.pages, b.used, b.cached)
        return Stats(*now, *n.values())

    # Parts of a step -----------------------------------------------------------------------------------------------

    def _draw(self, step: Step, logits: Tensor) -> list[int]:
        """Return a token for each that draws; one that cannot gets any token, and is ended by `_push`."""
        drawn, texts = [], [self._texts[s][1] for s in step.draws]
        best: list[int] | list[None] = [None] * len(texts)
        if any(growing.sampler.greedy for growing in texts):
            # Of all at once: on a GPU one wait; on a CPU numpy's, which takes a sixtieth of the time of torch's.
            best = (logits.numpy().argmax(-1) if logits.device.type == "cpu" else logits.argmax(-1)).tolist()
        for i, (s, growing, likeliest) in enumerate(zip(step.draws, texts, best, strict=True)):
            try:
                drawn.append(growing.draw(lambda i=i: logits[i], s.ids, likeliest))  # type: ignore[misc]
            except Exception as e:
                self._faults[s] = e
                drawn.append(0)
        return drawn

    def _push(self, s: Text, token: int) -> None:
        """Turn a drawn token into text, and end the text where ids alone do not."""
        handle, growing = self._texts[s]
        end: Reason | None = "error" if s in self._faults else None
        if end is None and token not in s.request.end_ids:
            try:
                handle.put(growing.push(token))
                end = "stop" if growing.text.stopped else None
            except Exception as e:
                self._faults[s], end = e, "error"
        if end is not None:
            with self._lock:
                self.scheduler.finish(s, end)

    def _hand_out(self) -> None:
        """Give everyone who is finished the last event."""
        with self._lock:
            done = [(s, *self._texts.pop(s)) for s in self.scheduler.take_finished()]
        for s, handle, growing in done:
            fault = self._faults.pop(s, None)
            error = fault or s.error
            assert s.reason is not None
            reason: Reason = "error" if fault else s.reason
            self._counts["finished"] += 1
            self._counts["failed"] += reason == "error"
            self._counts["reused"] += s.reused
            handle.put(growing.finish(reason, error, reused=s.reused, preemptions=s.preemptions))

    def _count(self, step: Step) -> None:
        more = {"steps": 1, "run": step.tokens, "drawn": len(step.draws), "preemptions": len(step.preempted)}
        for name, by in more.items():
            self._counts[name] += by


def _not_looked_at() -> Tensor:
    raise AssertionError("a token that was taken on the GPU needs no logits here")


class Service:
    """An engine in a thread of its own. Requests come from any thread; slow readers never hold up a step.

    with Service(Engine(llm)) as service:
        for event in service.submit("Once upon a time"):
            print(event.text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None  # what ended the thread before its time
        self._closing = False
        self._gate, self._work = Lock(), Flag()
        engine.pump = None
        self._thread = Thread(target=self._loop, name="crelle-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> Handle:
        """Queue a request (options: those of Engine.add); iterate over what is returned, or give `on_event`."""
        with self._gate:
            if self._closing:
                raise CapacityError("the engine is shutting down and takes no more requests")
            if self.error is not None:
                raise CapacityError(f"the engine has stopped: {self.error}")
            handle = self.engine.add(prompt, sampling, **options)
        self._work.set()
        return handle

    def close(self, *, finish: bool = True, timeout: float | None = None) -> None:
        """Take no more requests; finish what runs (at most `timeout` seconds), cancel the rest, end the thread."""
        with self._gate:
            self._closing = True
        if not finish:
            self.engine.cancel_all()
        self._work.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.engine.cancel_all()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(finish=kind is None)

    def _loop(self) -> None:
        try:
            while True:
                self._work.clear()  # before looking for work: what comes later sets it again
                if self.engine.step():
                    continue
                if self._closing:
                    return
                self._work.wait()
        except BaseException as e:  # a mistake of ours: nobody shall wait for ever
            with self._gate:
                self.error = e
            self.engine.fail_all(e)


def generate_all(
    llm: LLM,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    bits: int | None = None,
    kv: KVFormat | str | int | None = None,
    memory: str | int | None = None,
    max_batch: int = 32,
    budget: int = 512,
    exact: bool | None = None,
) -> list[Completion]:
    """Continue many prompts at once, each with the same sampling or its own; the first error is raised."""
    each = list(sampling) if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(prompts)
    if len(each) != len(prompts):
        raise SchemeError(f"there are {len(prompts)} prompts, but {len(each)} samplings")
    if not prompts:
        return []
    ids = [llm.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    stored = llm.kv if kv is None else KVFormat.parse(kv)
    longest = sorted((len(i) + s.max_tokens for i, s in zip(ids, each, strict=True)), reverse=True)[:max_batch]
    pages = default_pages(llm, stored, longest) if memory is None else None
    engine = Engine(llm, kv=stored, memory=memory, pages=pages, max_batch=max_batch, budget=budget, exact=exact)
    handles = [engine.add(i, s, bits=bits) for i, s in zip(ids, each, strict=True)]
    engine.run()
    outputs = [handle.outputs[0] for handle in handles]
    if error := next((output.error for output in outputs if output.error), None):
        raise error
    return [output.completion for output in outputs]


def default_pages(llm: LLM, kv: KVFormat, lengths: Sequence[int]) -> int:
    """Return pages for texts of these lengths, as far as 4 GiB go; at least for one of the longest."""
    context = llm.model.c.context
    need = [-(-min(n, context) // kv.page) for n in lengths]
    wanted = sum(need) + len(need)  # one spare for each: see Scheduler
    return max(max(need), min(wanted, _CACHE // page_bytes(llm.model, kv)))
