"""Perplexity of SmolLM2 with quantized caches, as ratios to the cache of numbers, everything else the same.

    python bench/quality/kv_quality.py OUT.json DATA KV …      DATA has text/wikitext2-test.txt; KV: kv8, kv4, …

Windows of 1024, the first 10,240 tokens. Beside the perplexity stands the mean divergence KL(numbers || coded) of what
is predicted, in nats per token: it scatters less than the perplexity, where errors also cancel. The layers
are the same torch code for all rows.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

CONTEXT, TOKENS = 1024, 10_240


def main(out: Path, data: Path, caches: list[str]) -> None:
    from crelle.bench.environment import environment
    from crelle.engine.llm import LLM
    from crelle.eval.smollm2 import smollm2
    from crelle.formats.kv.pages import KVFormat

    asked = [KVFormat.parse(kv) for kv in caches]
    llm = LLM.load(smollm2(), device="cpu")
    ids = llm.tokenizer.encode((data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8"), bos=False)
    assert llm.tokenizer.bos_id is None
    windows = torch.tensor(ids[:TOKENS]).view(-1, 1, CONTEXT)  # [windows, 1, tokens]
    head_size = llm.model.spec.head_size

    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": []}
    result = {**environment(), "command": "python bench/quality/kv_quality.py OUT.json DATA KV …", **result}
    result |= {"model": "SmolLM2-135M-Instruct Q4_1", "text": "wikitext2-test.txt", "context": CONTEXT}
    formats = [KVFormat(16), *asked]
    loss, divergence = [0.0] * len(formats), [0.0] * len(formats)
    for i, window in enumerate(windows):  # all formats on one window, so that only one window's logits are kept
        plain = None
        for f, kv in enumerate(formats):
            said = llm.model(window, llm.model.new_cache(kv=kv))[0, :-1].log_softmax(-1)  # [T-1, V]
            plain = said if plain is None else plain
            loss[f] += F.nll_loss(said, window[0, 1:], reduction="sum").item()
            divergence[f] += F.kl_div(said, plain, log_target=True, reduction="sum").item()
        so_far = [round(math.exp((a - loss[0]) / ((i + 1) * (CONTEXT - 1))), 4) for a in loss]
        print(f"window {i + 1} of {len(windows)}: ratios {so_far}", flush=True)
    count = len(windows) * (CONTEXT - 1)
    result["kv16"] = {"perplexity": math.exp(loss[0] / count)}
    for f, kv in enumerate(formats[1:], 1):
        bits = kv.bits_per_value(head_size)
        row = {"kv": str(kv), "bits_per_value": bits, "tokens_of_f16": 16 / bits}
        row |= {"perplexity": math.exp(loss[f] / count), "ratio": math.exp((loss[f] - loss[0]) / count)}
        row |= {"divergence": divergence[f] / count}
        result["rows"] = [r for r in result["rows"] if r["kv"] != row["kv"]] + [row]
        print(row, flush=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("data", type=Path, help="has text/wikitext2-test.txt")
    parser.add_argument("caches", nargs="+", metavar="KV", help="kv8, kv4, …")
    with torch.inference_mode():
        main(**vars(parser.parse_args()))
