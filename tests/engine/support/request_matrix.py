"""The requests that every engine must answer: prompts around pages and budgets, of every weight and KV format.

    SCHEMES x KVS     each scheme with four KV formats, each KV format with four schemes
    FACTORS           budget, prefix sharing, greedy or mixed: in all pairs, and each with every scheme and KV format
    requests          of one case: every prompt length; answers and samplings go round from case to case

What a request must get is what it gets from an engine that serves nothing else (`single`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from conftest import quantized_copy, write_tiny_model

from crelle import LLM, Sampling
from crelle.bench.load.model_sources import NoTokenizer
from crelle.bench.model_shapes import RandomWeights, llama_config
from crelle.engine.engine import Engine, Handle
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.formats.base import QuantTensor
from crelle.formats.storage.open import open_weights
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.models.loader import build

CONTEXT, PAGE, WORDS = 2048, 16, 320
LENGTHS = (1, 15, 16, 17, 511, 512, 513, 1500, CONTEXT - 1)
EAGER_LENGTHS = (1, 15, 16, 17, 40)  # where torch runs layer by layer, token by token
ANSWERS = (12, 0, 1)  # tokens; 0: its first one is an end token
NESTED = "bcq-nested:bits=4,group=64,data=false"
PERMUTED = "permuted"  # of no scheme: what importers make of act-order checkpoints
FP4 = ("mxfp4", "nvfp4")
TRELLIS = ("trellis:bits=2", "trellis:bits=3,rotate=false")
SCHEMES = (
    "fp16",
    "rtn:bits=4,group=64",
    "bcq:bits=3,group=64",
    "gptq:bits=4,group=64",
    "gptq:bits=3,group=64,free=true",
    "awq:bits=4,group=row",
    "hbcq:bits=2,group=64",
    NESTED,
    "mixed:group=16,four=0.25",
    "atom:w=4,a=4,group=64,outliers=64",
    "atom:w=4,a=8,levels=2,group=64,outliers=64",
    PERMUTED,
    *FP4,
    *TRELLIS,
)
KVS = (
    *("16", "8", "4", "3", "2", "k4v2", "k8v4", "k8v3", "k16v8"),
    *("4,layers.0=8", "4:center=false,rotate=false", "16:page=32"),
)
FACTORS = ((512, False, False), (512, True, True), (37, False, True), (37, True, False))  # budget, sharing, mixed


@dataclass(frozen=True)
class Case:
    """One batch of requests over one model."""

    number: int
    scheme: str
    kv: str
    budget: int
    sharing: bool
    mixed: bool  # some sequences sample, some fork; else all are greedy, and every step can be started ahead

    def __str__(self) -> str:
        prefixes, sampling = "shared" if self.sharing else "alone", "mixed" if self.mixed else "greedy"
        return f"{self.scheme}-kv{self.kv}-{self.budget}-{prefixes}-{sampling}"


CASES = [
    Case(4 * i + j, scheme, KVS[(i + 5 * j) % len(KVS)], *FACTORS[j])
    for i, scheme in enumerate(SCHEMES)
    for j in range(len(FACTORS))
]


@dataclass(frozen=True)
class Asked:
    """One request; `answer` tokens are wanted, where the context has room for them."""

    prompt: tuple[int, ...]
    answer: int
    sampling: Sampling
    n: int = 1
    bits: int | None = None


def requests(case: Case, eager: bool = False) -> list[Asked]:
    """Return the requests of a case, in order of arrival; the longest prompts are in every fourth case."""
    random = torch.Generator().manual_seed(case.number)
    whole = torch.randint(WORDS, (CONTEXT,), generator=random).tolist()
    found = []
    long = case.number % 4 == case.number // 4 % 4  # each scheme once, with each of the FACTORS
    for i, length in enumerate(EAGER_LENGTHS if eager else [n for n in LENGTHS if n < 1000 or long]):
        turn = case.number + i
        prompt = whole[:length] if case.sharing else torch.randint(WORDS, (length,), generator=random).tolist()
        warm = case.mixed and turn // len(ANSWERS) % 2 == 0
        sampling = Sampling(max_tokens=max(ANSWERS), **({"temperature": 1.2, "seed": 7 + i} if warm else {}))
        forks = 2 if case.mixed and length in (16, 513) else 1
        bits = (None, 2, 3)[turn % 3] if case.scheme == NESTED else None
        found.append(Asked(tuple(prompt), ANSWERS[turn % len(ANSWERS)], sampling, forks, bits))
    first = case.number % len(found)
    return found[first:] + found[:first]


# --- the models ------------------------------------------------------------------------------------------------------


class _Permuted(RandomWeights):
    """Matrices whose groups lie in another order than the inputs: the same one for all that read an input."""

    def matrix(self, module: str) -> QuantTensor:
        w = super().matrix(module)
        if w.format == "dense":
            return w
        order = torch.randperm(w.shape[1], generator=self._random(f"order.{w.shape[1]}"), device=self.device)
        return PermutedTensor(w, order.to(torch.int32))  # type: ignore[arg-type]


def make_model(scheme: str, device: str, folder: Path) -> LLM:
    """Return a random model of a scheme without end tokens; folder: for what must be on disk.

    device: cpu, cuda, or recorded: as for a GPU, but on the CPU (recorded_gpu.py).
    """
    width, inner = (128, 192) if device == "cpu" else (512, 768)
    device, dtype = ("cpu", torch.float16) if device == "recorded" else (device, None)
    sizes = llama_config(width, 2, width // 64, inner, kv_heads=width // 128, vocabulary=WORDS, context=CONTEXT)
    if scheme == NESTED:  # precisions are those of a checkpoint
        to = write_tiny_model(folder / "whole", **sizes, head_dim=64, bos_token_id=None, eos_token_id=None)
        weights = open_weights(quantized_copy(to, folder / "nested", NESTED))
        llm = LLM(build(weights, torch.device(device), dtype), cast(Tokenizer, NoTokenizer()), weights)
        assert llm.precisions == (2, 3, 4)
        return llm
    kind = _Permuted if scheme == PERMUTED else RandomWeights
    weights = kind(sizes, "rtn:bits=4,group=64" if scheme == PERMUTED else scheme, device)
    return LLM(build(weights, torch.device(device), dtype), cast(Tokenizer, NoTokenizer()), weights)


model = cache(make_model)


# --- the runs --------------------------------------------------------------------------------------------------------

Found = list[tuple[str, list[int]]]  # of each sequence of a request: why it finished, and its tokens


def outcome(handle: Handle) -> Found:
    """Return what a request got; it must have ended without an error."""
    for output in handle.outputs:
        if output.error is not None:
            raise output.error
    return [(output.completion.finish_reason, output.completion.tokens) for output in handle.outputs]


def single(llm: LLM, case: Case, asked: Sequence[Asked], **options: Any) -> list[Found]:
    """Run requests one after the other, each alone and its prompt in one step; all of them to max_tokens."""
    pages = -(-CONTEXT // PAGE)
    limits = {"kv": case.kv, "pages": pages, "max_batch": 2, "budget": CONTEXT, "sharing": False, "speculate": "off"}
    engine = Engine(llm, **{**limits, **options})
    found = []
    for one in asked:
        handle = engine.add(list(one.prompt), one.sampling, n=one.n, bits=one.bits, ignore_end=True)
        engine.run()
        found.append(outcome(handle))
    return found


def wanted(asked: Sequence[Asked], alone: Sequence[Found]) -> tuple[frozenset[int], list[Found]]:
    """Return end tokens for the answers of 0 tokens, and what each request must get in a batch."""
    ends = frozenset(
        tokens[0] for one, found in zip(asked, alone, strict=True) for _, tokens in found if not one.answer
    )
    each = []
    for one, found in zip(asked, alone, strict=True):
        room = min(one.answer, CONTEXT - len(one.prompt))
        each.append([("length", tokens[:room]) if one.answer else ("stop", []) for _, tokens in found])
    return ends, each


def batch(
    llm: LLM, case: Case, asked: Sequence[Asked], ends: frozenset[int], **options: Any
) -> tuple[Engine, list[list[Found]]]:
    """Run requests in one engine, some of which come while others run; return it and what each request got.

    With prefix sharing all of them come twice: the second time their prompts are in the cache.
    """
    pages = 2 * CONTEXT // PAGE  # not all fit at once
    limits = {"kv": case.kv, "pages": pages, "max_batch": 12, "budget": case.budget, "sharing": case.sharing}
    engine = Engine(llm, **limits, **options)  # type: ignore[arg-type]
    llm.end_ids, runs = ends, list[list[Found]]()
    for _ in range(1 + case.sharing):
        handles = []
        for i, one in enumerate(asked):
            sampling = replace(one.sampling, max_tokens=max(1, one.answer))
            ignored = one.answer > 0
            handles.append(engine.add(list(one.prompt), sampling, n=one.n, bits=one.bits, ignore_end=ignored))
            for _ in range(i % 3):
                engine.step()
        engine.run()
        runs.append([outcome(handle) for handle in handles])
    assert engine.stats.tokens_reused > 0 or not case.sharing
    assert engine.stats.failed == 0
    engine.blocks.assert_consistent([])
    assert engine.blocks.used == 0
    return engine, runs


TOLERANCE = 0.25  # of a log-probability, where the order of sums and with it some codes may differ
TOLERANCE_A4 = 2.0  # the same where x has 4 bits: one code that rounds the other way moves the logits by a fifth


def assert_close(llm: LLM, case: Case, one: Asked, got: Found, alone: Found, ends: frozenset[int]) -> None:
    """Check an answer that need not be the same bit for bit: where a greedy token differs, it was nearly as likely."""
    tolerance = TOLERANCE_A4 if "a=4" in case.scheme else TOLERANCE
    room = max(1, min(one.answer, CONTEXT - len(one.prompt)))
    for (reason, tokens), (_, reference) in zip(got, alone, strict=True):
        assert reason == "length" if one.answer else reason in ("stop", "length")
        assert len(tokens) == (room if reason == "length" else 0)
        if one.sampling.temperature or (not tokens and reference[0] in ends):
            continue
        at = next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), None)
        if at is not None or not tokens:
            at = at or 0
            best, likely = _likely(llm, case, one, reference[:at])
            assert max(likely.get(t, -torch.inf) for t in (tokens[at : at + 1] or ends)) > best - tolerance


def _likely(llm: LLM, case: Case, one: Asked, before: list[int]) -> tuple[float, dict[int, float]]:
    """Return the log-probabilities of the likeliest next tokens after the prompt and some tokens, and their largest."""
    engine = Engine(llm, kv=case.kv, pages=CONTEXT // PAGE, max_batch=1, budget=CONTEXT, batch_invariant=False)
    handle = engine.add([*one.prompt, *before], Sampling(max_tokens=1), bits=one.bits, logprobs=20, ignore_end=True)
    engine.run()
    outcome(handle)
    ((found,),) = [output.logprobs or () for output in handle.outputs]
    return found.top[0][1], dict(found.top)
