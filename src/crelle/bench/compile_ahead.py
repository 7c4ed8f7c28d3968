"""Compile what an engine will launch before it runs: side by side, and not in the middle of a measurement."""

from collections.abc import Iterable
from time import perf_counter

import torch

from crelle.engine.engine import Engine
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.launch import recording
from crelle.models.cache import CENTER_SAMPLE
from crelle.models.loader import Model

_EACH = 32  # numbers of prompt tokens up to which each may have a kernel of its own; above it, multiples of ROWS do
_ROWS = 8
# What crelle.bench.engine_load runs before it measures: a short prompt; CHECKED prompts, all at once, with answers.
WARM_UP_TOKENS, CHECKED, CHECK_PROMPT, CHECK_TOKENS = 8, 2, 24, 8


def prompt_sizes(most: int) -> list[int]:
    """Return numbers of tokens, of at most `most`, among which are all for which other kernels are chosen."""
    return [*range(2, min(most, _EACH) + 1), *range(_EACH + _ROWS, most + _ROWS, _ROWS)]


def compile_ahead(
    engine: Engine, sequences: Iterable[int], prompt_tokens: int = 0, prompts: Iterable[int] = ()
) -> tuple[int, float]:
    """Compile for decode steps of so many sequences and prefills of up to so many tokens; return kernels and seconds.

    prompts: tokens of prefills, besides. An engine without CUDA graphs has nothing to compile.
    """
    model, begun = engine.llm.model, perf_counter()
    if not _on_gpu(model):
        return 0, 0.0
    # First the pass that the engine is compared with, and the one by which an executor finds the centres of keys.
    with torch.inference_mode(), recording() as whole:
        for tokens in (CHECK_PROMPT + CHECK_TOKENS - 1, CENTER_SAMPLE):
            ids = torch.zeros(1, min(tokens, model.spec.context), dtype=torch.int64, device=model.device)
            model(ids, model.new_cache(), last=True)
    jit.compile_all(sorted(whole))
    if (executor := engine.runner.cuda_executor(None)) is None:
        return len(whole), perf_counter() - begun
    checks = {WARM_UP_TOKENS, CHECK_PROMPT, CHECKED * CHECK_PROMPT}
    found = executor.kernels({1, CHECKED, *sequences}, checks.union(prompt_sizes(prompt_tokens), prompts)) - whole
    jit.compile_all(sorted(found))
    return len(whole) + len(found), perf_counter() - begun


def _on_gpu(model: Model) -> bool:
    return model.device.type == "cuda"
