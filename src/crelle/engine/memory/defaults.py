"""What an engine takes of the machine where its user did not say: the only place that decides.

    memory      on a GPU 90% of what is free, the weights that are loaded already counted as free; no more than
                BUCKETS[-1] whole contexts. On a CPU the cache takes a quarter of what is free at most, and no more than
                4 GiB or one whole context. A cache that holds less than a context serves requests that fit it.
    max_batch   on a GPU as many sequences of 1024 tokens (or of the context) as the pages hold, 32 to BUCKETS[-1]; on
                a CPU 32. Fewer where memory is so scarce that their logits would leave no pages.
    budget      tokens of a step: on a GPU 2048, 1024 or 512, the first whose working space takes at most an eighth of
                what the weights leave; on a CPU 512

What is given is taken as it is, unless the machine does not have it: a budget above the free memory is refused.
"""

from collections.abc import Sequence
from dataclasses import replace

from crelle.engine.memory.machine import FreeMemory, free_memory
from crelle.engine.memory.plan import TYPICAL, MemoryPlan, page_bytes, parse_bytes, plan, show_bytes, weight_bytes
from crelle.errors import CapacityError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.step.graph_inputs import BUCKETS
from crelle.models.loader import Model

MAX_BATCH = 32  # on a CPU, and at least so many on a GPU
BUDGET = 512  # on a CPU, and at least so many on a GPU
_BUDGETS = (2048, 1024, BUDGET)
_BATCHES = (MAX_BATCH, 8, 1)
_GPU_SHARE, _CPU_SHARE = 0.9, 0.25
_WORKING_SHARE = 0.125  # of what the weights leave on a GPU
_CACHE = 4 << 30  # bytes of pages on a CPU, or one whole context where that is more


def choose_plan(
    models: Sequence[Model],
    kv: KVFormat,
    *,
    memory: str | int | None = None,
    pages: int | None = None,
    max_batch: int | None = None,
    budget: int | None = None,
    lengths: Sequence[int] | None = None,
    free: FreeMemory | None = None,
    draft: Model | None = None,
) -> MemoryPlan:
    """Return the plan of an engine over these precisions of a model.

    lengths: tokens of all sequences that will ever run, where they are known: no more pages than those need, and enough
        for the longest if there is memory for it.
    free: what is free now; default: as the machine reports it.  draft: a model that guesses tokens, with pages too.
    """
    model = models[0]
    if pages is not None:
        batch = max_batch or MAX_BATCH
        step = budget or max(BUDGET, batch)
        found = plan(models, kv, memory=None, pages=pages, max_batch=batch, budget=step, draft=draft)
        return replace(found, reason=f"a cache of {pages} pages, as requested")
    free = free or free_memory(model.device)
    weights = weight_bytes(models if draft is None or draft in models else [*models, draft])
    there = free.size + weights
    if memory is not None:
        if (size := parse_bytes(memory)) > there:
            raise CapacityError(
                f"a memory limit of {show_bytes(size)} is more than the {show_bytes(there)} free {free.where}, "
                "including the weights; lower `memory`"
            )
        reason = "set by --memory"
    elif model.device.type == "cuda":
        size = int(_GPU_SHARE * there)
        reason = f"{_GPU_SHARE:.0%} of the {show_bytes(there)} free {free.where} (--memory to change)"
    else:
        size, reason = there, f"all of the {show_bytes(free.size)} free {free.where}"
    found = _limited(models, kv, size, max_batch, budget, None if lengths is None else len(lengths), draft)
    need = [] if lengths is None else _pages_of_longest(model, kv, lengths, found.max_batch)
    if need and (wanted := sum(need) + len(need)) < found.pages:  # the watermark of Scheduler
        found, reason = _with_pages(models, found, wanted, draft), f"enough for {len(need)} sequences"
    if memory is None:
        most, why = _most_pages(model, kv, free, found.max_batch, draft)
        if (most := max(most, *need[:1], 1)) < found.pages:
            found, reason = _with_pages(models, found, most, draft), why.format(size=show_bytes(size), reason=reason)
    return replace(found, reason=reason)


