"""Find the fastest cuts of the decode kernel inside a model, where other kernels overlap with it, and print them.

    python bench/tune_chain.py [BITS …]

One problem after the other takes the cut with which a whole step of a Llama-2-7B with random weights is fastest, twice
around. The lines go into kernels/cuda/tuned.json as they are. Nothing is checked here: `crelle bench decode` refuses to
time a model whose tokens are wrong. bench/tune_cuda.py does the same for products by themselves.
"""

import json
import sys
from dataclasses import astuple
from itertools import pairwise

import torch

from crelle.errors import CrelleError
from crelle.eval.shapes import RandomWeights
from crelle.kernels.cuda import build, decode
from crelle.kernels.cuda.decode import Shape
from crelle.kernels.cuda.layout import CudaWeight
from crelle.models.loader import build as build_model

PROBLEMS = [(12288, 4096), (22016, 4096), (4096, 11008), (4096, 4096)]
CUTS = [
    Shape(1, 16, 1, 2, 1, 32, 2),
    Shape(1, 16, 1, 4, 1, 32, 2),
    Shape(1, 16, 1, 2, 1, 32, 1),
    Shape(1, 8, 1, 2, 1, 32, 2),
    Shape(1, 8, 1, 4, 1, 32, 2),
    Shape(1, 8, 1, 2, 1, 32, 4),
    Shape(1, 8, 1, 4, 1, 32, 999),
    Shape(1, 8, 2, 2, 1, 32, 3),
    Shape(2, 8, 1, 2, 1, 32, 2),
    Shape(2, 8, 1, 2, 1, 32, 4),
    Shape(2, 8, 1, 4, 1, 32, 2),
]


def milliseconds(step: object, kv: list[torch.Tensor], replays: int = 40) -> float:
    """Median of one step behind 200 tokens, as a graph."""
    ids, position = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), 200, dtype=torch.int32).cuda()
    step(ids, position, kv)  # type: ignore[operator]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(ids, position, kv)  # type: ignore[operator]
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairwise(marks))[replays // 2]


@torch.inference_mode()
def tune(bits: int) -> dict[tuple[int, int], Shape]:
    device = torch.device("cuda")
    model = build_model(RandomWeights("llama2-7b", f"bcq:bits={bits},group=128", device), device)
    step, c = model.make_step(), model.c
    kv = [torch.randn(2, 1, c.heads, 512, c.head_size, device=device, dtype=torch.float16) for _ in range(c.layers)]
    chosen: dict[tuple[int, int], Shape] = {}
    usual = decode.choose

    def choose(w: CudaWeight, tokens: int, processors: int | None = None, chained: bool = False) -> Shape:
        return chosen.get((w.N, w.K)) or usual(w, tokens, processors, chained)

    decode.choose = choose
    try:
        for problem in PROBLEMS * 2:
            found = []
            for cut in CUTS:
                chosen[problem] = cut
                try:
                    found.append((milliseconds(step, kv), cut))
                except CrelleError as e:  # more shared memory than there is
                    print(f"{bits} bits {problem} {astuple(cut)}: {e}", file=sys.stderr)
            best, chosen[problem] = min(found, key=lambda f: f[0])
            print(
                f"{bits} bits {problem} {astuple(chosen[problem])}: {best:.3f} ms a step", file=sys.stderr, flush=True
            )
    finally:
        decode.choose = usual
    return chosen


def main() -> None:
    wanted = [int(a) for a in sys.argv[1:]] or [2, 3, 4]
    build.compile_all(
        [
            (
                "decode.cu",
                f"crelle::decode<{P}, crelle::BCQ, 2, 1, {', '.join(map(str, astuple(cut)[:6]))}, __half, __half>",
            )
            for P in wanted
            for cut in CUTS
        ]
    )
    for bits in wanted:
        for (N, K), cut in tune(bits).items():
            problem = {"codes": False, "P": bits, "N": N, "K": K, "M": 1, "chained": True}
            print(json.dumps({**problem, "cut": list(astuple(cut))}))


if __name__ == "__main__":
    main()
