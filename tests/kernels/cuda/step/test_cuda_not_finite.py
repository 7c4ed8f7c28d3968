"""A NaN or an infinity that goes into a CUDA kernel comes out as NaN or an infinity, and touches no other row."""

from typing import get_args

import pytest
import torch
from plane_weights import random_weight
from test_cuda_decode_attention import paged
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels import cuda, ops
from crelle.kernels.cuda.attention import decode_attention, paged_attention
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.planes import bmma_gemv, gemm
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out
from crelle.kernels.cuda.step import embed_argmax, residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue, is_gated
from crelle.kernels.cuda.step.fused_linear import Norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]
HALF, BF16 = torch.float16, torch.bfloat16
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
FORMS = [
    (ScaleKind.BCQ, 3, 128),
    (ScaleKind.BCQ, 2, 64),
    (ScaleKind.UNIFORM, 4, 128),
    (ScaleKind.AFFINE, 2, 40),
    (ScaleKind.BCQ_SYMMETRIC, 5, 32),
]
OPS: tuple[Prologue, ...] = get_args(Prologue)


def spoilt(y: Tensor, clean: Tensor, row: int) -> None:
    """Row `row` of y has no finite value; all others are those of a run without the bad input."""
    assert not bool(y[row].isfinite().any())
    others = [i for i in range(len(y)) if i != row]
    assert torch.equal(y[others], clean[others])
    assert bool(clean.isfinite().all())


