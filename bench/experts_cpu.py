"""A mixture of experts on a CPU beside a dense model that reads as many bytes a token, in one interleaved run.

    python bench/experts_cpu.py bench/results/cpu-experts-decode.json

Random weights of two shapes: Mixtral-8x7B's layers, and those of Qwen3-30B-A3B, whose experts are many and narrow. The
dense model's feed-forward is as wide as all experts of a token. Every step decodes a random token, so that a mixture
reads other experts each time; logits are compared with the torch forward's first. The models take turns, some steps
each; with one thread times are processor time, since the machine may do other work too. Share of the roofline:
bytes of the weights that a token needs, over the time of its step and the bandwidth of a plain read of the dense
model's weights in the same run.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from crelle.bench.environment import write_result
from crelle.bench.model_shapes import RandomWeights, llama_config
from crelle.formats.base import nbytes
from crelle.kernels.cpu.fused_decoder import MAX_ROWS, FusedDecoder
from crelle.kernels.cpu.kernel import CpuWeight
from crelle.kernels.threads import set_threads
from crelle.models.cache import KVCache
from crelle.models.decoder import DecoderModel, Experts
from crelle.models.loader import build

CONTEXT, VOCABULARY = 512, 8192  # a small head, so that the layers are what is timed
# Width, heads, kv heads, head size, width of an expert, experts, experts of a token, layers.
SHAPES = {
    "Mixtral-8x7B": (4096, 32, 8, 128, 14336, 8, 2, 2),
    "Qwen3-30B-A3B": (2048, 32, 4, 128, 768, 128, 8, 4),
}


def models(shape: str, scheme: str) -> dict[str, DecoderModel]:
    """Return the mixture and the dense model."""
    width, heads, kv_heads, head, inner, count, top, layers = SHAPES[shape]
    config = llama_config(
        width, layers, heads, top * inner, kv_heads=kv_heads, context=CONTEXT, vocabulary=VOCABULARY
    ) | {"head_dim": head}
    experts = {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": top}
    made = {"dense": config, "mixture": config | experts | {"intermediate_size": inner}}
    return {name: build(RandomWeights(c, scheme), torch.device("cpu")) for name, c in made.items()}


def bytes_of_token(model: DecoderModel) -> float:
    """Return the bytes of the weights that one token reads."""
    total = float(sum(nbytes(linear.weight) for linear in model.linears()))
    for layer in model.layers:
        if isinstance(layer.mlp, Experts):
            spec, all_of = layer.mlp.spec, [m for m in layer.mlp.experts.modules() if hasattr(m, "weight")]
            total -= sum(nbytes(m.weight) for m in all_of) * (1 - spec.top / spec.count)  # type: ignore[arg-type]
    return total


def check(model: DecoderModel, ids: Tensor) -> float:
    """Return the error of the fused step's logits of a few tokens, relative to the torch forward's."""
    fused, caches = model.decoder, [model.new_cache(), model.new_cache()]
    found = torch.cat([model(token[None, None], caches[0])[:, 0] for token in ids])
    model.decoder = "the torch forward is asked for"
    wanted = torch.cat([model(token[None, None], caches[1])[:, 0] for token in ids])
    model.decoder = fused
    return float((found - wanted).norm() / wanted.norm())


class Steps:
    """Steps of a model over random tokens, after a short prompt."""

    def __init__(self, model: DecoderModel, batch: int, clock: Callable[[], float]) -> None:
        self.model, self.batch, self.clock, self.chance = model, batch, clock, torch.Generator().manual_seed(1)
        self.cache = model.new_cache(batch)
        assert isinstance(self.cache, KVCache)
        self.model(self.tokens(16), self.cache)

    def tokens(self, n: int) -> Tensor:
        return torch.randint(self.model.spec.vocabulary, (self.batch, n), generator=self.chance)

    def seconds(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            self.cache.length, ids = 16, self.tokens(1)
            begun = self.clock()
            self.model(ids, self.cache)
            found.append(self.clock() - begun)
        return found


def prompt_seconds(model: DecoderModel, ids: Tensor, clock: Callable[[], float]) -> float:
    cache = model.new_cache()
    begun = clock()
    model(ids, cache, last=True)
    return clock() - begun


@torch.inference_mode()
def measured(shape: str, scheme: str, threads: int, turns: int, steps: int) -> dict[str, Any]:
    made, chance = models(shape, scheme), torch.Generator().manual_seed(2)
    clock = process_time if threads == 1 else perf_counter
    errors, needed = {}, {}
    for name, model in made.items():
        assert isinstance(model.decoder, FusedDecoder), model.decoder
        errors[name] = check(model, torch.randint(model.spec.vocabulary, (3,), generator=chance))
        if errors[name] > 1e-3:
            raise SystemExit(f"{name}: error {errors[name]:.1e} against torch")
        needed[name] = bytes_of_token(model)
    row: dict[str, Any] = {"shape": shape, "scheme": scheme, "threads": threads, "error_against_torch": errors}
    row |= {"layers": len(made["dense"].layers), "bytes_of_token": needed, "batches": {}}
    coded = [x.prepared.data.data for x in made["dense"].linears() if isinstance(x.prepared.data, CpuWeight)]
    reads = list[float]()
    for batch in (1, 4, MAX_ROWS):
        of = {name: Steps(model, batch, clock) for name, model in made.items()}
        seconds = {name: list[float]() for name in of}
        for turn in range(turns):
            begun = clock()
            for w in coded:
                w.read()
            reads.append(sum(w.nbytes for w in coded) / (1e9 * (clock() - begun)))
            for name in ("dense", "mixture") if turn % 2 else ("mixture", "dense"):
                seconds[name] += of[name].seconds(steps)
        middle = {name: 1e3 * median(s) for name, s in seconds.items()}
        best = {name: 1e3 * min(s) for name, s in seconds.items()}
        row["batches"][batch] = {"milliseconds": middle, "best_milliseconds": best}
    row["read_gb_per_s"] = median(reads)
    one = row["batches"][1]["milliseconds"]
    share = {name: needed[name] / (1e6 * one[name]) / row["read_gb_per_s"] for name in needed}
    row |= {"share_of_roofline": share, "mixture_over_dense": share["mixture"] / share["dense"]}
    ids = torch.randint(made["dense"].spec.vocabulary, (1, CONTEXT - 1), generator=chance)
    prompts = [{name: prompt_seconds(model, ids, clock) for name, model in made.items()} for _ in range(5)]
    row["prompt_milliseconds"] = {name: 1e3 * median(p[name] for p in prompts) for name in made}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", default="rtn:bits=4,group=64")
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    args = parser.parse_args()
    set_threads(args.threads)
    rows = []
    for shape in args.shape:
        rows.append(measured(shape, args.scheme, args.threads, args.turns, args.steps))
        print(rows[-1], flush=True)
    command = " ".join(["python", "bench/experts_cpu.py", *sys.argv[1:]])
    write_result(args.out, {"command": command, "rows": rows})


if __name__ == "__main__":
    main()