def most_pages(model: Model, kv: KVFormat, draft: Model | None = None, memory: int | None = None) -> int:
    """Return to how many pages the cache of one sequence may grow: its context, or what is free now or within a limit.

    memory: the limit, for weights and working space, too.
    """
    if memory is not None:
        fits = plan([model], kv, memory=memory, pages=None, max_batch=1, budget=_BUDGETS[0], draft=draft)
        return min(_context_pages(model, kv), fits.pages)
    free = free_memory(model.device)
    share = _GPU_SHARE if model.device.type == "cuda" else 1.0
    return min(_context_pages(model, kv), int(share * free.size) // page_bytes(model, kv, draft))


def _limited(
    models: Sequence[Model],
    kv: KVFormat,
    size: int,
    max_batch: int | None,
    budget: int | None,
    sequences: int | None,
    draft: Model | None,
) -> MemoryPlan:
    """Share out a budget; choose the limits that were not given."""
    gpu = models[0].device.type == "cuda"
    most = max(1, min(x for x in (sequences, budget, BUCKETS[-1]) if x is not None))

    def of(batch: int) -> MemoryPlan:
        step = budget or max(batch, _budget(models, kv, size, batch) if gpu else BUDGET)
        return plan(models, kv, memory=size, pages=None, max_batch=batch, budget=step, draft=draft)

    if max_batch is not None:
        return of(max_batch)
    if gpu and most > MAX_BATCH:
        try:
            many = of(most)
            hold = many.tokens // min(TYPICAL, many.context)
            return many if hold >= many.max_batch else of(max(MAX_BATCH, hold))
        except CapacityError:
            pass  # fewer may fit
    for batch in _BATCHES:
        try:
            return of(min(most, batch))
        except CapacityError:
            if batch == _BATCHES[-1]:
                raise
    raise AssertionError("the last batch returns or raises")


def _budget(models: Sequence[Model], kv: KVFormat, size: int, batch: int) -> int:
    """Return the largest step on a GPU whose working space is a small share of what the weights leave."""
    for budget in _BUDGETS:
        one = plan(models, kv, memory=None, pages=1, max_batch=batch, budget=max(budget, batch))
        if one.working <= _WORKING_SHARE * (size - one.weights):
            return budget
    return BUDGET


def _most_pages(model: Model, kv: KVFormat, free: FreeMemory, max_batch: int, draft: Model | None) -> tuple[int, str]:
    """Return how many pages are taken at most where no budget was given, and why."""
    whole, each = _context_pages(model, kv), page_bytes(model, kv, draft)
    if model.device.type == "cuda":
        batch = max(max_batch, BUCKETS[-1])
        return batch * (whole + 1), f"enough for {batch} whole contexts, less than the limit of {{size}} ({{reason}})"
    change = "(--memory to change)"
    return min(
        (max_batch * (whole + 1), f"a cache for {max_batch} whole contexts {change}"),
        (max(_CACHE // each, whole), f"a cache of {show_bytes(max(_CACHE, whole * each))} {change}"),
        (
            int(_CPU_SHARE * free.size) // each,
            f"a cache of a quarter of the {show_bytes(free.size)} free {free.where} {change}",
        ),
    )


def _with_pages(models: Sequence[Model], found: MemoryPlan, pages: int, draft: Model | None) -> MemoryPlan:
    limits = {"max_batch": found.max_batch, "budget": found.budget}
    return plan(models, found.kv, memory=None, pages=pages, draft=draft, **limits)


def _context_pages(model: Model, kv: KVFormat) -> int:
    return -(-model.spec.context // kv.page)


def _pages_of_longest(model: Model, kv: KVFormat, lengths: Sequence[int], count: int) -> list[int]:
    longest = sorted(lengths, reverse=True)[:count]
    return [-(-min(n, model.spec.context) // kv.page) for n in longest]
