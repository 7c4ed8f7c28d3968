"""Decode throughput of a 7B shape with random weights on a GPU, by weights, cache and batch; then under a memory cap.

    python bench/serve_cuda.py OUT.json [SHAPE]
    crelle bench plot OUT.json

Every sequence has 1024 tokens in its pages (random ones); an engine decodes TOKENS more of each: scheduling, graphs,
tokens read on the host, events (crelle.bench.decode_throughput). Before an engine is timed it is checked against one
pass of its model over the same tokens. In the file:

rows     one for each batch, with the time of the step's graph alone; where `memory` is set: an engine with that budget
         for weights, working space and pages, its largest batch, the memory that it really used, and times_fp16
exact    the same with sums in one order for all batches (crelle.kernels.cuda.batch_invariant)
"""

import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from crelle.bench.cuda_timer import gpu
from crelle.bench.decode_throughput import DecodeThroughput, decode, fill, largest_batch, timed_steps
from crelle.bench.engine_load import disagreement, warm_up
from crelle.bench.environment import write_result
from crelle.bench.model_sources import free_memory, random_llm
from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.formats.kv import KVFormat

WEIGHTS = ("fp16", "rtn:bits=4,group=128", "bcq:bits=3,group=128")
CACHES = ("kv16", "kv4")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
CONTEXT, TOKENS, CAP, ROOM = 1024, 24, "24GB", 6e9
EXACT = "rtn:bits=4,group=128"  # what is also timed with one order of sums, for these batches:
EXACT_BATCHES = (1, 4, 16, 64, 128, 256)


def graph_ms(engine: Engine, sequences: int) -> float:
    batch, times = engine.runner.cuda_executor(None), []
    assert batch is not None
    graph = batch.graph(sequences)
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return median(times[2:])


def rows_of(llm: LLM, scheme: str, fmt: KVFormat, exact: bool) -> list[dict[str, Any]]:
    """All batches that fit the GPU, in one engine."""
    c, rows = llm.model.spec, []
    each = -(-(CONTEXT + TOKENS + 3) // fmt.page)
    page = len(c.layers) * fmt.page_bytes(c.kv_heads, c.head_size)
    most = int((torch.cuda.mem_get_info()[0] - ROOM) // (page * each))
    batches = [n for n in (EXACT_BATCHES if exact else BATCHES) if n <= most]
    largest = batches[-1]
    engine = Engine(
        llm, kv=fmt, pages=largest * each, max_batch=largest, watermark=0, sharing=False, batch_invariant=exact
    )
    warm_up(engine, batches)
    gap = disagreement(engine)
    fill(engine.runner.layers)
    for n in batches:
        steps, seconds = timed_steps(engine, n, CONTEXT, TOKENS)
        row = DecodeThroughput.of(engine, scheme, gap, n, CONTEXT, steps, seconds)
        rows.append({**asdict(row), "graph_ms": graph_ms(engine, n)})
        said = f"{row.milliseconds_per_step:7.2f} ms, graph {rows[-1]['graph_ms']:7.2f}, {row.tokens_per_second:8.0f}/s"
        print(f"{scheme} {fmt} {n:4}{' exact' if exact else ''} {said}", flush=True)
    return rows


def main(to: Path, shape: str) -> None:
    device, rows, exact = torch.device("cuda"), list[dict[str, Any]](), list[dict[str, Any]]()
    base = 0.0
    for scheme in WEIGHTS:
        llm = random_llm(shape, scheme, device)
        for kv in CACHES:
            fmt = KVFormat.parse(kv)
            rows += rows_of(llm, scheme, fmt, False)
            free_memory()
            largest = largest_batch(llm, kv, CAP, CONTEXT, TOKENS)
            capped = decode(llm, scheme, batch=largest, context=CONTEXT, tokens=TOKENS, kv=kv, memory=CAP)
            free_memory()
            base = base or capped.tokens_per_second
            rows.append({**asdict(capped), "times_fp16": capped.tokens_per_second / base})
            rate = capped.tokens_per_second
            said = f"{largest} sequences, {rate:.0f}/s, {rate / base:.2f} x fp16"
            print(
                f"{scheme} {kv} within {CAP}: {said}, peak {(capped.peak_memory_bytes or 0) / 1e9:.2f} GB", flush=True
            )
            if scheme == EXACT:
                exact += rows_of(llm, scheme, fmt, True)
                free_memory()
            command = f"python bench/serve_cuda.py {to.name} {shape}"
            write_result(to, {"command": command, "gpu": gpu(), "shape": shape, "rows": rows, "exact": exact})
        del llm
        free_memory()


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "llama2-7b")
