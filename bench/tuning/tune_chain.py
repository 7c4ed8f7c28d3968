"""Autotune the GEMV's tile configs inside a model's step, where other kernels overlap with it (PDL), and print them.

    python bench/tuning/tune_chain.py SHAPE SCHEME [LAYERS]        e.g. opt-175b bcq:bits=3,group=128 2

The products of a few layers of that shape, with random weights, take turns: each takes the tile config with which a
whole step is fastest, until a turn changes nothing. The lines go into kernels/cuda/autotune.json as they are. Nothing
is checked here: `crelle bench decode` refuses to time a model whose tokens are wrong. tune_cuda.py does the same
for single products.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import astuple
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from crelle.bench.model_shapes import RandomWeights
from crelle.errors import CrelleError
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.executor import CudaExecutor, _Graph
from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.bmma_gemv import EpilogueOut, GemvTileConfig
from crelle.kernels.cuda.planes.weight_layout import CudaWeight, ScaleKind
from crelle.kernels.cuda.step.graphs import capture
from crelle.kernels.executor import Chunk
from crelle.models.loader import build as build_model

Problem = tuple[int, int, EpilogueOut]  # N, K, epilogue

# (tiles, warps, run, stages); SILU_MUL_ENCODE takes rows in pairs
PIECES = [
    *((1, 8, 1, stages) for stages in (2, 3, 4, 6)),
    *((1, 8, 2, stages) for stages in (2, 3)),
    *((2, 8, 1, stages) for stages in (2, 4, 8)),
    *((1, 16, 1, stages) for stages in (1, 2, 3, 4)),
    *((2, 16, 1, stages) for stages in (2, 4)),
    *((4, 8, 1, stages) for stages in (4, 8)),
    (1, 16, 2, 2),
    (2, 8, 2, 2),
]
BLOCKS = (1, 2, 3, 4, 999)  # thread blocks on a multiprocessor; 999: as many as there is work for, in turn
POLICIES = (0, 2)
SHARED = 227 * 1024  # bytes of a multiprocessor
TURNS = 3


def milliseconds(step: Callable[[], Tensor], replays: int = 15) -> float:
    """Median of one step as a graph."""
    graph, _ = capture(step)
    graph.replay()
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return float(sorted(a.elapsed_time(b) for a, b in pairwise(marks))[replays // 2])


class ConfigOverride:
    """Replaces bmma_gemv.choose: notes which problems a step has, and gives them the tile config that is tried."""

    def __init__(self) -> None:
        self.usual, self.chosen = bmma_gemv.choose, dict[Problem, GemvTileConfig]()
        self.weights: dict[Problem, CudaWeight] = {}

    def __call__(
        self,
        w: CudaWeight,
        tokens: int,
        processors: int | None = None,
        in_graph: bool = False,
        epilogue: EpilogueOut = "STORE",
    ) -> GemvTileConfig:
        if not in_graph:
            return self.usual(w, tokens, processors)
        self.weights[w.N, w.K, epilogue] = w
        return self.chosen.get((w.N, w.K, epilogue)) or self.usual(w, tokens, processors, in_graph, epilogue)

    def candidates(self, problem: Problem) -> list[GemvTileConfig]:
        """All tile configs whose thread blocks fit a multiprocessor at once."""
        w, found = self.weights[problem], []
        policies = (0,) if problem[2] == "STORE" else POLICIES
        for (tiles, warps, run, stages), blocks, policy in product(PIECES, BLOCKS, policies):
            config = GemvTileConfig(tiles, warps, run, stages, 1, 32, blocks, policy)
            at_once, shared = 1 if blocks == 999 else blocks, warps * bmma_gemv._pipeline_bytes(w, config) + 8192
            if (
                at_once * warps <= 32
                and at_once * shared <= SHARED
                and not (problem[2] == "SILU_MUL_ENCODE" and tiles % 2)
            ):
                found.append(config)
        return found


@torch.inference_mode()
def tune(shape: str, scheme: str, layers: int) -> tuple[dict[Problem, GemvTileConfig], dict[Problem, CudaWeight]]:
    device = torch.device("cuda")
    model = build_model(RandomWeights(shape, scheme, device, layers=layers), device)
    kv, c = KVFormat.parse("kv16"), model.spec
    pages = [KVPages.new(kv, 32, c.kv_heads, c.head_size, model.dtype, device) for _ in c.layers]
    executor = CudaExecutor(model, pages, [None] * layers, step=model.cuda_step)
    inputs = executor._inputs
    inputs.fill([Chunk([1], 192, list(range(13)), True)], 1)

    def step() -> Tensor:
        for layer in model.cuda_step.layers:
            for linear in layer.linears:
                linear.weights[0].plans.clear()  # which hold the tile configs of the step before
        return _Graph(executor, 1, inputs)._run()

    bmma_gemv.choose = configs = ConfigOverride()
    try:
        best = milliseconds(step)
        problems = list(configs.weights)
        variants = {
            bmma_gemv.gemv_variant(configs.weights[p], 1, config, torch.float16, p[2], divided)
            for p in problems
            for config in configs.candidates(p)
            for divided in (False, True)
        }
        jit.compile_all(sorted(variants))
        for _ in range(TURNS):
            before = dict(configs.chosen)
            for problem in problems:
                for config in configs.candidates(problem):
                    kept, configs.chosen[problem] = configs.chosen.get(problem), config
                    try:
                        now = milliseconds(step)
                    except CrelleError as e:  # more shared memory than there is
                        print(f"{problem} {astuple(config)}: {e}", file=sys.stderr)
                        now = best
                    if now < best:
                        best = now
                    elif kept:
                        configs.chosen[problem] = kept
                    else:
                        del configs.chosen[problem]
                print(f"{problem} {configs.chosen.get(problem)}: {best:.3f} ms a step", file=sys.stderr, flush=True)
            if configs.chosen == before:
                break
    finally:
        bmma_gemv.choose = configs.usual
    return configs.chosen, configs.weights


def main(shape: str, scheme: str, layers: int) -> None:
    chosen, weights = tune(shape, scheme, layers)
    for (N, K, epilogue), config in chosen.items():
        w = weights[N, K, epilogue]
        codes = w.kind not in (ScaleKind.BCQ, ScaleKind.BCQ_SYMMETRIC)
        problem = {"codes": codes, "P": w.P, "N": N, "K": K, "M": 1, "in_graph": True, "epilogue": epilogue}
        print(json.dumps({**problem, "config": list(astuple(config))}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("scheme")
    parser.add_argument("layers", nargs="?", type=int, default=8)
    main(**vars(parser.parse_args()))
