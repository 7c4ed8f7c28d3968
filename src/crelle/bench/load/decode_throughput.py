"""Decode throughput of the engine at a given batch size: B sequences, each behind a context, one token each a step.

Prompts are not read: pages are filled with random keys and values once, so that 256 contexts cost no minutes. A step is
then what it is under steady load: scheduling, the forward pass, sampling, events. `largest_batch` is
how many such sequences a memory budget holds; nothing is allocated to find out.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Self

import torch

from crelle.bench.compile_ahead import compile_ahead
from crelle.bench.kernels.step_breakdown import StepBreakdown, breakdown, replay_ms
from crelle.bench.load.engine_load import check, device_name, warm_up
from crelle.bench.load.trace import Prompts
from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.engine.memory.plan import plan
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError, SchemeError, UnsupportedError
from crelle.formats.kv.pages import KVFormat, KVPages, quantize
from crelle.kernels.cuda.step.graph_inputs import BUCKETS

BUDGET = 512  # tokens of a step, where the batch is no larger
_WARM = 3  # steps that do not count
_MOST = 4096  # the largest batch that is tried


@dataclass(frozen=True, slots=True)
class DecodeThroughput:
    """One batch size."""

    model: str
    scheme: str
    kv: str
    device: str
    memory: str | None  # the budget whose largest batch this is
    batch: int
    context: int  # tokens before the first that is decoded
    tokens: int  # decoded for each sequence
    disagreement: float  # with one pass over the same tokens, 0 … 1
    milliseconds_per_step: float  # the median
    tokens_per_second: float  # of all sequences together, all steps and what is between them counted
    weight_bytes: int
    working_bytes: int
    cache_bytes: int  # of all pages, where there is a budget; else of the sequences' own
    cached_tokens: int  # that the sequences have in the cache at the end
    peak_memory_bytes: int | None  # of a GPU
    graph_ms: float | None = None  # of the step's graph alone, on a GPU
    breakdown: StepBreakdown | None = None  # of that graph
    no_breakdown: str | None = None  # why one that was asked for is missing

    @classmethod
    def of(
        cls, engine: Engine, scheme: str, gap: float, batch: int, context: int, steps: list[float], seconds: float
    ) -> Self:
        """Return the row of what `timed_steps` found; it says nothing of memory."""
        tokens, pages = len(steps), batch * _pages(engine.kv, context, len(steps))
        return cls(
            model=engine.llm.weights.path.name,
            scheme=scheme,
            kv=str(engine.kv),
            device=device_name(engine.llm.model.device),
            memory=None,
            batch=batch,
            context=context,
            tokens=tokens,
            disagreement=gap,
            milliseconds_per_step=1e3 * median(steps),
            tokens_per_second=batch * tokens / seconds,
            weight_bytes=engine.plan.weights,
            working_bytes=engine.plan.working,
            cache_bytes=pages * engine.plan.page_bytes,
            cached_tokens=batch * (context + _WARM + tokens - 1),
            peak_memory_bytes=None,
        )


def decode(
    llm: LLM,
    scheme: str,
    *,
    batch: int,
    context: int = 1024,
    tokens: int = 64,
    kv: KVFormat | str | int | None = None,
    memory: str | int | None = None,
    batch_invariant: bool | None = None,
    profile: bool = False,
) -> DecodeThroughput:
    """Check, then time steps of a batch; `memory` bounds the cache and is said in the row.

    profile: say where the time of the step's graph goes.
    """
    if batch < 1 or context < 1 or tokens < 2:
        raise SchemeError("decoding is timed with a batch and a context of at least 1, over at least 2 tokens")
    if context + _WARM + tokens > llm.model.spec.context:
        raise CapacityError(
            f"{context} + {_WARM + tokens} tokens do not fit the model's context of {llm.model.spec.context}"
        )
    fmt = llm.kv if kv is None else KVFormat.parse(kv)
    pages = None if memory is not None else batch * _pages(fmt, context, tokens)
    engine = Engine(
        llm,
        kv=fmt,
        memory=memory,
        pages=pages,
        max_batch=batch,
        budget=max(BUDGET, batch),
        watermark=0,
        sharing=False,
        speculate="off",
        batch_invariant=batch_invariant,
    )
    return next(measure(engine, scheme, [batch], context, tokens, memory, [batch] if profile else ()))


def measure(
    engine: Engine,
    scheme: str,
    batches: Sequence[int],
    context: int,
    tokens: int,
    memory: str | int | None = None,
    profiled: Collection[int] = (),
) -> Iterator[DecodeThroughput]:
    """Check an engine, then time steps of each batch, all of which it holds; `profiled`: those to be broken down."""
    on_gpu = engine.llm.model.device.type == "cuda"
    compile_ahead(engine, batches)
    warm_up(engine, batches)
    gap = check(engine, min(max(batches), BUCKETS[-1]))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # the check's own pass is no part of serving
    fill(engine.runner.layers)
    for batch in sorted(batches, key=lambda n: n in profiled):  # steps timed behind a profile had a pause of 190 ms
        row = DecodeThroughput.of(engine, scheme, gap, batch, context, *timed_steps(engine, batch, context, tokens))
        if memory is not None:
            row = replace(row, memory=str(memory), cache_bytes=engine.plan.cache)
        if on_gpu and (memory is not None or len(batches) == 1):  # else it is the memory of the largest batch
            row = replace(row, peak_memory_bytes=torch.cuda.max_memory_allocated())
        yield _with_graph(row, engine, batch in profiled)


def _with_graph(row: DecodeThroughput, engine: Engine, profile: bool) -> DecodeThroughput:
    """Add the time of the step's graph alone, where there is one: it runs on what the last step left."""
    executor = engine.runner.cuda_executor(None)
    if executor is None or row.batch > BUCKETS[-1]:
        why = "only steps that run as one CUDA graph are broken down by kernel"
        return replace(row, no_breakdown=why if profile else None)
    graph = executor.graph(row.batch)
    row = replace(row, graph_ms=replay_ms(graph.replay))
    try:
        return replace(row, breakdown=breakdown(graph.replay)) if profile else row
    except (UnsupportedError, RuntimeError) as e:  # the profiler's own; what was timed stands
        return replace(row, no_breakdown=str(e))


