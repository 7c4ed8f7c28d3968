"""Tokens per second of `generate` in transformers, dense and quantized, and of Crelle's engine; needs a GPU.

    python bench/gpu/transformers_cuda.py MODEL OUT.json [--text TEXT] [--tokens 128] [--compile]

Greedy, one sequence, after a warm-up; the median of three runs. Each checkpoint is checked first: its tokens in
transformers must begin like the engine's. `host_us` is the host's time for one linear of one row, launches included and
the GPU not waited for, as a model in Python meets it; `ratio` is to the dense model in transformers in the same run.
--compile adds rows with a static cache, which transformers compiles and captures (mode reduce-overhead).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from crelle import LLM, CalibrationData, Sampling, quantize
from crelle.bench.environment import write_result
from crelle.integrations.transformers import CrelleLinear

SCHEMES = {
    "rtn4": "rtn:bits=4,group=64",
    "bcq3": "bcq:bits=3,group=64",
    "mixed": "mixed:four=0.25,outliers=0.002,refine=0",
    "atom": "atom:w=4,a=4,group=32,outliers=32",
}
PROMPT = [1, 9038, 2501, 263, 931, 29892, 727, 471]  # "Once upon a time, there was"; any ids do
CHECKED = 4  # tokens that must be equal: later ones may be ties in fp16


def speed(generate: Callable[[], int], repeats: int = 3) -> float:
    """Return tokens per second, the median of some runs after one that does not count."""
    generate()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        tokens = generate()
        torch.cuda.synchronize()
        found.append(tokens / (time.perf_counter() - begun))
    return statistics.median(found)


@torch.no_grad()
def host_us(layer: nn.Module, width: int, calls: int = 200) -> float:
    """Return the least host time of a call of a layer on one row, in microseconds."""
    x, best = torch.randn(1, 1, width, device="cuda", dtype=torch.float16), float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            layer(x)
        best = min(best, (time.perf_counter() - begun) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def in_transformers(path: Path, tokens: int, compiled: bool) -> tuple[dict[str, Any], list[int]]:
    """Return what was measured, and the tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).to("cuda")
    ids = torch.tensor([PROMPT], device="cuda")
    options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(ids)}

    def generate(**more: Any) -> Tensor:
        found: Tensor = model.generate(ids, **options, **more)[0, len(PROMPT) :]
        return found

    linear = next(m for m in model.modules() if isinstance(m, CrelleLinear | nn.Linear))
    row = {"tokens_per_s": speed(lambda: len(generate())), "host_us": host_us(linear, linear.in_features)}
    if compiled:
        row["compiled_tokens_per_s"] = speed(lambda: len(generate(cache_implementation="static")))
    return row, generate().tolist()


def in_engine(path: Path, tokens: int) -> tuple[float, list[int]]:
    llm = LLM.load(path, device="cuda")
    sampling = Sampling(max_tokens=tokens, temperature=0)
    found = speed(lambda: len(llm.generate(PROMPT, sampling).tokens))
    return found, list(llm.generate(PROMPT, sampling).tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, help="to calibrate on; without it only schemes that need none")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    text = CalibrationData(text=args.text.read_text(), rows=16, length=128) if args.text else None
    names = ["dense", *(n for n in SCHEMES if text or n in ("rtn4", "bcq3"))]
    rows = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as made:
        for name in names:
            path = args.model if name == "dense" else Path(made) / name
            if name != "dense":
                quantize(args.model, path, SCHEMES[name], text=text)
            row, theirs = in_transformers(path, args.tokens, args.compile)
            row["engine_tokens_per_s"], ours = in_engine(path, args.tokens)
            if theirs[:CHECKED] != ours[:CHECKED]:
                sys.exit(f"{name}: {theirs[:CHECKED]} in transformers, {ours[:CHECKED]} in the engine; nothing counts")
            rows[name] = {**row, "ratio": row["tokens_per_s"] / rows.get("dense", row)["tokens_per_s"]}
            print(f"{name:6}" + "".join(f"  {key} {value:9.2f}" for key, value in rows[name].items()), flush=True)
            gpu = torch.cuda.get_device_name()
            write_result(args.out, {"gpu": gpu, "model": args.model.name, "tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
