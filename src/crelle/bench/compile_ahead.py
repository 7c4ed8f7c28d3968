"""Compile what a measurement of an engine launches, its checks included, and not in the middle of it."""

from collections.abc import Iterable

from crelle.engine.compile_ahead import compile_kernels, prompt_sizes
from crelle.engine.engine import Engine

# What crelle.bench.load.engine_load runs before it measures: a short prompt; CHECKED prompts, all at once, with
# answers.
WARM_UP_TOKENS, CHECKED, CHECK_PROMPT, CHECK_TOKENS = 8, 2, 24, 8


def compile_ahead(
    engine: Engine, sequences: Iterable[int], prompt_tokens: int = 0, prompts: Iterable[int] = ()
) -> tuple[int, float]:
    """Compile for decode steps of so many sequences and prefills of up to so many tokens; return kernels and seconds.

    prompts: tokens of prefills, besides. An engine without CUDA graphs has nothing to compile.
    """
    checks = {WARM_UP_TOKENS, CHECK_PROMPT, CHECKED * CHECK_PROMPT}
    sizes = checks.union(prompt_sizes(prompt_tokens), prompts)
    # The pass that the engine is compared with reads a prompt and its answer but for the last token.
    return compile_kernels(engine, {1, CHECKED, *sequences}, sizes, passes=[CHECK_PROMPT + CHECK_TOKENS - 1])
