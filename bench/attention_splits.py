"""Decode attention of few long sequences with other numbers of splits than tile_config's; needs a GPU.

    python bench/attention_splits.py OUT.json [KV …]      KV: 16, 8, 4; default: all three

For each problem: the rule's number of splits and others, checked against the rule's result, microseconds by graph
replays over more pages than the caches hold; and torch's cuDNN attention over plain keys and values.
"""

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, D = 32, 8, 128
SPLITS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def rows(kv: str, batch: int, context: int) -> dict[str, Any]:
    from crelle.bench.attention import _torch
    from crelle.bench.cuda_timer import Replay, clone, copies
    from crelle.bench.decode_throughput import fill
    from crelle.formats.kv import KVFormat, KVPages
    from crelle.kernels.cuda import paged_attention

    fmt, device = KVFormat.parse(kv), torch.device("cuda")
    each = context // fmt.page
    pages = KVPages.new(fmt, batch * each, KV_HEADS, D, torch.float16, device)
    fill([pages])
    table = torch.randperm(batch * each, generator=torch.Generator().manual_seed(0)).int().view(batch, each).to(device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    q = torch.randn(batch, HEADS, D, dtype=torch.float16, device=device)
    sets = [pages, *(clone(pages) for _ in range(copies(pages.nbytes, most=16) - 1))]
    rule = paged_attention.tile_config(fmt, batch, HEADS, KV_HEADS, D, context)
    wanted = paged_attention.attend(q, pages, table, lengths, rotated=True, config=rule)
    found = {}
    for splits in sorted({*SPLITS, rule.splits}):
        config = replace(rule, splits=splits)
        calls = [partial(paged_attention.attend, q, p, table, lengths, rotated=True, config=config) for p in sets]
        error = (calls[0]().float() - wanted.float()).abs().max() / wanted.float().abs().max()
        found[splits] = {"microseconds": Replay(calls).microseconds(), "differs": error.item()}
    del sets
    k, v = torch.randn(2, batch, KV_HEADS, context, D, dtype=torch.float16, device=device)
    torch_us, _ = _torch(q, k, v, device)
    return {"kv": kv, "batch": batch, "context": context, "rule": asdict(rule), "splits": found, "torch": torch_us}


def main() -> None:
    out, asked = Path(sys.argv[1]), sys.argv[2:] or ["16", "8", "4"]
    result: list[dict[str, Any]] = []
    for context in (4096, 8192, 32768, 131072):
        for batch in (1, 2, 4, 8):
            for kv in asked:
                result.append(rows(kv, batch, context))
                best = min(result[-1]["splits"].items(), key=lambda item: item[1]["microseconds"])
                ours = result[-1]["splits"][result[-1]["rule"]["splits"]]
                print(
                    kv,
                    batch,
                    context,
                    result[-1]["rule"]["splits"],
                    ours,
                    "best",
                    best,
                    result[-1]["torch"],
                    flush=True,
                )
                out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
