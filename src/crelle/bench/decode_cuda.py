"""How fast a whole model decodes on a GPU: ms and joules per token, and how near that is to reading its weights once.

    1. build     from a file, or in a real shape with random weights, layer by layer (crelle.bench.model_shapes)
    2. check     what it decodes token by token must be what it would choose having read it all at once, twice the same
    3. time      an Engine reads a context and generates, as for `generate` and `serve`; the median time between tokens
    4. energy    of generations one after the other, less that of reading the context

The step's ceiling is the time of a plain read of its weights, measured in the same run. Keys and values are not counted
as bytes: at a context of a few hundred tokens they are less than a percent. Runs on a CPU too, for tests.
"""

import gc
from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from crelle.bench.energy import Energy, per_call
from crelle.bench.engine_decode import BUDGET, EngineDecoder, Generation
from crelle.bench.kernels.cuda_timer import Ceiling
from crelle.bench.kernels.step_breakdown import StepBreakdown, breakdown
from crelle.bench.load.no_tokenizer import NoTokenizer
from crelle.bench.model_shapes import RandomWeights
from crelle.bench.planner.cost import Cost
from crelle.engine.compile_ahead import compile_kernels
from crelle.engine.llm import LLM
from crelle.engine.memory.experts import expert_offload, expert_uses, offload_of
from crelle.engine.memory.machine import free_on_host
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import CapacityError, SchemeError, UnsupportedError
from crelle.formats.base import nbytes
from crelle.formats.kv.pages import KVFormat
from crelle.formats.storage.open import Weights
from crelle.kernels.cuda.executor import supports_model
from crelle.models.linear import QuantLinear
from crelle.models.loader import Model, build

ROUNDS = 5  # generations that are timed
TOLERANCE = 0.3  # of the way from the best logit to the mean one; a token chosen by chance is at 1
_SPARE = 2 << 30  # bytes beside the weights


@dataclass(frozen=True, slots=True)
class DecodeCuda:
    """One measurement."""

    model: str
    scheme: str
    device: str
    batch: int
    context: int  # tokens before the first that is decoded
    tokens: int  # decoded in one generation
    layers: int
    kernels: dict[str, int]  # how many matrices each multiplies
    graph: bool  # whether a step is one CUDA graph
    graph_note: str | None  # why not
    disagreement: float  # worst distance of a chosen token from the best, 0 … 1; see `check`
    milliseconds_per_token: float  # of one step, for all sequences of the batch
    tokens_per_second: float  # of all sequences together
    prefill_milliseconds: float
    weight_bytes: int  # that a step reads
    gb_per_s: float
    read_ceiling_gb_per_s: float | None
    read_ceiling: str | None
    share_of_ceiling: float | None
    peak_memory_bytes: int | None
    joules_per_token: float | None
    energy_note: str | None  # why there are no joules
    baseline: str | None = None
    baseline_milliseconds_per_token: float | None = None
    speedup: float | None = None
    baseline_joules_per_token: float | None = None
    cost: Cost | None = None  # of a million tokens, where it was asked for
    breakdown: StepBreakdown | None = None  # of the step's graph by kind of kernel, where it was asked for
    memory: str | None = None  # the limit within which it was loaded
    experts: str | None = None  # how they are streamed, where not all fit
    share_of_hits: float | None = None  # of the experts that tokens took, those that were on the GPU


class Decoder(Protocol):
    """What is timed."""

    def generate(self, ids: Tensor, tokens: int) -> Generation: ...


def measure(
    weights: Weights,
    scheme: str,
    device: torch.device,
    *,
    tokens: int = 128,
    context: int = 128,
    batch: int = 1,
    rounds: int = ROUNDS,
    kernel: str | None = None,
    ceiling: Ceiling | None = None,
    energy: bool = True,
    profile: bool = False,
    memory: str | None = None,
) -> DecodeCuda:
    """Build, check and time one model; `scheme` is only what the row says of it; `profile` adds the breakdown.

    memory: a limit for the GPU's; experts that do not fit are streamed.
    """
    if tokens < 3 or context < 1 or batch < 1 or rounds < 1:
        raise SchemeError("a decode benchmark takes at least 3 tokens, a context of 1, a batch of 1 and one round")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if memory is None and isinstance(weights, RandomWeights) and (reason := does_not_fit(weights, device)):
        raise CapacityError(reason)
    try:
        return _measure(
            weights, scheme, device, tokens, context, batch, rounds, kernel, ceiling, energy, profile, memory
        )
    except torch.cuda.OutOfMemoryError as e:
        first = str(e).split(". ")[0]
        raise CapacityError(f"{weights.path} at {scheme}, batch {batch}, does not fit this GPU: {first}") from None
    finally:
        free_memory()


