"""Tokens per second of decoding and of prefill on a CPU, by an Engine with one sequence."""

from dataclasses import dataclass
from pathlib import Path

import torch

from crelle.bench.engine_decode import EngineDecoder
from crelle.bench.external import llama_bench
from crelle.bench.planner.cost import Cost
from crelle.engine.llm import LLM
from crelle.errors import CapacityError


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Best of several rounds, as tokens per second."""

    who: str
    threads: int
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    decode_tokens: int
    prefill_tokens: int
    cost: Cost | None = None  # per million tokens, if requested


def default_sizes(llm: LLM) -> dict[str, int]:
    """Return the default numbers of decoded tokens and of prompt tokens, shortened to the model's context."""
    context = llm.model.spec.context
    return {"tokens": max(1, min(64, context - 2)), "prompt": max(1, min(512, context - 1))}


def measure(llm: LLM, threads: int, *, tokens: int, prompt: int, rounds: int = 5) -> DecodeSpeed:
    """Time greedy decoding of `tokens` after a prompt of one token, and the first token after a prompt of `prompt`."""
    context = llm.model.spec.context
    for name, given, more in (("prompt", prompt, 1), ("tokens", tokens, 2)):
        if given + more > context:
            raise CapacityError(
                f"{given + more} tokens do not fit the model's context of {context}; "
                f"`{name}` must be at most {context - more}"
            )
    best_decode = best_prefill = float("inf")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, llm.model.spec.vocabulary, (1, prompt), generator=random)
    decoder = EngineDecoder(llm, 1, max(prompt, tokens + 1) + 1)
    for _ in range(rounds):
        best_decode = min(best_decode, sum(decoder.generate(ids[:, :1], tokens + 1).steps))
        best_prefill = min(best_prefill, decoder.generate(ids, 1).first)
    return DecodeSpeed("crelle", threads, tokens / best_decode, prompt / best_prefill, tokens, prompt)


def measure_llama_bench(program: Path, model: Path, threads: int, *, tokens: int, prompt: int) -> DecodeSpeed:
    """Let an installed llama-bench time a GGUF file in the same way."""
    decode, prefill = llama_bench(program, model, threads, tokens, prompt)
    return DecodeSpeed(f"{program.name} {model.stem}", threads, decode, prefill, tokens, prompt)
