"""One stream in the engine on a GPU: time between tokens and time to the first token, checked before it is timed.

    python bench/gpu/engine_cuda.py OUT.json [--shape llama2-7b] [--schemes fp16,rtn:bits=4+group=128] [--prompts 128]

The same Engine as `crelle bench decode`, `generate` and `serve` run, each model built once for all of its rows. A plus
sign in a scheme stands for a comma. `linears` is the time of the matrix products of a prompt alone, by cuBLAS in f16.
"""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch

from crelle.bench.decode_cuda import free_memory, step_bytes
from crelle.bench.engine_decode import EngineDecoder
from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu, read_ceiling
from crelle.bench.load.engine_load import check
from crelle.bench.load.model_sources import random_llm

CONTEXT, TOKENS, ROUNDS = 192, 128, 5
SCHEMES = "fp16,rtn:bits=4+group=128,bcq:bits=3+group=128,bcq:bits=2+group=128,mixed:group=16+four=0.25+outliers=0.002"


def prompt(vocabulary: int, tokens: int) -> torch.Tensor:
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def cublas(shape: list[tuple[int, int]], rows: int) -> float:
    """Milliseconds of one pass of f16 products with matrices of these shapes, each of them in memory of its own."""
    weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) for n, k in shape]
    x = {k: torch.randn(rows, k, device="cuda", dtype=torch.float16) for _, k in shape}
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for w in weights:
            torch.nn.functional.linear(x[w.shape[1]], w)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def measure(shape: str, scheme: str, prompts: list[int], ceiling: float) -> dict[str, Any]:
    llm = random_llm(shape, scheme, torch.device("cuda"))
    spec = llm.model.spec
    decoder = EngineDecoder(llm, 1, min(spec.context, max([CONTEXT + TOKENS, *(p + 1 for p in prompts)])))
    gap, ids = check(decoder.engine), prompt(spec.vocabulary, CONTEXT)
    decoder.generate(ids, TOKENS)
    made = [decoder.generate(ids, TOKENS) for _ in range(ROUNDS)]
    ms = 1e3 * median(step for generation in made for step in generation.steps)
    first = {}
    for tokens in prompts:
        given = prompt(spec.vocabulary, tokens)
        first[tokens] = 1e3 * median([decoder.generate(given, 1).first for _ in range(2 + ROUNDS)][2:])
    size = step_bytes(llm.model)
    row = {"shape": shape, "scheme": scheme, "kv": str(llm.kv), "context": CONTEXT, "disagreement": gap}
    row |= {"milliseconds_per_token": ms, "tokens_per_second": 1e3 / ms, "weight_bytes": size}
    row |= {"share_of_ceiling": size / ms / 1e6 / ceiling, "first_token_milliseconds": first}
    print(
        f"{scheme}: {ms:.3f} ms a token, {row['share_of_ceiling']:.0%} of the ceiling, first token {first}", flush=True
    )
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("--shape", default="llama2-7b")
    options.add_argument("--schemes", default=SCHEMES)
    options.add_argument("--prompts", default="128,1024,4000")
    given = options.parse_args()
    prompts = [int(p) for p in given.prompts.split(",") if p]
    ceiling, rows = read_ceiling().gb_per_s, []
    for scheme in given.schemes.replace("+", "\0").split(","):
        rows.append(measure(given.shape, scheme.replace("\0", ","), prompts, ceiling))
        free_memory()
    linears = {}
    if given.shape == "llama2-7b":
        layer = [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)]
        linears = {tokens: cublas(layer * 32, tokens) for tokens in prompts}
        print(f"products by cuBLAS: {linears}")
    facts = {
        "command": f"python bench/gpu/engine_cuda.py {given.out.name} --shape {given.shape} --schemes {given.schemes}"
    }
    facts |= {"gpu": gpu(), "read_ceiling_gb_per_s": ceiling, "cublas_linears_milliseconds": linears, "rows": rows}
    write_result(given.out, facts)


if __name__ == "__main__":
    main()
