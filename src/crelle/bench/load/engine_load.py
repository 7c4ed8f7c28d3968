"""How an engine serves: many requests in this process, timed as their clients would see them.

    closed loop   N clients, each of which asks again as soon as it is answered        throughput
    trace         requests come when they are due (crelle.bench.load.trace)                waiting in line

Both run the engine as it is: prompts, decoding, preemption, events. Answers have exactly the length asked for: end
tokens do not end them. What a batch of a given size gives is in crelle.bench.load.decode_throughput.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from crelle.bench.compile_ahead import CHECK_PROMPT, CHECK_TOKENS, CHECKED, WARM_UP_TOKENS, compile_ahead
from crelle.bench.decode_cuda import TOLERANCE, free_memory
from crelle.bench.load.load_report import Call, LoadReport, Percentiles
from crelle.bench.load.model_sources import checked_part, quantizes_activations
from crelle.bench.load.trace import Prompts, TraceRequest
from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.engine.requests.output import Event
from crelle.engine.sampling.sampler import Sampling
from crelle.engine.stats import Stats
from crelle.errors import CapacityError, SchemeError, UnsupportedError
from crelle.kernels.cuda.step.graph_inputs import BUCKETS, bucket_of

POINTS = 240  # of a curve over time
_COMPARED = 16  # sequences of a check that are compared with the model, about: each is a pass of its own
Progress = Callable[[float, int, int], None]  # seconds so far, requests answered, requests failed


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What an engine was doing at one time."""

    seconds: float
    running: int
    waiting: int
    pages_used: int
    pages_cached: int


@dataclass(frozen=True, slots=True)
class EngineLoadResult:
    """What a load showed; see LoadReport for the waits, Stats for the counts."""

    model: str
    scheme: str
    kv: str
    device: str
    traffic: str
    disagreement: float  # with one pass over the same tokens, 0 … 1; see `disagreement`
    memory: str | None  # the budget, as it was given
    plan: str  # what it was used for
    weight_bytes: int
    cache_bytes: int
    pages: int
    page_tokens: int
    max_batch: int
    clients: int | None
    seconds: float
    requests: int
    failures: int
    cut: int
    tokens: int
    prompt_tokens: int
    tokens_per_second: float
    late_tokens_per_second: float  # of the second half of `seconds`, when the batch has its size
    requests_per_second: float
    first_token: Percentiles | None
    per_token: Percentiles | None
    stall: Percentiles | None
    answer: Percentiles | None
    errors: dict[str, int]
    steps: int
    tokens_run: int
    tokens_reused: int
    prefill_share: float  # of the time of steps: those with tokens of prompts; the others decode alone
    preemptions: int
    most_running: int
    most_pages: int
    mean_pages: float  # over time
    peak_memory_bytes: int | None  # of a GPU
    over_time: tuple[EngineSample, ...] = field(repr=False)


@dataclass(slots=True)
class _Client:
    """One request under way."""

    begun: float  # seconds from the beginning: when it was due
    prompt: int
    times: list[float] = field(default_factory=list)
    error: str | None = None
    ended: float | None = None
    cut: bool = False


