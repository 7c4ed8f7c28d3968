"""Find the fastest cuts of the decode kernel inside a model, where other kernels overlap with it, and print them.

    python bench/tune_chain.py SHAPE BITS [LAYERS]          e.g. opt-175b 3 2

The products of a few layers of that shape, with random weights, take turns: each takes the cut with which a whole step
is fastest, until a turn changes nothing. The lines go into kernels/cuda/tuned.json as they are. Nothing is checked
here: `crelle bench decode` refuses to time a model whose tokens are wrong. bench/tune_cuda.py does the same for single
products.
"""

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
from crelle.kernels.cuda import build, decode
from crelle.kernels.cuda.decode import Give, Shape
from crelle.kernels.cuda.layout import CudaWeight
from crelle.models.loader import build as build_model

Problem = tuple[int, int, Give]  # N, K, what the product gives

# (tiles, warps, run, stages); GATED takes rows in pairs
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
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return float(sorted(a.elapsed_time(b) for a, b in pairwise(marks))[replays // 2])


class Cuts:
    """Stands where decode.choose stood: notes which problems a step has, and gives them the cut that is tried."""

    def __init__(self) -> None:
        self.usual, self.chosen = decode.choose, dict[Problem, Shape]()
        self.weights: dict[Problem, CudaWeight] = {}

    def __call__(
        self,
        w: CudaWeight,
        tokens: int,
        processors: int | None = None,
        chained: bool = False,
        give: Give = "NUMBERS",
    ) -> Shape:
        if not chained:
            return self.usual(w, tokens, processors)
        self.weights[w.N, w.K, give] = w
        return self.chosen.get((w.N, w.K, give)) or self.usual(w, tokens, processors, chained, give)

    def candidates(self, problem: Problem) -> list[Shape]:
        """All cuts whose thread blocks fit a multiprocessor at once."""
        w, found = self.weights[problem], []
        policies = (0,) if problem[2] == "NUMBERS" else POLICIES
        for (tiles, warps, run, stages), blocks, policy in product(PIECES, BLOCKS, policies):
            cut = Shape(tiles, warps, run, stages, 1, 32, blocks, policy)
            at_once, shared = 1 if blocks == 999 else blocks, warps * decode._ring(w, cut) + 8192
            if at_once * warps <= 32 and at_once * shared <= SHARED and not (problem[2] == "GATED" and tiles % 2):
                found.append(cut)
        return found


@torch.inference_mode()
def tune(shape: str, bits: int, layers: int) -> dict[Problem, Shape]:
    device = torch.device("cuda")
    model = build_model(RandomWeights(shape, f"bcq:bits={bits},group=128", device, layers=layers), device)
    run, c = model.make_step(), model.c
    kv = [torch.randn(2, 1, c.kv_heads, 512, c.head_size, device=device, dtype=torch.float16) for _ in range(layers)]
    ids, position = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), 200, dtype=torch.int32).cuda()

    def step() -> Tensor:
        return run(ids, position, kv)

    decode.choose = cuts = Cuts()
    try:
        best = milliseconds(step)
        problems = list(cuts.weights)
        variants = {
            decode.decode_variant(cuts.weights[p], 1, cut, torch.float16, p[2], divided)
            for p in problems
            for cut in cuts.candidates(p)
            for divided in (False, True)
        }
        build.compile_all(sorted(variants))
        for _ in range(TURNS):
            before = dict(cuts.chosen)
            for problem in problems:
                for cut in cuts.candidates(problem):
                    kept, cuts.chosen[problem] = cuts.chosen.get(problem), cut
                    try:
                        now = milliseconds(step)
                    except CrelleError as e:  # more shared memory than there is
                        print(f"{problem} {astuple(cut)}: {e}", file=sys.stderr)
                        now = best
                    if now < best:
                        best = now
                    elif kept:
                        cuts.chosen[problem] = kept
                    else:
                        del cuts.chosen[problem]
                print(f"{problem} {cuts.chosen.get(problem)}: {best:.3f} ms a step", file=sys.stderr, flush=True)
            if cuts.chosen == before:
                break
    finally:
        decode.choose = cuts.usual
    return cuts.chosen


def main() -> None:
    shape, bits = sys.argv[1], int(sys.argv[2])
    for (N, K, give), cut in tune(shape, bits, int(sys.argv[3]) if len(sys.argv) > 3 else 8).items():
        problem = {"codes": False, "P": bits, "N": N, "K": K, "M": 1, "chained": True, "give": give}
        print(json.dumps({**problem, "cut": list(astuple(cut))}))


if __name__ == "__main__":
    main()
