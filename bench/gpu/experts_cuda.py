"""Mixtures of experts on a GPU: milliseconds a token in the engine, beside the bytes that a step must read.

    python bench/gpu/experts_cuda.py OUT.json [--shapes qwen3-30b-a3b,mixtral-8x7b] [--batches 1,8,64] [--layers N]

Random weights of the real shapes in an Engine, as `generate` and `serve` run it. Checked first, on two layers: logits
of prompts and steps against the model layer by layer. Bytes of a step: all matrices outside the experts, and of each
layer the experts that its tokens chose, each once; keys and values are not counted. Share: of the speed of a plain read
in the same run. Matrices repeat values from layer to layer, in memory of their own. `--layers` builds fewer layers;
`--seconds` leaves out what has not begun by then; `--tune` measures the tile configs of the other products first.

gpt-oss is as it is published: experts in MXFP4, all else in bfloat16. Its bytes are those of the file, without what the
kernels' layout pads 2880 inputs with (7%).
"""

import argparse
import dataclasses
import functools
import gc
import re
import sys
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from crelle.bench.engine_decode import EngineDecoder
from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu, read_ceiling
from crelle.bench.kernels.random_matrices import random_matrix
from crelle.bench.kernels.step_breakdown import breakdown
from crelle.bench.load.no_tokenizer import NoTokenizer
from crelle.bench.model_shapes import RandomWeights
from crelle.bench.planner.plan_shapes import LARGE
from crelle.engine.llm import LLM
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.formats.base import QuantTensor, format_of
from crelle.formats.fp4 import Fp4Tensor
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.executor import supports_model
from crelle.kernels.cuda.experts import fp4_products, products
from crelle.kernels.cuda.fp4 import fp4_kernel, fp4_layout
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight
from crelle.kernels.cuda.runtime import autotune
from crelle.kernels.executor import Chunk
from crelle.models.linear import QuantLinear
from crelle.models.loader import Model, build
from crelle.quantizers.base import Cast

SCHEMES = ("rtn:bits=4,group=128", "bcq:bits=2,group=128")
PUBLISHED = {"gpt_oss": "mxfp4"}  # what experts, and nothing else, are published in
CONTEXT, TOKENS, ROUNDS = 64, 32, 3
# Of the median row: two experts that are nearly as likely may change places.
TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}


class Repeated(RandomWeights):
    """Random weights that repeat: made in less time, and each still laid out in memory of its own."""

    def matrix(self, module: str) -> QuantTensor:
        layer, expert = re.search(r"layers\.(\d+)\.", module), re.search(r"experts\.(\d+)\.", module)
        if layer is None:
            return super().matrix(module)
        if expert is None and self.config["model_type"] in PUBLISHED:
            N, K = self.shape(f"{module}.weight")
            return random_matrix(Cast("bf16"), N, K, self._random(module))
        which = int(layer[1]) % 2, expert and int(expert[1]) % 4, module.rsplit(".", 1)[-1]
        if which not in (made := self.__dict__.setdefault("made", {})):
            made[which] = super().matrix(module)
        return cast(QuantTensor, made[which])


@functools.cache
def _laid_out(w: Fp4Tensor) -> Fp4Weight:
    return fp4_layout.lay_out(w)


def lay_out_again(w: Fp4Tensor) -> Fp4Weight:
    """Lay out a matrix that repeats, in memory of its own, in the time of a copy."""
    laid = _laid_out(w)
    return dataclasses.replace(laid, data=laid.data.clone())


def llm_of(shape: str, scheme: str, layers: int | None) -> LLM:
    config = {**LARGE[shape], "max_position_embeddings": 4096}
    weights = Repeated(config, scheme, "cuda", layers=layers)
    vars(fp4_kernel)["lay_out"] = lay_out_again
    model = build(weights, torch.device("cuda"))
    _laid_out.cache_clear()
    assert (why := supports_model(model, KVFormat.parse("kv16"))) is None, why
    return LLM(model, cast(Tokenizer, NoTokenizer()), weights)


