"""Attention of one token per sequence over pages of 16, 8 and 4 bits, beside torch's own over plain tensors.

    python bench/attention_cuda.py OUT.json

Each format is filled by our own append, pages in no order, and checked against kernels/kv.py before it is timed: graph
replays over more pages than L2 holds, the median of 15.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crelle.bench.cuda_timer import gpu
from crelle.bench.environment import write_result
from crelle.formats.kv import KVFormat, KVPages
from crelle.kernels import kv as reference
from crelle.kernels.cuda import paged

D, HALF, TOLERANCE = 128, torch.float16, 2e-3
HEADS = ((32, 32), (32, 8))
SIZES = ((1, 1024), (16, 1024), (64, 1024), (128, 1024), (256, 1024), (1, 8192), (16, 8192))
WORKING_SET = 500_000_000
TORCH = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def microseconds(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Return the median time of a call, all of them being in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return median(times[2:])


def filled(fmt: KVFormat, batch: int, length: int, heads: int) -> tuple[KVPages, Tensor]:
    """Return pages that hold random sequences, and their table."""
    each = length // fmt.page
    pages = KVPages.new(fmt, batch * each, heads, D, HALF, "cuda")
    table = torch.randperm(batch * each, device="cuda").view(batch, each).int()
    for b in range(batch):
        k, v = (torch.randn(length, heads, D, dtype=HALF, device="cuda") for _ in range(2))
        paged.append(k, v, pages, table[b : b + 1], torch.zeros(1, dtype=torch.int32, device="cuda"))
    return pages, table


def copies(nbytes: int) -> int:
    return max(1, min(32, -(-WORKING_SET // nbytes)))


def ours(fmt: KVFormat, batch: int, length: int, heads: int, kv_heads: int) -> dict[str, Any]:
    first = filled(fmt, batch, length, kv_heads)
    nbytes = first[0].nbytes
    sets = [first, *(filled(fmt, batch, length, kv_heads) for _ in range(copies(nbytes) - 1))]
    q = torch.randn(batch, heads, D, dtype=HALF, device="cuda")
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    cut = paged.plan(fmt, batch, heads, kv_heads, D, length)
    arrived = torch.zeros(batch * heads, dtype=torch.int32, device="cuda")
    turned = paged.append(None, None, first[0], None, None, q=q)
    assert turned is not None
    out = torch.full((batch, heads, D), torch.nan, dtype=HALF, device="cuda")
    options: dict[str, Any] = {"turned": True, "cut": cut, "arrived": arrived, "out": out}
    paged.attend(turned, *first, lengths, **options)
    errors = []
    for b in {0, batch // 2, batch - 1}:
        wanted = reference.attend(q[b : b + 1].float(), first[0], first[1][b : b + 1], [length])[0]
        errors.append(float((out[b].float() - wanted).norm() / wanted.norm()))
    if not max(errors) < TOLERANCE:
        raise SystemExit(f"{fmt} {batch} x {length}, {heads}/{kv_heads}: error {max(errors)}; nothing is timed")
    us = microseconds([lambda a=a: paged.attend(turned, *a, lengths, **options) for a in sets])
    return {"us": us, "bytes": nbytes, "tb_per_s": nbytes / us / 1e6, "error": max(errors), "plan": str(cut)}


def theirs(batch: int, length: int, heads: int, kv_heads: int) -> dict[str, float]:
    shape = (batch, kv_heads, length, D)
    many = copies(4 * batch * kv_heads * length * D)
    sets = [tuple(torch.randn(shape, dtype=HALF, device="cuda") for _ in range(2)) for _ in range(many)]
    q = torch.randn(batch, heads, 1, D, dtype=HALF, device="cuda")
    found = {}
    for name, backend in TORCH.items():
        with sdpa_kernel(backend):
            calls = [lambda a=a: F.scaled_dot_product_attention(q, *a, enable_gqa=heads != kv_heads) for a in sets]
            found[name] = microseconds(calls)
    return found


def main(to: Path) -> None:
    rows = []
    for heads, kv_heads in HEADS:
        for batch, length in SIZES:
            torch.cuda.empty_cache()
            if 4 * batch * kv_heads * length * D > 20e9:
                continue
            torch_us = theirs(batch, length, heads, kv_heads)
            for name in ("kv16", "kv8", "kv4"):
                torch.cuda.empty_cache()
                row = ours(KVFormat.parse(name), batch, length, heads, kv_heads)
                ratios = {f"times_{other}": us / row["us"] for other, us in torch_us.items()}
                rows.append(
                    {"heads": heads, "kv_heads": kv_heads, "batch": batch, "context": length, "cache": name}
                    | row
                    | {f"{other}_us": us for other, us in torch_us.items()}
                    | ratios
                )
                said = ", ".join(f"{v:.2f} {k}" for k, v in ratios.items())
                print(f"{heads}/{kv_heads} {batch:4} x {length} {name:5} {row['us']:7.1f} us {said}", flush=True)
    write_result(
        to, {"command": f"python bench/attention_cuda.py {to.name}", "gpu": gpu(), "head_size": D, "rows": rows}
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]))
