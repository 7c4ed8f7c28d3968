"""Tokens per second of decoding and of prefill, on a CPU."""

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from crelle.bench.cost import Cost
from crelle.bench.external import llama_bench
from crelle.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Best of several rounds, as tokens per second."""

    who: str
    threads: int
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    decode_tokens: int
    prefill_tokens: int
    cost: Cost | None = None  # of a million tokens, where it was asked for


def measure(llm: LLM, threads: int, *, tokens: int = 64, prompt: int = 512, rounds: int = 5) -> DecodeSpeed:
    """Time greedy decoding of `tokens` from an empty cache, and one pass over `prompt` tokens."""
    best_decode = best_prefill = float("inf")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, llm.model.spec.vocabulary, (1, prompt), generator=random)
    for _ in range(rounds):
        cache = llm.model.new_cache()
        next_id = ids[:, :1]
        llm.model(next_id, cache, last=True)  # the first token warms the caches, as every benchmark does
        begun = perf_counter()
        for _ in range(tokens):
            next_id = llm.model(next_id, cache, last=True)[:, -1].argmax(-1, keepdim=True)
        best_decode = min(best_decode, perf_counter() - begun)
        begun = perf_counter()
        llm.model(ids, llm.model.new_cache(), last=True)
        best_prefill = min(best_prefill, perf_counter() - begun)
    return DecodeSpeed("crelle", threads, tokens / best_decode, prompt / best_prefill, tokens, prompt)


def measure_llama_bench(
    program: Path, model: Path, threads: int, *, tokens: int = 64, prompt: int = 512
) -> DecodeSpeed:
    """Let an installed llama-bench time a GGUF file in the same way."""
    decode, prefill = llama_bench(program, model, threads, tokens, prompt)
    return DecodeSpeed(f"{program.name} {model.stem}", threads, decode, prefill, tokens, prompt)
