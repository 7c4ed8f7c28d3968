"""Decode attention over pages with tile_config's choice and others around it, beside cuDNN; needs a GPU.

    python bench/attention_splits.py OUT.json [KV …]      KV: kv16, kv4, k4v2 (default: these three)

Each config is checked first (against f64 of what the pages hold, and a second run bit for bit), then timed by graph
replays over more pages than the caches hold. Beside the chosen one, what tells its fixed cost from its slope:

    empty        sequences of length 0: launch, prologue, and adding parts
    no adding    the source without what the last block does
    one page     a table of zeros: the cache serves all reads, what is left is arithmetic and latency
    loads only   the source without the arithmetic
    line         one config over several lengths of one sequence: microseconds = fixed + bytes / speed
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from edited_sources import edited
from torch import Tensor

from crelle.bench.kernels.attention import _attended
from crelle.bench.kernels.cuda_timer import Replay, clone, copies, gpu
from crelle.bench.load.decode_throughput import fill
from crelle.formats.kv.pages import KVFormat, KVPages, hadamard
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.attention import paged_attention
from crelle.kernels.cuda.attention.paged_attention import PagedTileConfig

D, TOLERANCE, HALF = 128, 1e-3, torch.float16
PROBLEMS = [(1, 4096, 32, 8), (1, 32768, 32, 8), (1, 131072, 32, 8), (8, 32768, 32, 8), (128, 1024, 32, 32)]
LINE = (4096, 8192, 16384, 32768, 65536, 131072)
CODED = [  # warps, stages, tiles, occupancy: as many splits as fit at one time
    *((16, 2, 2, 16), (16, 3, 2, 16), (8, 2, 2, 16), (8, 3, 2, 16), (4, 2, 2, 16), (4, 3, 2, 16), (8, 2, 2, 8)),
    *((8, 2, 4, 8), (12, 2, 2, 12), (12, 3, 2, 12)),
]
CODED_MANY = [  # one block a sequence
    *((2, 3, 2, 16), (2, 2, 2, 16), (1, 3, 2, 16), (4, 3, 2, 16), (4, 2, 2, 16), (2, 4, 2, 12), (2, 3, 2, 12)),
    *((2, 2, 4, 12), (1, 3, 2, 12), (8, 2, 2, 16)),
]
PLAIN = [
    *((12, 2, 1, 12), (4, 2, 1, 12), (6, 2, 1, 12), (8, 3, 1, 8), (8, 2, 1, 8), (4, 3, 1, 8), (6, 2, 2, 6)),
    *((4, 2, 2, 4), (3, 2, 1, 12), (16, 1, 1, 16)),
]
NO_ADDING = ("attention/paged_attention.cu", "    if (!last) return;\n", "    return;\n")
LOADS_ONLY = (
    "attention/paged_attention.cu",
    "    const char *stage = queue + at * STAGE;\n",
    "    const char *stage = queue + at * STAGE;\n    issue_load(i + STAGES, next + STAGES * apart, at);\n"
    "    if (scale != 0) continue;\n",
)


@dataclass
class Problem:
    """Pages that sequences of one length fill, and what attention over them should be."""

    kv: str
    batch: int
    context: int
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        self.format = fmt = KVFormat.parse(self.kv)
        self.rule = paged_attention.tile_config(fmt, self.batch, self.heads, self.kv_heads, D, self.context, 132)

    def configs(self) -> list[PagedTileConfig]:
        sets, found = self.batch * self.kv_heads * self.rule.chunks, [self.rule]
        many = sets >= 132
        for warps, stages, tiles, occupancy in (CODED_MANY if many else CODED) if self.format.coded else PLAIN:
            fits = min(occupancy // warps * 132 // sets, self.context // (warps * tiles * 16), 128)
            splits = 1 if many else max(1, fits)
            p = replace(self.rule, warps=warps, stages=stages, tiles=tiles, occupancy=occupancy, splits=splits)
            if p not in found and paged_attention.shared_bytes(p, self.format, D) <= 225 * 1024:
                found.append(p)
        if self.rule.splits > 8:
            found.append(replace(self.rule, splits=self.rule.splits // 2))
        return found

    def variants(self, configs: list[PagedTileConfig]) -> list[tuple[str, str]]:
        return [paged_attention.attend_variant(p, self.format, D, HALF, HALF) for p in configs]

    def prepare(self) -> None:
        each, device = self.context // 16, torch.device("cuda")
        pages = KVPages.new(self.format, self.batch * each, self.kv_heads, D, HALF, device)
        fill([pages])
        order = torch.randperm(self.batch * each, generator=torch.Generator().manual_seed(0))
        self.table = order.int().view(self.batch, each).to(device)
        self.lengths = torch.full((self.batch,), self.context, dtype=torch.int32, device=device)
        self.q = torch.randn(self.batch, self.heads, D, device=device).half()
        self.semaphores = torch.zeros(self.batch * self.heads, dtype=torch.int32, device=device)
        self.sets = [pages, *(clone(pages) for _ in range(copies(pages.nbytes, most=16) - 1))]
        self.wanted = {}
        for b in sorted({0, self.batch - 1}):
            k, v = pages.read(self.table[b].long()).double()
            seen = _attended(self.q[b].double(), k, v)  # q counts as rotated already
            self.wanted[b] = hadamard(seen.float(), self.format.value)

    def call(self, p: PagedTileConfig, pages: KVPages, table: Tensor, lengths: Tensor) -> Tensor:
        options = {"config": p, "semaphores": self.semaphores}
        return paged_attention.attend(self.q, pages, table, lengths, rotated=True, **options)  # type: ignore[arg-type]

    def time(self, p: PagedTileConfig, table: Tensor | None = None, lengths: Tensor | None = None) -> float:
        table, lengths = self.table if table is None else table, self.lengths if lengths is None else lengths
        return Replay([partial(self.call, p, pages, table, lengths) for pages in self.sets]).microseconds(11)

    def checked(self, p: PagedTileConfig) -> float:
        """Return the largest error, relative to the largest result."""
        y, again = (self.call(p, self.sets[0], self.table, self.lengths) for _ in range(2))
        assert torch.equal(y, again), f"two runs of {p} differ"
        return max(float((y[b].float() - want).abs().max() / want.abs().max()) for b, want in self.wanted.items())

    def cudnn(self) -> float | None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        shape = 2, self.batch, self.kv_heads, self.context, D
        size = 2 * torch.Size(shape).numel()
        sets = [torch.randn(shape, device="cuda", dtype=HALF) for _ in range(copies(size, most=16))]
        query, grouped = self.q[:, :, None], self.heads != self.kv_heads

        def attend(k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, k, v, enable_gqa=grouped)

        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return Replay([partial(attend, *kv) for kv in sets]).microseconds(11)
        except RuntimeError as e:
            print("cuDNN:", str(e).splitlines()[0])
            return None


def written(p: PagedTileConfig) -> str:
    return f"{p.splits:3} x {p.warps:2} warps, {p.stages} stages of {p.tiles}, room for {p.occupancy}"


def line(problem: Problem) -> dict[str, Any]:
    """Fit fixed + bytes / speed to one config over several lengths."""
    size, found = problem.sets[0].nbytes / problem.context, []
    for n in LINE:
        found.append((n, problem.time(problem.rule, lengths=torch.full_like(problem.lengths, n))))
    bytes_ = torch.tensor([[1.0, n * size] for n, _ in found], dtype=torch.float64)
    us = torch.tensor([t for _, t in found], dtype=torch.float64)
    weight = 1 / us[:, None]  # relative errors count
    fixed, slope = torch.linalg.lstsq(bytes_ * weight, us[:, None] * weight).solution.flatten().tolist()
    print("  line", *(f"{n}: {t:.1f}" for n, t in found), f"-> {fixed:.1f} us + bytes / {1e-6 / slope:.2f} TB/s")
    return {"us": dict(found), "fixed_us": fixed, "tb_per_s": 1e-6 / slope}


def guarded(what: str, work: Callable[[], float]) -> float | None:
    try:
        return work()
    except Exception as e:  # the other configs are still worth a run
        print(f"  {what}: {type(e).__name__} {str(e).splitlines()[0][:160]}")
        return None


def rows(problem: Problem, known: dict[tuple[int, ...], float | None]) -> dict[str, Any]:
    problem.prepare()
    key = problem.batch, problem.context, problem.heads, problem.kv_heads
    size = problem.sets[0].nbytes
    if key not in known:
        known[key] = problem.cudnn()
    cudnn = known[key]
    print(f"{problem.kv} batch {key[0]} context {key[1]} heads {key[2]}/{key[3]}: {size / 1e6:.1f} MB, cuDNN {cudnn}")
    found: dict[str, Any] = {"problem": asdict(problem), "bytes": size, "cudnn_us": cudnn, "configs": []}
    for i, p in enumerate(problem.configs()):
        error = guarded(written(p), partial(problem.checked, p))
        if error is None or not error <= TOLERANCE:
            print(f"  {written(p)}: error {error}, not timed")
            continue
        us = guarded(written(p), partial(problem.time, p))
        if us is None:
            continue
        against = f"{cudnn / us:.2f} x cuDNN" if cudnn else ""
        print(f"  {written(p)} {us:7.1f} us {size / us / 1e6:5.2f} TB/s {against} error {error:.1e}{' <-' * (not i)}")
        found["configs"].append({**asdict(p), "us": us, "error": error, "chosen": not i})
    p, zeros = problem.rule, torch.zeros_like(problem.table)
    parts = {
        "empty": guarded("empty", partial(problem.time, p, lengths=torch.zeros_like(problem.lengths))),
        "one page": guarded("one page", partial(problem.time, p, table=zeros)),
    }
    for name, change in (("no adding", NO_ADDING), ("loads only", LOADS_ONLY)):
        with edited([change]):
            parts[name] = guarded(name, partial(problem.time, p))
    found["parts"] = parts
    print(" ", ", ".join(f"{k} {v:.1f} us" for k, v in parts.items() if v is not None))
    if (problem.batch, problem.context) == (1, max(LINE)):
        found["line"] = line(problem)
    return found


def main() -> None:
    out, asked, begun = Path(sys.argv[1]), sys.argv[2:] or ["kv16", "kv4", "k4v2"], perf_counter()
    problems = [Problem(kv, *what) for what in PROBLEMS for kv in asked]
    jit.compile_all(list(dict.fromkeys(v for p in problems for v in p.variants(p.configs()))))
    for change in (NO_ADDING, LOADS_ONLY):
        with edited([change]):
            jit.compile_all(list(dict.fromkeys(v for p in problems for v in p.variants([p.rule]))))
    print(f"compiled after {perf_counter() - begun:.0f} s")
    known: dict[tuple[int, ...], float | None] = {}
    result: dict[str, Any] = {"gpu": gpu(), "rows": []}
    for problem in problems:
        result["rows"].append(rows(problem, known))
        for name in ("sets", "wanted", "table"):
            delattr(problem, name)
        torch.cuda.empty_cache()
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(result, indent=1))
        os.replace(part, out)
        sys.stdout.flush()
    print(f"done after {perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
