"""Decode throughput of a 7B shape with random weights on a GPU, by weights, cache and batch; then under a memory cap.

    python bench/serve_cuda.py OUT.json [SHAPE]

Every sequence has 1024 tokens in its pages (random ones); a step runs one token of each through the engine's graphs,
takes the likeliest next ids on the device and reads them on the host, as the engine does. Before it is timed, a model
is checked: prompts and steps of three sequences against its plain forward pass.

exact    the same with sums in one order for all batches (crelle.models.batched_cuda)
cap      weights, working space and pages within so many bytes, as Engine(memory="24GB") counts them: the largest number
         of texts of 1024 tokens, and what they give
"""

import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from crelle.engine.memory import plan, weight_bytes
from crelle.eval.cuda_timer import gpu
from crelle.eval.machine import write_result
from crelle.eval.shapes import RandomWeights
from crelle.formats.kv import KVFormat, KVPages
from crelle.models.batched_cuda import BUCKETS, CudaBatch, Part
from crelle.models.loader import Model, build

WEIGHTS = {"fp16": "fp16", "4": "rtn:bits=4,group=128", "3": "bcq:bits=3,group=128"}
CACHES = ("kv16", "kv4")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
CONTEXT, STEPS, CAP, ROOM = 1024, 12, "24GB", 6e9
TOLERANCE = {"kv16": 3e-2, "kv4": 0.4}  # of random weights' logits, the cache's own error included


def pages_of(model: Model, fmt: KVFormat, count: int) -> list[KVPages]:
    c = model.c
    return [KVPages.new(fmt, count, c.kv_heads, c.head_size, model.dtype, model.device) for _ in range(c.layers)]


def fill(layers: list[KVPages]) -> None:
    """Random codes with plausible scales, or random numbers."""
    for pages in layers:
        if pages.words is None:
            pages.codes.normal_()
        else:
            pages.codes.random_(0, 256)
            pages.words.fill_(0x3000 << 1 | 30)  # a scale of 1/8, a zero of 7.5


def check(model: Model, kv: str, exact: bool) -> float:
    """Return the relative error of logits to the plain forward pass, with a cache of numbers."""
    fmt, ids = KVFormat.parse(kv), torch.randint(0, model.c.vocabulary, (3, 40), device=model.device)
    centers = model.key_centers if fmt.center else [None] * model.c.layers
    batch = CudaBatch(model, pages_of(model, fmt, 9), centers, exact=exact)
    with torch.inference_mode():
        wanted = model(ids, model.new_cache(3))[:, [29, *range(30, 40)]]  # [3, 11, V]
    found: list[Tensor] = []
    for begin, end in pairwise([0, 30, *range(31, 41)]):
        parts = [Part(ids[b, begin:end].tolist(), begin, [3 * b, 3 * b + 1, 3 * b + 2], True) for b in range(3)]
        found.append(batch(parts).clone())
    return float((torch.stack(found, 1) - wanted).norm() / wanted.norm())


def step_seconds(batch: CudaBatch, sequences: int, tables: list[list[int]]) -> tuple[float, float]:
    """Return the median seconds of a step with the host's part, and of its graph alone."""
    ids = [7 + i for i in range(sequences)]
    walls = []
    for _ in range(STEPS):
        begin = perf_counter()
        logits = batch([Part([ids[i]], CONTEXT - 1, tables[i], True) for i in range(sequences)])
        ids = logits.argmax(-1).tolist()
        walls.append(perf_counter() - begin)
    assert bool(logits.isfinite().all())
    graph, times = batch.graph(sequences), []
    for _ in range(STEPS):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        graph.replay()
        end_event.record()
        torch.cuda.synchronize()
        times.append(begin_event.elapsed_time(end_event) / 1000)
    return median(walls[2:]), median(times[2:])


def main(to: Path, shape: str) -> None:
    device, rows, capped, each = torch.device("cuda"), [], [], CONTEXT // 16
    for name, scheme in WEIGHTS.items():
        model = build(RandomWeights(shape, scheme, device), device)
        for kv in CACHES:
            fmt = KVFormat.parse(kv)
            if (error := check(model, kv, False)) > TOLERANCE[kv] or check(model, kv, True) > TOLERANCE[kv]:
                raise SystemExit(f"{scheme} {kv}: error {error}; nothing is timed")
            page = model.c.layers * fmt.page_bytes(model.c.kv_heads, model.c.head_size)
            budget = plan([model], fmt, memory=CAP, pages=None, max_batch=BUCKETS[-1], budget=512)
            most = int((torch.cuda.mem_get_info()[0] - ROOM) // (page * each))
            count = max(budget.batch(CONTEXT), *(n for n in BUCKETS if n <= most))
            layers = pages_of(model, fmt, count * each)
            fill(layers)
            tables = torch.randperm(count * each).view(count, each).tolist()
            about = {"weights": scheme, "cache": kv, "context": CONTEXT, "error": error}
            for exact in (False, True):
                batch = CudaBatch(model, layers, [None] * model.c.layers, exact=exact)
                for n in BATCHES:
                    if n > count or (exact and name == "3"):
                        continue
                    wall, alone = step_seconds(batch, n, tables)
                    row = {"batch": n, "exact": exact, "step_ms": 1000 * wall, "graph_ms": 1000 * alone}
                    row |= {"tokens_per_s": n / wall, "page_bytes": page * each * n, "weight_bytes": budget.weights}
                    rows.append({**about, **row})
                    print(f"{scheme} {kv} {n:4}{' exact' if exact else ''} {1000 * wall:7.2f} ms {n / wall:8.0f}/s")
                if not exact:
                    largest = budget.batch(CONTEXT)
                    tried = {n: n / step_seconds(batch, n, tables)[0] for n in {largest, *BUCKETS} if n <= largest}
                    best = max(tried, key=lambda n: tried[n])
                    capped.append(
                        {**about, "memory": CAP, "plan": str(budget), "largest_batch": largest}
                        | {"tokens_per_s": tried[best], "at_batch": best, "tokens_per_s_at_largest": tried[largest]}
                    )
                    print(f"{scheme} {kv} within {CAP}: {largest} texts; {tried[best]:.0f}/s at {best}", flush=True)
                del batch
            del layers
            torch.cuda.empty_cache()
        print(f"{scheme}: {weight_bytes([model]) / 1e9:.2f} GB of weights", flush=True)
        del model
        torch.cuda.empty_cache()
    base = next(c["tokens_per_s"] for c in capped if c["weights"] == "fp16" and c["cache"] == "kv16")
    found: list[dict[str, Any]] = [{**c, "times_fp16": c["tokens_per_s"] / base} for c in capped]
    for c in found:
        print(f"{c['weights']} {c['cache']}: {c['times_fp16']:.2f} x fp16 within {CAP}")
    command = f"python bench/serve_cuda.py {to.name} {shape}"
    write_result(to, {"command": command, "gpu": gpu(), "shape": shape, "rows": rows, "capped": found})


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "llama2-7b")