def timed_steps(engine: Engine, batch: int, context: int, tokens: int) -> tuple[list[float], float]:
    """Return the seconds of each step, and of all of them, in an idle engine that shares no pages; it is idle again."""
    prompts, steps, before = Prompts(engine.llm.model.spec.vocabulary), list[float](), engine.stats
    for _ in range(batch):
        engine.add(prompts.next(context), Sampling(max_tokens=_WARM + tokens), ignore_end=True)
    engine.scheduler.assume_prompts()
    for _ in range(_WARM):
        engine.step()
    begun = perf_counter()
    for _ in range(tokens):
        last = perf_counter()
        engine.step()
        steps.append(perf_counter() - last)
    seconds = perf_counter() - begun
    engine.run()  # on a GPU the last step has only been started
    stats = engine.stats
    if stats.preemptions > before.preemptions or stats.failed or stats.finished < before.finished + batch:
        raise CapacityError(
            f"a batch of {batch} sequences behind {context} tokens does not stay together: {engine.plan}"
        )
    return steps, seconds


def largest_batch(llm: LLM, kv: KVFormat | str | int, memory: str | int, context: int, tokens: int) -> int:
    """Return how many sequences behind a context, `tokens` to come, a budget holds; or say that it holds none."""
    fmt = KVFormat.parse(kv)

    def fits(batch: int) -> bool:
        found = plan([llm.model], fmt, memory=memory, pages=None, max_batch=batch, budget=max(BUDGET, batch))
        return found.pages >= batch * _pages(fmt, context, tokens)

    if not fits(1):  # raises where not even a page is left
        raise CapacityError(f"a budget of {memory} does not hold one sequence of {context + tokens} tokens at {fmt}")
    low, high = 1, _MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            low, high = (middle, high) if fits(middle) else (low, middle)
        except CapacityError:
            high = middle
    return low


def budgeted(
    llm: LLM, scheme: str, kv: KVFormat | str | int, memory: str | int, context: int, tokens: int
) -> Iterator[DecodeThroughput]:
    """Time an engine of a memory budget with the most sequences that it holds, and with a whole bucket of them below.

    A batch between two buckets costs a GPU as much as the larger one: fewer sequences may give more tokens.
    """
    largest = largest_batch(llm, kv, memory, context, tokens)
    engine = Engine(
        llm,
        kv=KVFormat.parse(kv),
        memory=memory,
        max_batch=largest,
        budget=max(BUDGET, largest),
        watermark=0,
        sharing=False,
        speculate="off",
    )
    whole = max((b for b in BUCKETS if b <= largest), default=largest)
    return measure(engine, scheme, list(dict.fromkeys((whole, largest))), context, tokens, memory)


def parse_batches(text: str, option: str = "--batch") -> list[int]:
    """Read sizes like 1,4,16."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise SchemeError(f"{option} should read like 1,4,16; got '{text}'")
    return [int(part) for part in parts]


def _pages(kv: KVFormat, context: int, tokens: int) -> int:
    return -(-(context + _WARM + tokens) // kv.page)


def fill(layers: list[KVPages]) -> None:
    """Give pages something to read: random values of a usual size."""
    for i, pages in enumerate(layers):
        random = torch.Generator(pages.codes.device).manual_seed(i)
        some = torch.linspace(-2, 2, pages.head_size)[None]
        for kind in (0, 1):
            codes, bits = pages.codes_of(kind), pages.format.code(kind).bits
            if bits == 16:
                codes.normal_(generator=random)
                continue
            codes.random_(0, 256, generator=random)
            pages.words_of(kind).fill_(int(quantize(some, bits, 1)[1]))