class EngineLoad:
    """A run of one engine under load."""

    def __init__(self, engine: Engine, *, seed: int = 0, progress: Progress | None = None) -> None:
        self.engine, self._progress = engine, progress
        self._prompts = Prompts(engine.llm.model.spec.vocabulary, tuple(engine.llm.end_ids), seed)
        self._clients: list[_Client] = []
        self._samples: list[EngineSample] = []
        self._start = 0.0
        self._done = 0

    def closed_loop(self, clients: int, seconds: float, prompt: int, tokens: int) -> LoadReport:
        """Let clients ask for `seconds`; then let the last answers come."""
        if clients < 1 or seconds <= 0 or prompt < 1 or tokens < 1:
            raise SchemeError("a closed loop takes at least 1 client, some seconds, a prompt and an answer of a token")
        free = clients  # who may ask now
        self._begin()
        while True:
            now = self._now()
            for _ in range(free if now < seconds else 0):
                self._ask(now, self._prompts.next(prompt), tokens)
            busy = len(self._clients) - self._done
            if not busy:
                break
            self._step()
            free = clients - (len(self._clients) - self._done)
        return self._report(clients, seconds)

    def trace(self, requests: Sequence[TraceRequest], stop: float | None = None) -> LoadReport:
        """Let requests come when they are due, until all are answered or `stop` seconds have passed."""
        if not requests:
            raise SchemeError("the trace has no requests in the time that was asked for")
        left = deque((r, self._prompts.next(r.prompt)) for r in requests)  # made before the clock starts
        self._begin()
        while left or self._done < len(self._clients):
            if stop is not None and self._now() >= stop:
                return self._cut_off(stop)
            while left and left[0][0].at <= self._now():
                request, ids = left.popleft()
                self._ask(request.at, ids, request.tokens)
            if self._done < len(self._clients):
                self._step()
            elif left:
                time.sleep(max(0.0, left[0][0].at - self._now()))
        return self._report(None, max(c.ended or 0.0 for c in self._clients))

    def _cut_off(self, seconds: float) -> LoadReport:
        """End all that is under way; what it got by then counts."""
        for client in self._clients:  # the step that was under way then may have ended some, too late to count
            client.cut = client.ended is None or client.ended > seconds
        self.engine.cancel_all()
        self.engine.run()
        return self._report(None, seconds)

    @property
    def samples(self) -> list[EngineSample]:
        """The engine over time, at most POINTS of them; the busiest of each stretch."""
        step = -(-len(self._samples) // POINTS)
        stretches = [self._samples[i : i + step] for i in range(0, len(self._samples), step or 1)]
        return [max(stretch, key=lambda m: (m.pages_used, m.running)) for stretch in stretches]

    def mean_pages(self) -> float:
        """Pages in use, averaged over time."""
        spans = [(b.seconds - a.seconds, a.pages_used) for a, b in pairwise(self._samples)]
        total = sum(span for span, _ in spans)
        return sum(span * used for span, used in spans) / total if total > 0 else 0.0

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second of answers that did not fail, between two times."""
        times = [t for c in self._clients if c.error is None for t in c.times if begin <= t < end]
        return len(times) / (end - begin)

    def most(self, of: Callable[[EngineSample], int]) -> int:
        return max(map(of, self._samples), default=0)

    def _begin(self) -> None:
        self._start = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _ask(self, begun: float, ids: list[int], tokens: int) -> None:
        client = _Client(begun, len(ids))
        self._clients.append(client)

        def hear(event: Event) -> None:
            if event.token is not None:
                client.times.append(self._now())
            if event.output is not None:
                client.ended = self._now()
                client.error = str(event.output.error) if event.output.error else None
                self._done += 1

        try:
            self.engine.add(ids, Sampling(max_tokens=tokens), ignore_end=True, on_event=hear)
        except CapacityError as e:  # this one can never be served, the others can
            client.error, client.ended = str(e), self._now()
            self._done += 1

    def _step(self) -> None:
        self.engine.step()
        s = self.engine.stats
        self._samples.append(EngineSample(self._now(), s.running, s.waiting, s.pages_used, s.pages_cached))
        if self._progress:
            self._progress(self._now(), self._done, s.failed)

    def _report(self, clients: int | None, seconds: float) -> LoadReport:
        calls = [_call(c, seconds) for c in self._clients]
        return LoadReport.of("in process", self.engine.llm.weights.path.name, clients, seconds, calls)


def _call(c: _Client, seconds: float) -> Call:
    gaps = [b - a for a, b in pairwise(c.times)]
    assert c.ended is not None
    return Call(
        begun=c.begun,
        seconds=c.ended - c.begun,
        prompt="",
        tokens=len(c.times),
        prompt_tokens=c.prompt,
        first=c.times[0] - c.begun if c.times else None,
        per_token=sum(gaps) / len(gaps) if gaps else None,
        stall=max(gaps) if gaps else None,
        within=sum(t <= seconds for t in c.times) / len(c.times) if c.times else 1.0,
        cut=c.cut,
        error=c.error,
    )


def serve(
    llm: LLM,
    scheme: str,
    *,
    trace: Sequence[TraceRequest] | None = None,
    clients: int = 1,
    seconds: float = 10.0,
    prompt: int = 128,
    tokens: int = 128,
    traffic: str = "",
    stop: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **engine_options: Any,
) -> EngineLoadResult:
    """Run a trace, or else a closed loop, on an engine of its own; `scheme` and `traffic` are what the row says.

    stop: seconds after which a trace ends, whatever is under way. Tokens are guessed only if `speculate` says so:
    models of random weights repeat themselves.
    """
    device = llm.model.device
    engine = Engine(llm, **{"speculate": "off", **engine_options})
    most = min(engine.plan.max_batch, BUCKETS[-1])
    compile_ahead(engine, range(1, most + 1), engine.scheduler.budget)
    warm_up(engine)
    gap = check(engine)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, load = engine.stats, EngineLoad(engine, seed=seed, progress=progress)
    report = load.closed_loop(clients, seconds, prompt, tokens) if trace is None else load.trace(trace, stop)
    if report.failures == report.requests:
        raise CapacityError(f"all {report.requests} requests failed ({report.reasons})")
    stats, plan = engine.stats, engine.plan
    shared = {f.name for f in fields(EngineLoadResult)} & {f.name for f in fields(LoadReport)} - {"model"}
    return EngineLoadResult(
        model=llm.weights.path.name,
        scheme=scheme,
        kv=str(engine.kv),
        device=device_name(device),
        traffic=traffic or f"{clients} clients, prompts of {prompt}, answers of {tokens}",
        disagreement=gap,
        memory=None if engine_options.get("memory") is None else str(engine_options["memory"]),
        plan=str(plan),
        weight_bytes=plan.weights,
        cache_bytes=plan.cache,
        pages=plan.pages,
        page_tokens=plan.kv.page,
        max_batch=plan.max_batch,
        late_tokens_per_second=load.rate(report.seconds / 2, report.seconds),
        **{name: getattr(report, name) for name in shared},
        steps=stats.steps - before.steps,
        tokens_run=stats.tokens_run - before.tokens_run,
        tokens_reused=stats.tokens_reused - before.tokens_reused,
        prefill_share=_prefill_share(before, stats),
        preemptions=stats.preemptions - before.preemptions,
        most_running=load.most(lambda m: m.running),
        most_pages=load.most(lambda m: m.pages_used),
        mean_pages=load.mean_pages(),
        peak_memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        over_time=tuple(load.samples),
    )


def _prefill_share(before: Stats, after: Stats) -> float:
    """Return the share of the steps between in which prompts ran, by time."""
    prefill = after.prefill_seconds - before.prefill_seconds
    total = prefill + after.decode_seconds - before.decode_seconds
    return prefill / total if total > 0 else 0.0


def warm_up(engine: Engine, sizes: Sequence[int] | None = None) -> None:
    """Run a short request, and let a GPU capture its graphs, so that what comes first costs no more than the rest.

    sizes: of the batches that will run; None: any.
    """
    c = engine.llm.model.spec
    engine.add(
        Prompts(c.vocabulary, seed=-1).next(min(WARM_UP_TOKENS, c.context - 2)), Sampling(max_tokens=2), ignore_end=True
    )
    engine.run()
    if (batch := engine.runner.cuda_executor(None)) is not None:
        most = bucket_of(min(engine.plan.max_batch, BUCKETS[-1]))
        for bucket in sorted({bucket_of(n) for n in sizes} if sizes else {b for b in BUCKETS if b <= most}):
            batch.graph(bucket)


def check(engine: Engine, sequences: int = CHECKED) -> float:
    """Return the `disagreement` of an engine, or, with so many sequences, of one over the first layer of its model.

    A model of random weights with quantized activations is chaotic: a change of 0.05% of the embedding, which moves a
    few codes, becomes 20% of the logits behind one layer at 4 bits, and all of them behind 32 (W4A4, 1024 wide).
    """
    llm = checked_part(engine.llm)
    if llm is engine.llm:
        return disagreement(engine)
    pages = sequences * (-(-(CHECK_PROMPT + CHECK_TOKENS) // engine.kv.page) + 1)
    together = sequences * CHECK_PROMPT  # all prompts in one step, then all decode in each
    invariant = engine.runner.batch_invariant
    first = Engine(llm, kv=engine.kv, pages=pages, max_batch=sequences, budget=together, batch_invariant=invariant)
    compile_ahead(first, [sequences], prompts=[together])
    gap = disagreement(first, sequences)
    del first, llm
    free_memory()  # it would count for the engine's own
    return gap


@torch.inference_mode()
def disagreement(engine: Engine, sequences: int = CHECKED) -> float:
    """Compare what the engine chooses for some sequences with one pass of the model over the same tokens.

    As in crelle.bench.decode_cuda: 0 where they agree, 1 where the choice has nothing to do with the model; the largest
    of all choices, or with quantized activations, where codes differ now and then, their mean.
    """
    model, tokens, prompts = engine.llm.model, CHECK_TOKENS, Prompts(engine.llm.model.spec.vocabulary, seed=-2)
    length = max(1, min(CHECK_PROMPT, model.spec.context - tokens))
    given = [prompts.next(length) for _ in range(sequences)]
    handles = [engine.add(ids, Sampling(max_tokens=tokens), ignore_end=True) for ids in given]
    engine.run()
    gaps = list[float]()
    for ids, handle in list(zip(given, handles, strict=True))[:: max(1, sequences // _COMPARED)]:
        output = handle.outputs[0]
        if output.error:
            raise output.error
        said = output.completion.tokens
        whole = torch.tensor([ids + said[:-1]], device=model.device)
        logits = model(whole, model.new_cache(kv=engine.kv))[0, length - 1 :].float()  # [tokens, V]
        best, mean = logits.amax(-1), logits.mean(-1)
        chosen = logits.gather(1, torch.tensor(said, device=logits.device)[:, None])[:, 0]
        gaps += ((best - chosen) / (best - mean)).tolist()
    gap = float(fmean(gaps) if quantizes_activations(model) else torch.tensor(gaps).max())  # NaN stays
    if not gap <= TOLERANCE:  # a NaN fails too
        raise UnsupportedError(
            f"the engine is wrong here: it chose a token {gap:.0%} of the way from the best to the mean of what "
            "one pass over the same tokens gives, so it is not timed"
        )
    return gap


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