@torch.inference_mode()
def check(shape: str, scheme: str) -> float:
    """Return the median error of logits that the engine's executor computes, of prompts and steps of 1 to 64 rows."""
    llm, errors = llm_of(shape, scheme, 2), list[float]()
    model, fmt = llm.model, KVFormat.parse("kv16")
    decoder = decoder_of(llm, 64, 48)
    executor = decoder.engine.runner.cuda_executor(None)
    assert executor is not None
    ids = torch.randint(model.spec.vocabulary, (64, 40), generator=torch.Generator().manual_seed(0))
    wanted = torch.cat([model(some.cuda(), model.new_cache(len(some))).cpu() for some in torch.split(ids, 16)])
    each = 48 // fmt.page
    pages = torch.arange(64 * each).view(64, each).tolist()
    at = 30
    first = executor.run([Chunk(i[:at].tolist(), 0, p, True) for i, p in zip(ids, pages, strict=True)]).cpu()
    errors += ((first - wanted[:, at - 1]).norm(dim=-1) / wanted[:, at - 1].norm(dim=-1)).tolist()
    for rows in (64, 8, 3, 1):
        chunks = [Chunk([int(i[at])], at, p, True) for i, p in zip(ids[:rows], pages, strict=False)]
        found = executor.run(chunks).cpu()
        errors += ((found - wanted[:rows, at]).norm(dim=-1) / wanted[:rows, at].norm(dim=-1)).tolist()
        at += 1
    error = median(errors)
    if not error <= TOLERANCE[model.dtype]:
        raise SystemExit(f"{shape} at {scheme}: logits are {error:.1%} away from the model's layer by layer; not timed")
    return error


def step_bytes(model: Model, chosen: list[int]) -> int:
    """Return the bytes of a step in which these numbers of experts were chosen, by layer."""

    def stored(w: Any) -> int:
        if isinstance(w, Fp4Weight):
            return w.N * format_of({"format": w.format}).row_bits({"shape": [w.N, w.K]}) // 8
        return w.numel() * w.element_size() if isinstance(w, Tensor) else int(w.nbytes)

    def size(linears: list[QuantLinear]) -> int:
        return sum(stored(linear.prepared.data) for linear in linears)

    total = size(model.linears())
    for layer, n in zip(cast(Any, model.layers), chosen, strict=True):
        experts = layer.mlp.experts
        total -= round(size([x for e in experts for x in (e.gate, e.up, e.down)]) * (1 - n / len(experts)))
    return total


@torch.inference_mode()
def chosen_experts(decoder: EngineDecoder, batch: int) -> list[int]:
    """Return how many experts of each layer are chosen by tokens of a step like the last one, kernel by kernel."""
    found, executor = list[int](), decoder.engine.runner.cuda_executor(None)
    assert executor is not None
    graph, route, modules = executor.graph(batch), products.route, (products, fp4_products)
    ups = [module.up for module in modules]

    def count(logits: Tensor, e: products.Mixture) -> None:
        found.append(len(set(logits[:batch, : e.count].topk(e.top, -1)[1].flatten().tolist())))

    def counted(up: Any) -> Any:
        def counted_up(x: Tensor, logits: Tensor, e: products.Mixture, *more: Any) -> Any:
            count(logits, e)
            return up(x, logits, e, *more)

        return counted_up

    def counted_route(logits: Tensor, e: products.Mixture, *more: Any) -> Any:
        count(logits, e)
        return route(logits, e, *more)

    products.route = counted_route
    for module, up in zip(modules, ups, strict=True):
        module.up = counted(up)  # type: ignore[attr-defined]
    try:
        executor._inputs.ids.random_(decoder.engine.llm.model.spec.vocabulary)
        executor._inputs.token_source.fill_(-1)
        graph._run()
    finally:
        products.route = route
        for module, up in zip(modules, ups, strict=True):
            module.up = up  # type: ignore[attr-defined]
    return found


def decoder_of(llm: LLM, batch: int, length: int, tune: bool = False) -> EngineDecoder:
    """Return an engine whose kernels are compiled, on all cores."""
    decoder = EngineDecoder(llm, batch, length, "kv16")
    executor = decoder.engine.runner.cuda_executor(None)
    assert executor is not None
    if tune:
        autotune.tune(executor, {batch})
    jit.compile_all(sorted(executor.kernels({batch}, {min(batch * CONTEXT, 2048), CONTEXT})))
    return decoder


