"""Decode throughput of a 7B shape with random weights on a GPU, by weights, cache and batch; then under a memory cap.

    python bench/gpu/serve_cuda.py OUT.json [--weights w4a4,fp16] [--kv kv4] [--batches 64] [--parts capped] [--shape S]
    crelle bench plot OUT.json

Every sequence has 1024 tokens in its pages (random ones); an engine decodes TOKENS more of each: scheduling, graphs,
tokens read on the host, events (crelle.bench.load.decode_throughput). Before an engine is timed it is checked against
one pass of its model over the same tokens. What OUT.json has already is not measured again: a run that was ended goes
on. Kernels are compiled before, side by side. On an H200 with 16 cores a model takes about 30 seconds: building it 8,
compiling 10, a cache 4; all of DEFAULT some 200.

rows       one for each batch, with the time of the step's graph alone; for batch 128 also its breakdown by kernel.
           Where `memory` is set: an engine with that budget for weights, working space and pages, its largest batch
           and the bucket of graphs below it, the memory that it really used, times_fp16 and times_w8a8
exact      the same with sums in one order for all batches (crelle.kernels.cuda.planes.batch_invariant); --parts exact
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu
from crelle.bench.load.decode_throughput import DecodeThroughput, budgeted, measure
from crelle.bench.load.model_sources import free_memory, random_llm
from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.errors import CrelleError
from crelle.formats.kv.pages import KVFormat
from crelle.formats.storage.io import read_json

SMALL = ("kv4", "kv4:group=128", "k4v2", "kv3", "kv2")
WEIGHTS = {  # and the caches that each is measured with
    "fp16": ("fp16", ("kv16",)),
    "w8a8": ("atom:w=8,a=8", ("kv8",)),
    "w4a16": ("rtn:bits=4,group=128", ("kv4",)),
    "w4a4": ("atom:w=4,a=4", SMALL),
    "w4a8-two": ("atom:w=4,a=8,levels=2", SMALL),
    "w4a8": ("atom:w=4,a=8", ("kv4",)),
    "w4a4-two": ("atom:w=4,a=4,levels=2", ("kv4",)),
    "w8a8-row": ("atom:w=8,a=8,group=row,outliers=0", ("kv8",)),
    "w3a16": ("bcq:bits=3,group=128", ("kv4",)),
}
DEFAULT = "fp16,w8a8,w4a16,w4a4,w4a8-two,w4a8,w4a4-two"
BATCHES = "8,16,32,64,128,192,256"
CONTEXT, TOKENS, CAP, ROOM = 1024, 24, "24GB", 6e9
PROFILED = 128
Row = dict[str, Any]


class Results:
    """The rows of a result file, written after each measurement."""

    def __init__(self, path: Path, shape: str, command: str) -> None:
        self.path, self.shape, self.command = path, shape, command
        found: Row = read_json(path) if path.is_file() else {}
        self.parts: dict[str, list[Row]] = {name: found.get(name, []) for name in ("rows", "exact")}

    def has(self, part: str, scheme: str, kv: str, batch: int | None) -> bool:
        """Whether a row is there; batch None: the one under the cap."""
        mine = [r for r in self.parts[part] if r["scheme"] == scheme and r["kv"] == str(KVFormat.parse(kv))]
        return any(bool(r["memory"]) if batch is None else not r["memory"] and r["batch"] == batch for r in mine)

    def add(self, part: str, rows: Iterable[DecodeThroughput]) -> None:
        """Measure rows, and write each one as soon as it is known."""
        for row in rows:
            self.parts[part].append(asdict(row))
            within = f" within {row.memory}, peak {(row.peak_memory_bytes or 0) / 1e9:.2f} GB" if row.memory else ""
            said = (
                f"{row.milliseconds_per_step:6.2f} ms, graph {row.graph_ms or 0:6.2f}, {row.tokens_per_second:7.0f}/s"
            )
            print(f"{row.scheme} {row.kv} {row.batch:4} {part} {said}{within}", flush=True)
            if row.breakdown or row.no_breakdown:
                print(f"    {row.breakdown or row.no_breakdown}", flush=True)
            self._compare()
            content = {"command": self.command, "gpu": gpu(), "shape": self.shape, **self.parts}
            write_result(self.path, content)

    def _compare(self) -> None:
        capped = [r for r in self.parts["rows"] if r["memory"]]
        for name in ("fp16", "w8a8"):
            base = max((r["tokens_per_second"] for r in capped if r["scheme"] == WEIGHTS[name][0]), default=None)
            for r in capped if base else ():
                r[f"times_{name}"] = r["tokens_per_second"] / base


def rows_of(llm: LLM, scheme: str, kv: str, batches: list[int], exact: bool) -> Iterable[DecodeThroughput]:
    """All batches that fit the GPU, in one engine."""
    fmt, c = KVFormat.parse(kv), llm.model.spec
    each = -(-(CONTEXT + TOKENS + 3) // fmt.page)
    page = sum(own.page_bytes(c.kv_heads, c.head_size) for own in fmt.layers(len(c.layers)))
    most = int((torch.cuda.mem_get_info()[0] - ROOM) // (page * each))
    held = [n for n in batches if n <= most]
    if not held:
        return []
    largest = max(held)
    engine = Engine(
        llm, kv=fmt, pages=largest * each, max_batch=largest, watermark=0, sharing=False, batch_invariant=exact
    )
    return measure(engine, scheme, held, CONTEXT, TOKENS, profiled=() if exact else [PROFILED])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("--shape", default="llama2-7b")
    options.add_argument("--weights", default=DEFAULT, help=f"some of {', '.join(WEIGHTS)}")
    options.add_argument("--kv", help="caches, instead of those of each kind of weights")
    options.add_argument("--batches", default=BATCHES)
    options.add_argument("--parts", default="capped,rows", help="some of capped, rows, exact")
    given = options.parse_args()
    torch.manual_seed(0)
    batches, parts = [int(n) for n in given.batches.split(",")], given.parts.split(",")
    results = Results(
        given.out, given.shape, f"python bench/gpu/serve_cuda.py {given.out.name} --weights {given.weights}"
    )
    for name in given.weights.split(","):
        scheme, caches = WEIGHTS[name]
        caches, todo = given.kv.split(",") if given.kv else caches, list[tuple[str, str, list[int]]]()
        for kv in caches:
            if "capped" in parts and not results.has("rows", scheme, kv, None):
                todo.append(("capped", kv, []))
            # smaller caches are for more sequences in the same memory: their batches are not all timed
            wanted = batches if given.kv or kv == caches[0] else [n for n in batches if n == PROFILED]
            for part in ("rows", "exact"):
                missing = [n for n in wanted if part in parts and not results.has(part, scheme, kv, n)]
                todo += [(part, kv, missing)] if missing else []
        begun = perf_counter()
        llm = random_llm(given.shape, scheme, torch.device("cuda")) if todo else None
        print(f"{scheme}: built in {perf_counter() - begun:.1f} s", flush=True)
        for part, kv, missing in todo:
            assert llm is not None
            begun = perf_counter()
            try:
                if part == "capped":
                    results.add("rows", budgeted(llm, scheme, kv, CAP, CONTEXT, TOKENS))
                else:
                    results.add(part, rows_of(llm, scheme, kv, missing, part == "exact"))
            except CrelleError as e:  # the others go on
                print(f"{scheme} {kv} {part}: {e}", flush=True)
            free_memory()
            print(f"    {perf_counter() - begun:.1f} s", flush=True)
        del llm
        free_memory()


if __name__ == "__main__":
    main()
