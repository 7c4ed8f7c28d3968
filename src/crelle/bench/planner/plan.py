"""What a model takes on some GPUs, how many sequences are left room for, and how fast they should decode.

    plan(planned_shape("llama3-70b"), parse("bcq:bits=3,group=128"), KVFormat.parse(4), gpus=1, memory="80GB")

Bytes are counted as the formats store them and as the engine shares out memory (crelle.engine.memory.plan). Time is an
estimate (crelle.bench.planner.step_model). On more than one GPU matrices and heads are shared out (tensor parallel) as
far as heads can be divided and a node goes, layers beyond that (pipeline parallel); Crelle's own engine runs on one,
vLLM on many. What GPUs tell each other is assumed, not measured.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crelle.bench.load.decode_throughput import BUDGET
from crelle.bench.planner.cost import Cost, CostModel
from crelle.bench.planner.plan_shapes import PlannedShape
from crelle.bench.planner.step_model import BANDWIDTH, Product, StepWork, bucket, kind_of, milliseconds
from crelle.bench.planner.streamed import PCIE, Streamed, streamed
from crelle.engine.memory.plan import page_bytes_of, parse_bytes, show_bytes, working_bytes_of
from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.step.graph_inputs import BUCKETS
from crelle.quantizers.base import Quantizer

NODE = 8  # GPUs of a node, among which matrices may be shared out
MOST = BUCKETS[-1]  # sequences of a step, where none are asked for
_F16 = 2  # bytes
_LINK = 300.0  # GB/s between GPUs of a node that an all-reduce reaches: assumed
_ALL_REDUCE_MS = 0.01  # of one however small: assumed


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of decoding: a model of the time, not a measurement."""

    milliseconds_per_step: float
    tokens_per_second: float  # of all sequences together
    tokens_per_second_each: float
    communication_ms: float  # of the step's time: assumed
    unchecked: tuple[str, ...]  # what in it no measurement stands behind
    cost: Cost | None  # of a million tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes where; bytes are those of the fullest GPU."""

    model: str
    scheme: str
    kv: str
    gpus: int
    tensor_parallel: int
    pipeline_parallel: int
    memory_bytes: int  # of one GPU
    parameters: int
    bits_per_weight: float  # of the matrices in the layers
    fits: bool
    why_not: str | None
    weight_bytes: int
    working_bytes: int
    cache_bytes: int  # of the sequences
    bytes_per_gpu: int  # all three
    bytes_per_token: int  # of keys and values, on all GPUs
    tokens: int  # that the cache has room for
    context: int  # of a sequence
    batch: int  # sequences at once
    most_sequences: int  # of that context
    estimate: Estimate | None
    streamed: Streamed | None = None  # where the weights of a mixture do not fit one GPU: with experts in host memory


def step_work(
    shape: PlannedShape,
    scheme: Quantizer,
    kv: KVFormat,
    batch: int,
    context: int,
    *,
    tensor_parallel: int = 1,
    batch_invariant: bool = False,
    engine: bool = True,
) -> StepWork:
    """Return what a step of a batch does on one GPU of those that share all matrices out."""
    s, rows, parts = shape.spec, bucket(batch) if engine else batch, tensor_parallel
    dense = shape.stored_bytes(scheme, expert=False) + _F16 * shape.head
    products = [Product(dense / parts, (shape.weights(expert=False) + shape.head) / parts, rows)]
    if (experts := shape.experts) is not None:
        # Each token takes its experts by chance: so many of them are read, each with its share of the rows.
        share = 1 - (1 - experts.top / experts.count) ** batch
        each = batch * experts.top / (share * experts.count)
        size, weights = shape.stored_bytes(scheme, expert=True), shape.weights(expert=True)
        products.append(Product(share * size / parts, share * weights / parts, each))
    cache: dict[int, float] = {}
    for own, a in zip(kv.layers(len(s.layers)), s.attentions, strict=True):
        tokens = batch * min(context, a.window or context)
        for code in (own.key, own.value):
            row = code.row_bytes(a.head_size) + 2 * code.groups(a.head_size)
            cache[code.bits] = cache.get(code.bits, 0.0) + tokens * row * max(1, a.kv_heads / parts)
    return StepWork(kind_of(scheme), len(s.layers), tuple(products), context, cache, batch_invariant, engine)


