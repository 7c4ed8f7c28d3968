"""Checks that every kernel of a product x @ W.T with a laid out weight has to pass."""

from collections.abc import Callable
from dataclasses import replace

import torch
from plane_weights import TOLERANCE, random_weight, relative
from torch import Tensor

from crelle.kernels.cuda.planes.weight_layout import CudaWeight, ScaleKind, lay_out

HALF = torch.float16
Product = Callable[[Tensor, CudaWeight], Tensor]


def graph_gives_the_same(multiply: Callable[[Tensor | None], Tensor]) -> bool:
    """Whether a CUDA graph of three products leaves in `out` what a single one, multiply(None), returns."""
    y = multiply(None)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(y)
    with torch.cuda.graph(graph):
        for _ in range(3):
            multiply(out)
    same = True
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        same &= torch.equal(out, y)
    return same


def check_reruns(multiply: Product, P: int, N: int, K: int, tokens: int, times: int) -> None:
    """A large product is right (256 rows of it against f64) and has the same bits `times` times."""
    w = random_weight(ScaleKind.BCQ, P, N, K, 128, HALF, "cuda")
    x, prepared = torch.randn(tokens, K, dtype=HALF, device="cuda"), lay_out(w)
    y = multiply(x, prepared)
    rows = torch.randint(0, N, (256,), device="cuda")
    assert relative(y[:, rows], x.double() @ w.rows(rows).dequantize(torch.float64).T) <= TOLERANCE[HALF]
    for _ in range(times):
        assert torch.equal(multiply(x, prepared), y)


def check_first_planes(multiply: Product) -> None:
    """The first planes of a nested weight are a weight."""
    w = lay_out(random_weight(ScaleKind.BCQ_SYMMETRIC, 4, 64, 512, 128, HALF, "cuda"))
    few = replace(w, P=2, scales=w.scales[..., :2, :].contiguous())
    same = replace(few, words=w.words[:, :, :2].contiguous())
    x = torch.randn(20, 512, dtype=HALF, device="cuda")
    assert torch.equal(multiply(x, few), multiply(x, same))
