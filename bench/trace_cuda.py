"""A recorded hour of chats, scaled until a GPU is saturated: a 7B shape, by weights and cache, with and without a cap.

    python bench/trace_cuda.py OUT.json TRACE.csv [RATE] [SECONDS]
    crelle bench plot OUT.json

The trace is Azure's (arrival, prompt tokens, answer tokens; shared/data/traces). Requests come RATE a second, more than
any of the engines can answer, for SECONDS; then each run is ended, and what is under way counts with the tokens that it
got. Waits are those of requests that got their first token in that time. Kernels are compiled before.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from crelle.bench.cuda_timer import gpu
from crelle.bench.engine_load import serve
from crelle.bench.environment import write_result
from crelle.bench.model_sources import free_memory, random_llm
from crelle.bench.trace import read_trace
from crelle.engine.llm import LLM
from crelle.kernels.cuda import gemm, jit
from crelle.kernels.cuda.fused_linear import FusedLinear
from crelle.kernels.cuda.weight_layout import CudaWeight

SHAPE = "llama2-7b"
PAIRS = (("fp16", 16), ("rtn:bits=4,group=128", 4), ("bcq:bits=3,group=128", 4))
MEMORY = ("24GB", "130GB")
MAX_BATCH, BUDGET = 256, 1024


def compile_for(llm: LLM, tokens: int) -> None:
    """Compile what products of up to so many rows need, side by side: not in the middle of a run."""
    graphed = llm.model.graphed()
    assert graphed is not None
    products = [p for p in graphed.run.layers[0] if isinstance(p, FusedLinear)]
    planes = [w for p in products for w in p.weights if isinstance(w, CudaWeight)]
    wanted = {v for w in planes for n in range(5, tokens + 1) for v in gemm.variants(w, n, llm.model.dtype)}
    jit.compile_all(sorted(wanted))


def main(to: Path, trace: Path, rate: float = 40.0, seconds: float = 20.0) -> None:
    rows = list[dict[str, Any]]()
    for scheme, kv in PAIRS:
        llm = random_llm(SHAPE, scheme, torch.device("cuda"))
        compile_for(llm, BUDGET)
        requests = read_trace(trace, context=llm.model.spec.context, rate=rate, seconds=seconds)
        for memory in MEMORY:
            options: dict[str, Any] = {"kv": kv, "memory": memory, "max_batch": MAX_BATCH, "budget": BUDGET}
            said = f"{trace.name}, {rate:g} a second"
            row = serve(llm, scheme, trace=requests, traffic=said, stop=seconds, **options)
            rows.append(asdict(row))
            speed = f"{row.tokens_per_second:.0f} tokens/s, later half {row.late_tokens_per_second:.0f}"
            print(f"{scheme} kv{kv} {memory}: {speed}", end="")
            if row.first_token and row.per_token:
                each = ", ".join(f"{1e3 * v:.0f}" for v in (row.per_token.p50, row.per_token.p90, row.per_token.p99))
                print(f", first token {row.first_token.p50:.2f} s, a token p50, p90, p99 {each} ms", end="")
            print(flush=True)
            command = f"python bench/trace_cuda.py {to.name} {trace.name} {rate:g} {seconds:g}"
            write_result(to, {"command": command, "gpu": gpu(), "shape": SHAPE, "rows": rows})
            free_memory()
        del llm
        free_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:5]))
