"""The kernels of four-bit floats on a real GPU, and a decoder's step with them."""

from typing import Any

import pytest
import torch
from fp4_weights import FORMATS, extreme_fp4, random_fp4
from plane_weights import relative
from product_checks import graph_gives_the_same

from crelle import LLM
from crelle.bench.load.model_sources import random_llm
from crelle.engine.engine import Engine
from crelle.engine.sampling.sampler import Sampling
from crelle.kernels import cuda, ops
from crelle.kernels.cuda.fp4 import fp4_gemm, fp4_gemv
from crelle.kernels.cuda.fp4.fp4_gemv import Fp4TileConfig
from crelle.kernels.cuda.fp4.fp4_layout import lay_out
from crelle.kernels.cuda.launch import most_shared_memory
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.step import fused_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]
HALF, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 5e-4, BF16: 4e-3}
SHAPES = [(1, 1), (33, 333), (300, 208), (256, 1024), (4096, 4096), (2000, 11008)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_any_number_of_rows_matches_oracle(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for N, K in SHAPES:
        w = random_fp4(N, K, kind, "cuda")
        laid, plain = lay_out(w), w.dequantize(torch.float64)
        for tokens in (*range(1, 17), 33, 300):
            x, bias, residual = (torch.randn(*s, device="cuda").to(dtype) for s in ((tokens, K), (N,), (tokens, N)))
            wanted = x.double() @ plain.T
            tolerance = TOLERANCE[dtype] * (4 if N == 1 else 1)
            y = fp4_gemm.matmul(x, laid)
            assert relative(y, wanted) < tolerance, (N, K, tokens)
            assert torch.equal(fp4_gemm.matmul(x, laid), y), (N, K, tokens)
            wanted += bias.double() + residual.double()
            assert relative(fp4_gemm.matmul(x, laid, bias, residual), wanted) < tolerance, (N, K, tokens)
            for i in range(tokens if tokens <= 8 else 0):
                assert torch.equal(fp4_gemm.matmul(x[i : i + 1], laid), y[i : i + 1])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_extreme_scales(kind: str, dtype: torch.dtype) -> None:
    w = extreme_fp4(200, 1000, kind, "cuda")
    laid, plain = lay_out(w), w.dequantize(torch.float64)
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, 1000, device="cuda").to(dtype)
        x = torch.ldexp(x, torch.randint(-6, 6, x.shape, device="cuda")).to(dtype)
        wanted = x.double() @ plain.T
        finite = wanted.abs() < 6e4
        y = fp4_gemm.matmul(x, laid)
        assert relative(y[finite], wanted[finite]) < TOLERANCE[dtype], tokens


@pytest.mark.parametrize("kind", FORMATS)
def test_all_tile_configs_give_the_same_but_for_the_order_of_sums(kind: str) -> None:
    w = random_fp4(4000, 4096, kind, "cuda")
    laid, x = lay_out(w), torch.randn(2, 4096, device="cuda", dtype=HALF)
    wanted = x.double() @ w.dequantize(torch.float64).T
    for tiles in (1, 2, 4):
        for warps in (4, 8, 16):
            for stages in (1, 2, 3):
                c = Fp4TileConfig(tiles, warps, stages, 1)
                if fp4_gemv.shared_bytes(laid, 2, c) > most_shared_memory() - 1024:
                    continue
                y = fp4_gemv.product(x, laid, dtype=torch.float32, config=c)
                assert relative(y, wanted) < 1e-5, c  # tensor cores cut f32 sums off
                for _ in range(20):
                    assert torch.equal(fp4_gemv.product(x, laid, dtype=torch.float32, config=c), y), c


@pytest.mark.parametrize("kind", FORMATS)
def test_reruns_and_graphs(kind: str) -> None:
    w = lay_out(random_fp4(11008, 4096, kind, "cuda"))
    x = torch.randn(64, 4096, device="cuda", dtype=HALF)
    packed = gemm.pack(x, w)
    one, many = fp4_gemv.product(x[:1], w), fp4_gemm.product(packed, w)
    for _ in range(200):
        assert torch.equal(fp4_gemv.product(x[:1], w), one)
        assert torch.equal(fp4_gemm.product(packed, w), many)
    assert graph_gives_the_same(lambda out: fp4_gemv.product(x[:1], w, out=out))


@pytest.mark.parametrize("kind", FORMATS)
def test_batch_invariant_rows(kind: str) -> None:
    w = lay_out(random_fp4(1000, 4096, kind, "cuda"))
    x = torch.randn(300, 4096, device="cuda", dtype=HALF)
    whole = fp4_gemm.matmul(x, w, batch_invariant=True)
    for count in (1, 7, 16, 33, 130, 256):
        assert torch.equal(fp4_gemm.matmul(x[:count], w, batch_invariant=True), whole[:count]), count
    assert torch.equal(fp4_gemm.matmul(x[299:], w, batch_invariant=True), whole[299:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_stay_so_alone(bad: float) -> None:
    w = lay_out(random_fp4(512, 1024, "nvfp4", "cuda"))
    for rows in (4, 40):
        x = torch.randn(rows, 1024, device="cuda", dtype=HALF)
        wanted = fp4_gemm.matmul(x, w)
        x[2, 77] = bad
        y = fp4_gemm.matmul(x, w)
        others = [i for i in range(rows) if i != 2]
        assert not bool(y[2].isfinite().any())
        assert torch.equal(y[others], wanted[others])


@pytest.mark.parametrize("kind", FORMATS)
def test_kernel_is_selected(kind: str) -> None:
    w = random_fp4(512, 1024, kind, "cuda")
    prepared = ops.prepare(w, HALF)
    assert prepared.kernel.name == "cuda-fp4"
    x = torch.randn(2, 1024, device="cuda", dtype=HALF)
    assert relative(ops.matmul(x, prepared), x.double() @ w.dequantize(torch.float64).T) < TOLERANCE[HALF]
    y = torch.ops.crelle.fp4_matmul(x, prepared.data.data, 512, 1024, kind)
    assert torch.equal(y, ops.matmul(x, prepared))


def tokens_of(model: LLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    engine = Engine(model, pages=100, speculate="off", **options)
    handles = [engine.add(prompt, Sampling(max_tokens=24), ignore_end=True) for prompt in prompts]
    engine.run()
    return [handle.outputs[0].completion.tokens for handle in handles]


@pytest.mark.parametrize("kind", FORMATS)
def test_steps_of_a_decoder(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a random Llama: its first logits are those of the weights, and each gets what it gets alone."""
    monkeypatch.setattr(fused_linear, "SMALL", 0)  # no dequantized copies
    model = random_llm("smollm2-135m", kind, torch.device("cuda"), layers=3)
    assert {linear.kernel for linear in model.model.linears()} >= {"cuda-fp4"}
    torch.manual_seed(0)
    prompts = [torch.randint(49152, (n,)).tolist() for n in (1, 5, 17, 40, 100, 3, 9)]
    together = tokens_of(model, prompts, batch_invariant=True)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert tokens_of(model, [prompt], batch_invariant=True) == [tokens]
    assert [len(tokens) for tokens in tokens_of(model, prompts)] == [24] * len(prompts)