def with_bad(x: Tensor, row: int, at: int, value: float) -> Tensor:
    x = x.clone()
    x[row, at] = value
    return x


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("kernel", ["cuda", "cuda-lut"])
@pytest.mark.parametrize(("kind", "P", "group"), FORMS)
def test_products(kind: ScaleKind, P: int, group: int, kernel: str, value: str) -> None:
    torch.manual_seed(P)
    for dtype in (HALF, BF16):
        w = ops.prepare(random_weight(kind, P, 200, 1000, group, device="cuda"), dtype, kernel)
        for M in (1, 2, 3, 4, 5, 8, 16, 31, 40, 130, 300):  # bmma_gemv.cu, skinny_gemm.cu, gemm.cu
            x = torch.randn(M, 1000, device="cuda", dtype=dtype)
            for row, at in ((0, 0), (M - 1, 999), (M // 2, 517)):
                spoilt(ops.matmul(with_bad(x, row, at, BAD[value]), w), ops.matmul(x, w), row)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("op", OPS)
def test_operations_before_a_product(op: Prologue, value: str) -> None:
    if (op, value) == ("RELU", "-inf"):
        return  # max(-inf, 0) is 0
    K, wide = 1024, 2048 if is_gated(op) else 1024
    w = lay_out(random_weight(ScaleKind.BCQ, 3, 64, K, 128, device="cuda"))
    plain = torch.randn(64, K, device="cuda", dtype=HALF)
    norm, shift = torch.randn(2, K, device="cuda", dtype=HALF)
    norms = (norm if "NORM" in op else None, shift if op == "LAYER_NORM" else None, 1e-5)
    for M in (1, 2, 4):
        x = torch.randn(M, wide, device="cuda", dtype=HALF)
        bad = with_bad(x, M - 1, 700, BAD[value])
        coded = [bmma_gemv.product(bmma_gemv.encode(v, w, op, *norms), w, HALF) for v in (bad, x)]
        spoilt(*coded, M - 1)
        spoilt(dense.product(bad, plain, op, *norms), dense.product(x, plain, op, *norms), M - 1)
    x = torch.randn(40, wide, device="cuda", dtype=HALF)
    bad = with_bad(x, 17, 700, BAD[value])
    some = None if is_gated(op) else torch.randn(40, K, device="cuda", dtype=HALF)
    packed = [
        gemm.product(residual_norm_pack.add_norm_pack(v, w, op, Norm(*norms), addend=some)[0], w) for v in (bad, x)
    ]
    spoilt(*packed, 17)


@pytest.mark.parametrize("part", ["scale", "zero"])
def test_scales_of_a_weight(part: str) -> None:
    for value in BAD.values():
        w = random_weight(ScaleKind.BCQ, 3, 64, 512, 128, device="cuda")
        scales = w.tensors()["alpha" if part == "scale" else "z"]
        scales[..., 5, 2] = value
        for dtype in (HALF, BF16):
            for kernel in ("cuda", "cuda-lut"):
                prepared = ops.prepare(w, dtype, kernel)
                for M in (1, 3, 16, 130):
                    y = ops.matmul(torch.randn(M, 512, device="cuda", dtype=dtype), prepared)
                    assert not bool(y[:, 5].isfinite().any())
                    assert bool(y[:, [i for i in range(64) if i != 5]].isfinite().all())


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("value", BAD)
def test_attention(value: str, which: str) -> None:
    B, heads, kv_heads, D, capacity = 3, 8, 4, 128, 200
    at = {"q": 3 * D + 5, "k": (heads + 1) * D + 5, "v": (heads + kv_heads + 1) * D + 5}[which]
    qkv = torch.randn(B, (heads + 2 * kv_heads) * D, device="cuda", dtype=HALF)
    pages, table = paged(torch.randn(2, B, kv_heads, capacity, D, device="cuda", dtype=HALF))
    position = torch.tensor([150, 77, 20], dtype=torch.int32, device="cuda")
    clean = decode_attention.attend(qkv, pages, table, position, heads, D**-0.5)
    found = decode_attention.attend(with_bad(qkv, 1, at, BAD[value]), pages, table, position, heads, D**-0.5)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    if which == "v" or value == "nan":  # a score of -inf is a weight of 0
        head = found[1].view(heads, D)[3 if which == "q" else 2]
        assert not bool(head.isfinite().all())


@pytest.mark.parametrize("fmt", ["kv16", "kv8", "kv4", "kv4:rotate=false", "kv8:group=32,center=false"])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", BAD)
def test_pages(value: str, which: str, fmt: str) -> None:
    """A bad key or value of an early token reaches whoever attends to it, through codes too."""
    kv, B, heads, D, length = KVFormat.parse(fmt), 3, 4, 64, 40
    k, v = torch.randn(2, B * length, 2, D, device="cuda", dtype=HALF)
    table = torch.arange(B * 3, dtype=torch.int32, device="cuda").view(B, 3)
    q = torch.randn(B, heads, D, device="cuda", dtype=HALF)
    lengths = torch.full((B,), length, dtype=torch.int32, device="cuda")

    def seen(k: Tensor, v: Tensor) -> Tensor:
        pages = KVPages.new(kv, B * 3, 2, D, HALF, "cuda")
        paged_attention.append(k, v, pages, table, torch.zeros(B, dtype=torch.int32, device="cuda"))
        return paged_attention.attend(q, pages, table, lengths, pdl=False)  # more than a token of each is new

    clean, bad = seen(k, v), {"k": k.clone(), "v": v.clone()}
    bad[which][length + 7, 1, 3] = BAD[value]  # of the second sequence
    found = seen(bad["k"], bad["v"])
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    if kv.coded or which == "v" or value == "nan":
        assert not bool(found[1, 2:].isfinite().all(-1).any())


@pytest.mark.parametrize("dtype", [HALF, BF16, torch.float32])
def test_the_likeliest_token_of_bad_logits_is_not_a_token(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 32001, device="cuda", dtype=dtype)
    logits[1, 77], logits[2, 32000], logits[3] = float("nan"), float("inf"), float("-inf")
    logits[4, 5], logits[4, 6] = float("-inf"), 30
    best, argmax = logits.argmax(-1).tolist(), embed_argmax.Argmax(8, torch.device("cuda"))
    for _ in range(2):
        assert argmax(logits).tolist() == [
            best[0],
            embed_argmax.NOT_FINITE,
            embed_argmax.NOT_FINITE,
            embed_argmax.NOT_FINITE,
            6,
        ]
        assert argmax.ids[:5].tolist() == best  # what the next step may look up