def parallel(shape: PlannedShape, gpus: int) -> tuple[int, int]:
    """Return how many GPUs share out each matrix, and how many times that many the layers."""
    s = shape.spec

    def divides(n: int) -> bool:  # a head of keys and values may be kept by several GPUs
        return gpus % n == 0 and s.heads % n == 0 and (s.kv_heads % n == 0 or n % s.kv_heads == 0)

    tensor = max(n for n in range(1, min(gpus, NODE) + 1) if divides(n))
    if (stages := gpus // tensor) > len(s.layers):
        raise SchemeError(
            f"{gpus} GPUs cannot share out {shape.name}: {s.heads} heads go on {tensor} of a node, and {len(s.layers)} "
            f"layers not on {stages} stages"
        )
    return tensor, stages


def plan(
    shape: PlannedShape,
    scheme: Quantizer,
    kv: KVFormat,
    *,
    gpus: int = 1,
    memory: str | int = "80GB",
    context: int | None = None,
    batch: int | None = None,
    cost: CostModel | None = None,
    bandwidth: float = BANDWIDTH,
    batch_invariant: bool = False,
    hits: float | None = None,
    pcie: float = PCIE,
) -> Plan:
    """Share out the memory of GPUs, and estimate the speed of what fits.

    hits, pcie: where experts are streamed from host memory, the share of hits (default: by chance) and GB/s.
    """
    s = shape.spec
    if gpus < 1:
        raise SchemeError(f"a plan is for at least one GPU, not {gpus}")
    if batch is not None and batch < 1:
        raise SchemeError(f"a batch has at least one sequence, not {batch}")
    if not 0 < bandwidth < float("inf"):
        raise SchemeError(f"the bandwidth of a GPU's memory is a positive number of GB/s, not {bandwidth:g}")
    tokens_each = min(2048, s.context) if context is None else context
    if not 1 <= tokens_each <= s.context:
        raise SchemeError(f"a sequence of {shape.name} has 1 to {s.context} tokens, not {tokens_each}")
    kv.check(s.head_size)
    size, (tensor, stages) = parse_bytes(memory), parallel(shape, gpus)
    inside = shape.stored_bytes(scheme)
    on_stage = -(-len(s.layers) // stages) / len(s.layers)
    if (layer := inside // len(s.layers) // tensor) > size:
        raise CapacityError(
            f"one layer of {shape.name} at {scheme} takes {show_bytes(layer)} on each of {tensor} GPUs, more than the "
            f"{show_bytes(size)} of one: give more GPUs, more memory or fewer bits"
        )
    weights = round((inside * on_stage + _F16 * shape.outside) / tensor)
    page = page_bytes_of(s, kv, _F16)
    held = round(page * on_stage * max(1 / tensor, 1 / s.kv_heads))
    each = -(-tokens_each // kv.page)  # pages of a sequence

    def room(count: int) -> int:
        working = working_bytes_of(s, count, max(BUDGET, count), _F16)
        return max(0, (size - weights - working) // held)

    counts = range(1, max(MOST, batch or 0) + 1)
    most = bisect_left(counts, True, key=lambda n: room(n) < n * each)  # that many fit, one more does not
    rows = batch or max(1, most)
    working, pages = working_bytes_of(s, rows, max(BUDGET, rows), _F16), room(rows)
    fits, cache = 1 <= rows <= most, rows * each * held
    why = None
    if not fits:
        why = (
            f"{sequences(rows)} of {tokens_each} tokens take {show_bytes(weights + working + cache)} on a GPU (weights "
            f"{show_bytes(weights)}, working space {show_bytes(working)}, cache {show_bytes(cache)}), and there are "
            f"{show_bytes(size)}; " + (f"{most} would fit" if most else "not even one fits")
        )
    found = None
    if fits:
        work = step_work(
            shape,
            scheme,
            kv,
            -(-rows // stages),
            tokens_each,
            tensor_parallel=tensor,
            batch_invariant=batch_invariant,
        )
        unchecked = _unchecked(shape, scheme, kv, gpus, rows, bandwidth)
        gathered = bool(scheme.storage((4096, 4096)).get("permuted"))  # inputs that cannot be split
        slower = BANDWIDTH / bandwidth
        found = _estimate(shape, work, rows, -(-rows // stages), tensor, cost, slower, gathered, unchecked)
    away = None
    if gpus == 1 and weights + working_bytes_of(s, 1, BUDGET, _F16) + page > size:  # not for want of a cache
        rows = batch or 1
        work = step_work(shape, scheme, kv, rows, tokens_each, batch_invariant=batch_invariant)
        links = {"hits": hits, "pcie": pcie, "bandwidth": bandwidth}
        away = streamed(shape, scheme, kv, work, memory=size, batch=rows, **links)  # type: ignore[arg-type]
    return Plan(
        model=shape.name,
        scheme=str(scheme),
        kv=str(kv),
        gpus=gpus,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        memory_bytes=size,
        parameters=shape.parameters,
        bits_per_weight=8 * inside / sum(m.N * m.K * m.count for m in shape.matrices),
        fits=fits,
        why_not=why,
        weight_bytes=weights,
        working_bytes=working,
        cache_bytes=cache,
        bytes_per_gpu=weights + working + cache,
        bytes_per_token=page // kv.page,
        tokens=pages * kv.page,
        context=tokens_each,
        batch=rows,
        most_sequences=most,
        estimate=found,
        streamed=away,
    )


def _unchecked(
    shape: PlannedShape, scheme: Quantizer, kv: KVFormat, gpus: int, batch: int, bandwidth: float
) -> tuple[str, ...]:
    """Return in which respects a plan differs from all steps that were measured."""
    bits = {b for own in kv.layers(len(shape.spec.layers)) for b in (own.bits, own.v_bits)}
    found = {
        "several GPUs": gpus > 1,
        "a mixture of experts": shape.experts is not None,
        "mixed weights (the one step that was measured took 29% longer than estimated)": (
            scheme.storage((4096, 4096))["format"] == "mixed"
        ),
        "3-bit caches": 3 in bits,
        "several sequences of another shape than llama2-7b": batch > 1 and shape.name != "llama2-7b",
        f"more than {MOST} sequences": batch > MOST,
        "another GPU than the H200": bandwidth != BANDWIDTH,
    }
    return tuple(what for what, so in found.items() if so)


def _estimate(
    shape: PlannedShape,
    work: StepWork,
    batch: int,
    rows: int,
    tensor: int,
    cost: CostModel | None,
    slower: float,
    gathered: bool,
    unchecked: tuple[str, ...],
) -> Estimate:
    """Return the speed; with stages, each works on its part of the batch while the others do on theirs."""
    talk = 0.0
    if tensor > 1:  # two all-reduces of a layer: what attention and what the feed-forward adds
        sent = 2 * (tensor - 1) / tensor * rows * shape.spec.width * _F16
        talk = 2 * work.layers * (_ALL_REDUCE_MS + sent / _LINK / 1e6)
    if tensor > 1 and gathered:  # and two all-gathers: of what attention's last matrix reads, and the feed-forward's
        read = shape.spec.heads * shape.spec.head_size + shape.spec.inner
        sent = (tensor - 1) / tensor * rows * read * _F16
        talk += work.layers * (2 * _ALL_REDUCE_MS + sent / _LINK / 1e6)
    ms = slower * milliseconds(work) + talk
    speed = 1e3 * batch / ms
    return Estimate(ms, speed, 1e3 / ms, talk, unchecked, cost.per_million(speed) if cost else None)


def enough_gpus(shape: PlannedShape, scheme: Quantizer, kv: KVFormat, *, gpus: int, **options: Any) -> int | None:
    """Return the next power of two of GPUs on which a plan fits; None where up to 1024 are not enough."""
    for more in (1 << i for i in range(1, 11) if 1 << i > gpus):
        try:
            if plan(shape, scheme, kv, gpus=more, **options).fits:
                return more
        except (CapacityError, SchemeError):  # one layer is still too large, or there are more stages than layers
            continue
    return None


def sequences(count: int) -> str:
    """Write a number of sequences."""
    return f"{count} sequence{'' if count == 1 else 's'}"


def memory_by_part(found: Plan) -> Mapping[str, int]:
    """Return what the memory of a GPU is for."""
    return {"weights": found.weight_bytes, "working space": found.working_bytes, "cache": found.cache_bytes}


def vllm_command(found: Plan, directory: str) -> str:
    """Return the command that serves a checkpoint with vLLM on the plan's GPUs."""
    parts = ["vllm", "serve", directory]
    for option, count in (
        ("--tensor-parallel-size", found.tensor_parallel),
        ("--pipeline-parallel-size", found.pipeline_parallel),
    ):
        parts += [option, str(count)] if count > 1 else []
    parts += ["--max-model-len", str(found.context), "--max-num-seqs", str(found.batch)]
    if found.gpus > NODE:
        parts += ["--distributed-executor-backend", "ray"]
    return " ".join(parts)
