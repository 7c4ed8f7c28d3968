"""Compile the CUDA kernels that an engine will launch before it runs: all cores at once, kept in the cache.

Tile configs of products without a measurement are measured first (kernels/cuda/runtime/autotune.py).
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter

import torch

from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.engine.speculation.speculator import ROWS
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.launch import recording
from crelle.kernels.cuda.runtime import autotune
from crelle.models.cache import CENTER_SAMPLE
from crelle.models.loader import Model

_EACH = 32  # numbers of prompt tokens up to which each may have a kernel of its own; above it, multiples of ROWS do
_ROWS = 8


def prompt_sizes(most: int) -> list[int]:
    """Return numbers of tokens, of at most `most`, among which are all for which other kernels are chosen."""
    return [*range(2, min(most, _EACH) + 1), *range(_EACH + _ROWS, most + _ROWS, _ROWS)]


def compile_kernels(
    engine: Engine,
    sequences: Iterable[int],
    prompts: Iterable[int],
    *,
    passes: Iterable[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, float]:
    """Compile for decode steps of so many sequences and prefills of so many tokens; return kernels and seconds.

    passes: tokens of whole passes of the model, besides. Without CUDA there is nothing to compile.
    """
    model, begun = engine.llm.model, perf_counter()
    if not on_gpu(model):
        return 0, 0.0
    # First whole passes: those that were asked for, and the one by which an executor finds the centres of keys.
    with torch.inference_mode(), recording() as whole:
        for tokens in (*passes, CENTER_SAMPLE):
            ids = torch.zeros(1, min(tokens, model.spec.context), dtype=torch.int64, device=model.device)
            model(ids, model.new_cache(), last=True)
    jit.compile_all(sorted(whole), progress=progress)
    if (executor := engine.runner.cuda_executor(None)) is None:
        return len(whole), perf_counter() - begun
    guesses = engine.speculator.settings.method != "off"
    rows = {*sequences, *(range(1, ROWS + 1) if guesses else ())}
    autotune.tune(executor, rows)  # first: it may choose other kernels
    found = executor.kernels(rows, set(prompts)) - whole
    if engine.speculator.draft is not None and isinstance(drafts := engine.speculator.draft.executor, CudaExecutor):
        found |= drafts.kernels(range(1, ROWS + 1), set(prompts)) - whole
    jit.compile_all(sorted(found), progress=progress)
    return len(whole) + len(found), perf_counter() - begun


def mark_of(llm: LLM, *settings: object) -> Path | None:
    """Return the file whose presence says that the kernels of a model with such settings have been compiled.

    None where there is nothing to compile. Finding out which kernels a model launches takes longer than a look at a
    file; a mark without its kernels costs time alone: what is missing is compiled when it is launched.
    """
    if not on_gpu(llm.model):
        return None
    parts = [*map(str, settings), str(llm.kv), jit.toolchain()]
    return jit.kernel_directory() / f"compiled-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"


def on_gpu(model: Model) -> bool:
    """Tell whether a model runs on CUDA."""
    return model.device.type == "cuda"