def measure(llm: LLM, scheme: str, batch: int, ceiling: float, given: argparse.Namespace) -> dict[str, Any]:
    model = llm.model
    decoder = decoder_of(llm, batch, CONTEXT + TOKENS + 2, given.tune)
    ids = torch.randint(model.spec.vocabulary, (batch, CONTEXT), generator=torch.Generator().manual_seed(batch))
    decoder.generate(ids, TOKENS)
    made = [decoder.generate(ids, TOKENS) for _ in range(ROUNDS)]
    assert all(torch.equal(made[0].tokens, again.tokens) for again in made), "two runs differ"
    ms = 1e3 * median(step for generation in made for step in generation.steps)
    chosen = chosen_experts(decoder, batch)
    size = step_bytes(model, chosen)
    row = {"shape": llm.weights.path.name, "scheme": scheme, "layers": len(model.spec.layers), "batch": batch}
    row |= {"milliseconds_per_token": ms, "tokens_per_second": 1e3 * batch / ms, "step_bytes": size}
    row |= {"experts_a_layer": mean(chosen), "share_of_ceiling": size / ms / 1e6 / ceiling}
    row |= {"gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    row |= {"first_token_milliseconds": 1e3 * median(generation.first for generation in made)}
    if given.profile:
        executor = decoder.engine.runner.cuda_executor(None)
        assert executor is not None
        found = breakdown(executor.graph(batch).replay)
        longest = [f"{k.launches} x {k.name[:70]}: {k.microseconds:.1f} us" for k in found.kernels[:12]]
        row["breakdown"] = {"summary": str(found), "longest": longest}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,mixtral-8x7b")
    parser.add_argument("--schemes", help="separated by plus signs; default: mxfp4 for gpt-oss, else 4 and 2 bits")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=210)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    given = parser.parse_args()
    begun, ceiling, rows = perf_counter(), read_ceiling().gb_per_s, list[dict[str, Any]]()
    for shape in given.shapes.split(","):
        published = PUBLISHED.get(str(LARGE[shape]["model_type"]))
        for scheme in given.schemes.split("+") if given.schemes else [published] if published else SCHEMES:
            if perf_counter() - begun > given.seconds:
                print(f"left out: {shape} at {scheme}", flush=True)
                continue
            error = check(shape, scheme)
            print(f"{shape} {scheme}: checked, {error:.2%}, {perf_counter() - begun:.0f} s", flush=True)
            torch.cuda.reset_peak_memory_stats()
            llm = llm_of(shape, scheme, given.layers)
            print(f"built, {perf_counter() - begun:.0f} s", flush=True)
            for batch in map(int, given.batches.split(",")):
                rows.append(measure(llm, scheme, batch, ceiling, given) | {"logits_error": error})
                rows[-1]["shape"] = shape
                speed = (
                    f"{rows[-1]['tokens_per_second']:.0f} tokens/s, {rows[-1]['share_of_ceiling']:.0%} of the ceiling"
                )
                print(f"batch {batch}: {speed}, {perf_counter() - begun:.0f} s", flush=True)
                if given.profile:
                    print(rows[-1]["breakdown"]["summary"], *rows[-1]["breakdown"]["longest"], sep="\n", flush=True)
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    options = [argument for argument in sys.argv[1:] if argument != str(given.out)]
    command = " ".join(["python", "bench/gpu/experts_cuda.py", given.out.name, *options])
    write_result(given.out, {"command": command, "gpu": gpu(), "read_ceiling_gb_per_s": ceiling, "rows": rows})
    print(f"{'shape':14} {'scheme':21} layers batch  ms/token  tokens/s  GB/step  experts  share  prompt ms     GB")
    for r in rows:
        print(
            f"{r['shape']:14} {r['scheme']:21} {r['layers']:6} {r['batch']:5} {r['milliseconds_per_token']:9.3f} "
            f"{r['tokens_per_second']:9.0f} {r['step_bytes'] / 1e9:8.2f} {r['experts_a_layer']:8.1f} "
            f"{r['share_of_ceiling']:6.0%} {r['first_token_milliseconds']:10.1f} {r['gpu_memory_gb']:6.1f}"
        )


if __name__ == "__main__":
    main()