def _measure(
    weights: Weights,
    scheme: str,
    device: torch.device,
    tokens: int,
    context: int,
    batch: int,
    rounds: int,
    kernel: str | None,
    ceiling: Ceiling | None,
    energy: bool,
    profile: bool,
    memory: str | None,
) -> DecodeCuda:
    offload = expert_offload(weights, device, memory, KVFormat())
    model = build(weights, device, kernel=kernel, offload=offload)
    if context + tokens > model.spec.context:
        raise CapacityError(
            f"{context} + {tokens} tokens do not fit the model's context of {model.spec.context}; "
            "reduce `context` or `tokens`"
        )
    llm = LLM(model, cast(Tokenizer, NoTokenizer()), weights)
    decoder = EngineDecoder(llm, batch, context + tokens)
    size, why = step_bytes(model), supports_model(model, llm.kv)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(model.spec.vocabulary, (batch, context), generator=random)
    prompts = {min(batch * context, BUDGET), context}
    compile_kernels(decoder.engine, {batch}, prompts, passes=[batch * (context + tokens - 1)])
    gap = check(model, decoder, ids, tokens)
    made = [decoder.generate(ids, tokens) for _ in range(rounds)]
    prefill = median(generation.first for generation in made)
    spent = _energy(decoder, ids, tokens, device) if energy else Energy(reason="not asked for")
    ms = 1e3 * median(step for generation in made for step in generation.steps)
    speed = size / ms / 1e6
    executor = decoder.engine.runner.cuda_executor(None) if profile else None
    uses, hits = expert_uses(model)
    return DecodeCuda(
        model=weights.path.name,
        scheme=scheme,
        device=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        batch=batch,
        context=context,
        tokens=tokens,
        layers=len(model.spec.layers),
        kernels=dict(Counter(linear.kernel for linear in model.linears())),
        graph=why is None,
        graph_note=why,
        disagreement=gap,
        milliseconds_per_token=ms,
        tokens_per_second=1e3 * batch / ms,
        prefill_milliseconds=1e3 * prefill,
        weight_bytes=size,
        gb_per_s=speed,
        read_ceiling_gb_per_s=ceiling.gb_per_s if ceiling else None,
        read_ceiling=ceiling.how if ceiling else None,
        share_of_ceiling=speed / ceiling.gb_per_s if ceiling else None,
        peak_memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        joules_per_token=spent.joules,
        energy_note=spent.reason,
        breakdown=None if executor is None else breakdown(executor.graph(batch).replay),
        memory=memory,
        experts=None if (streamed := offload_of(model)) is None else str(streamed),
        share_of_hits=hits / uses if uses else None,
    )


def with_baseline(row: DecodeCuda, plain: DecodeCuda | None) -> DecodeCuda:
    """Return a measurement with the ratio to the unquantized model of the same run."""
    if plain is None:
        return row
    return replace(
        row,
        baseline=f"our own {plain.scheme}",
        baseline_milliseconds_per_token=plain.milliseconds_per_token,
        speedup=plain.milliseconds_per_token / row.milliseconds_per_token,
        baseline_joules_per_token=plain.joules_per_token,
    )


def does_not_fit(weights: RandomWeights, device: torch.device) -> str | None:
    """Return why a model of random weights is too large for the memory that is free on a device, if so."""
    free_memory()
    if device.type == "cuda":
        free, room = torch.cuda.mem_get_info()[0], 1.05  # padding, and a layer that is laid out anew
    else:
        free, room = free_on_host().size, 3.0  # as stored, and as f32 where plain
    need = room * weights.nbytes() + _SPARE
    if need <= free:
        return None
    what = f"{weights.path} at {weights.scheme}"
    return f"{what} takes about {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free on this {device.type} device"


def check(model: Model, decoder: Decoder, ids: Tensor, tokens: int) -> float:
    """Compare decoding with one pass over the same tokens, which knows neither steps nor a cache that grew.

    Returns how far, at worst, the logit of a chosen token is below the best one, as a share of the distance from the
    best to the mean: 0 where they agree, a little where two tokens are nearly as likely and roundings differ, 1 where
    the choice has nothing to do with the model. Refuses more than TOLERANCE, NaN, and a second run that differs.
    """
    said = decoder.generate(ids, tokens).tokens
    if not torch.equal(said, decoder.generate(ids, tokens).tokens):
        raise UnsupportedError("two runs of the same decoding differ, so it is not timed")
    whole = torch.cat([ids, said[:, :-1]], dim=1).to(model.device)
    logits = model(whole, model.new_cache(ids.shape[0]))[:, ids.shape[1] - 1 :]  # [B, tokens, V]
    best, mean = logits.amax(-1), logits.mean(-1)
    chosen = logits.gather(2, said[..., None].to(logits.device))[..., 0]
    gap = float(((best - chosen) / (best - mean)).max())
    if not gap <= TOLERANCE:  # a NaN fails too
        raise UnsupportedError(
            f"decoding is wrong here: it chose a token {gap:.0%} of the way from the best to the mean of what one pass "
            "over the same tokens gives, so it is not timed"
        )
    return gap


def step_bytes(model: Model) -> int:
    """Return the bytes of all matrices that one step reads, in the layout that it reads."""
    return sum(map(_bytes, model.linears()))


def _bytes(linear: QuantLinear) -> int:
    size: Any = getattr(linear.prepared.data, "nbytes", None)
    return size if isinstance(size, int) else nbytes(linear.weight)


def _energy(decoder: Decoder, ids: Tensor, tokens: int, device: torch.device) -> Energy:
    """Return the joules of one decoded token of one sequence."""
    if device.type != "cuda":
        return Energy(reason="energy is counted on NVIDIA GPUs only")
    whole = per_call(lambda: decoder.generate(ids, tokens))
    if whole.joules is None:
        return whole
    read = per_call(lambda: decoder.generate(ids, 1))
    share = (tokens - 1) * ids.shape[0]
    return Energy((whole.joules - (read.joules or 0.0)) / share, (whole.seconds - read.seconds) / share)


def free_memory() -> None:
    """Give back what a model that is no longer needed held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
