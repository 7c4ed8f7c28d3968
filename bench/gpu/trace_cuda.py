"""A recorded hour of chats, scaled until a GPU is saturated: a 7B shape, by weights and cache, within a memory cap.

    python bench/gpu/trace_cuda.py OUT.json TRACE.csv [--rate 40] [--seconds 18] [--weights w4a4] [--memory 24GB,130GB]
    python bench/gpu/trace_cuda.py CUT.csv TRACE.csv --rate 40 --seconds 18     # no GPU: only what those seconds need
    python bench/gpu/trace_cuda.py CUT.csv TRACE.csv --rate 8 --rounds 4        # as conversations of four rounds
    python bench/gpu/trace_cuda.py OUT.json CUT.csv
    crelle bench plot OUT.json

The trace is Azure's (arrival, prompt tokens, answer tokens; shared/data/traces). Requests come --rate a second, more
than any of the engines can answer (not given: as the file says), for --seconds; then each run is ended, and what is
under way counts with the tokens that it got. Waits are those of requests that got their first token in that time.
Kernels are compiled before. What OUT.json has already is not measured again. On an H200 with 16 cores a row takes some
45 seconds: building the model 8, compiling 10, graphs 5, the check, 18 of traffic.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu
from crelle.bench.load.engine_load import EngineLoadResult, serve
from crelle.bench.load.model_sources import free_memory, random_llm
from crelle.bench.load.trace import TraceRequest, multi_round, read_trace, write_trace
from crelle.errors import CrelleError
from crelle.formats.kv.pages import KVFormat
from crelle.formats.storage.io import read_json

SHAPE, CONTEXT = "llama2-7b", 4096
WEIGHTS = {
    "fp16": ("fp16", "kv16"),
    "w8a8": ("atom:w=8,a=8", "kv8"),
    "w4a16": ("rtn:bits=4,group=128", "kv4"),
    "w4a16-kv16": ("rtn:bits=4,group=128", "kv16"),
    "w4a4": ("atom:w=4,a=4", "kv4"),
    "w4a8-two": ("atom:w=4,a=8,levels=2", "kv4"),
    "w3a16": ("bcq:bits=3,group=128", "kv4"),
}
DEFAULT = "fp16,w8a8,w4a16,w4a4"
MAX_BATCH, BUDGET = 256, 1024
Row = dict[str, Any]


def shown(row: EngineLoadResult) -> str:
    said = f"{row.scheme} {row.kv} {row.memory}: {row.tokens_per_second:.0f} tokens/s"
    said += f", later half {row.late_tokens_per_second:.0f}, at most {row.most_running} sequences"
    if row.first_token and row.per_token:
        each = ", ".join(f"{1e3 * v:.0f}" for v in (row.per_token.p50, row.per_token.p90, row.per_token.p99))
        said += f", first token {row.first_token.p50:.2f} s, a token p50, p90, p99 {each} ms"
    return said


def measure(
    to: Path, requests: list[TraceRequest], said: str, seconds: float, names: list[str], budgets: list[str]
) -> None:
    rows: list[Row] = read_json(to)["rows"] if to.is_file() else []
    for name in names:
        scheme, kv = WEIGHTS[name]
        done = {r["memory"] for r in rows if (r["scheme"], r["kv"]) == (scheme, str(KVFormat.parse(kv)))}
        todo = [memory for memory in budgets if memory not in done]
        if not todo:
            continue
        begun = perf_counter()
        llm = random_llm(SHAPE, scheme, torch.device("cuda"))
        print(f"{scheme}: built in {perf_counter() - begun:.1f} s", flush=True)
        for memory in todo:
            begun = perf_counter()
            options: Row = {"kv": kv, "memory": memory, "max_batch": MAX_BATCH, "budget": BUDGET}
            try:
                row = serve(llm, scheme, trace=requests, traffic=said, stop=seconds, **options)
                rows.append(asdict(row))
                print(f"{shown(row)}\n    {perf_counter() - begun:.1f} s", flush=True)
            except CrelleError as e:  # the others go on
                print(f"{scheme} {kv} {memory}: {e}", flush=True)
            command = f"python bench/gpu/trace_cuda.py {to.name} TRACE.csv --weights {','.join(names)}"
            write_result(to, {"command": command, "gpu": gpu(), "shape": SHAPE, "rows": rows})
            free_memory()
        del llm
        free_memory()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("trace", type=Path)
    options.add_argument("--rate", type=float)
    options.add_argument("--seconds", type=float, default=18.0)
    options.add_argument("--rounds", type=int, default=1, help="consecutive requests in a conversation")
    options.add_argument("--weights", default=DEFAULT, help=f"some of {', '.join(WEIGHTS)}")
    options.add_argument("--memory", default="24GB")
    given = options.parse_args()
    requests = read_trace(given.trace, context=CONTEXT, rate=given.rate, seconds=given.seconds)
    requests = multi_round(requests, given.rounds, CONTEXT)
    if given.out.suffix == ".csv":
        write_trace(given.out, requests)
        return
    said = f"{given.trace.name}, {len(requests)} requests in {given.seconds:g} s"
    measure(given.out, requests, said, given.seconds, given.weights.split(","), given.memory.split(","))


if __name__ == "__main__":
    main()
