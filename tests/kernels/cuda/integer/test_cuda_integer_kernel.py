"""Linears with quantized activations, encoded in the emulator and multiplied by a stand-in of the GEMM."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import COMPILER
from integer_stand_in import run_integer_on_cpu
from plane_weights import relative
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import format_of
from crelle.kernels import cuda, registry
from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda.integer.integer_kernel import CudaInteger
from crelle.kernels.cuda.step.fuse import fuse
from crelle.kernels.cuda.step.fused_linear import Norm
from crelle.kernels.integer_reference import IntegerReference

emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF = torch.float16
KERNEL, ORACLE = CudaInteger(), IntegerReference()

# format, bits of weights and activations, group, outliers; group 0: one scale for a token, one for its outliers
SCHEMES = {
    "w4a4": ("grouped", 4, 4, 128, 128),
    "w4a8": ("grouped", 4, 8, 128, 128),
    "w8a8": ("grouped", 8, 8, 128, 0),
    "w3a3": ("grouped", 3, 3, 64, 64),
    "two-level": ("two-level", 4, 8, 0, 128),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_integer_on_cpu(monkeypatch)


def weight(scheme: str, N: int, K: int, seed: int = 0, order: Tensor | None = None) -> Any:
    form, bits, a, group, n = SCHEMES[scheme]
    act = ActivationSpec(a, group or K, n, clip=0.9 if a < 8 else 1.0, hadamard=a < 8)
    spec = {"format": form, "shape": [N, K], "bits": bits, "group": group or 128, "outliers": n, "permuted": True}
    spec |= {"activation": act.to_json()} | ({"outlier_bits": 8} if form == "grouped" else {})
    made = format_of(spec).random(spec, torch.Generator().manual_seed(seed))
    return made if order is None else replace(made, perm=order)


class Linear:
    """A layer, as FusedLinear wants it."""

    def __init__(self, w: Any, bias: Tensor | None = None) -> None:
        self.w, self.bias = w, bias
        self.prepared = Prepared(Problem.of(w, HALF), KERNEL, KERNEL.prepare(w, HALF))


def oracle(x: Tensor, layers: list[Linear]) -> Tensor:
    """The reference's products side by side, in f32."""
    y = [ORACLE.run(x.float(), ORACLE.prepare(layer.w, HALF)) for layer in layers]
    return torch.cat([v if one.bias is None else v + one.bias.float() for v, one in zip(y, layers, strict=True)], 1)


def normed(x: Tensor, norm: Norm) -> Tensor:
    v = x.float()
    assert norm.weight is not None
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm.eps)).half() * norm.weight


@emulated
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_the_reference(scheme: str) -> None:
    w, other = (weight(scheme, N, 300, seed) for N, seed in ((65, 0), (7, 1)))
    alike = replace(other, perm=w.perm)
    laid = KERNEL.prepare(w, HALF)
    assert KERNEL.shares(laid, KERNEL.prepare(alike, HALF))
    assert not KERNEL.shares(laid, KERNEL.prepare(other, HALF))
    for M in (0, 1, 9):
        x = torch.randn(M, 300, dtype=HALF)
        encoded = KERNEL.encode(x, laid)
        for v in (w, alike):
            y, wanted = KERNEL.run(encoded, KERNEL.prepare(v, HALF)), ORACLE.run(x.float(), ORACLE.prepare(v, HALF))
            assert y.shape == wanted.shape
            assert y.dtype == HALF
            assert M == 0 or relative(y, wanted) < 1e-3
        assert torch.equal(KERNEL.run(x, laid), KERNEL.run(encoded, laid))


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: None)
    problem = replace(Problem.of(weight("w4a4", 64, 512), HALF), device="cuda")
    assert KERNEL.supports(problem) is None
    assert registry.select(problem).name == "cuda-integer"
    two_level = replace(Problem.of(weight("two-level", 64, 512), HALF), device="cuda")
    assert KERNEL.supports(two_level) is None
    wrong = {
        "floats": replace(problem, activation="float"),
        "not floats, which": replace(problem, activation="int4/128+128f"),
        "not of 48": replace(problem, activation="int4/48+128", group=48),
        "not of 40000": replace(problem, K=40000),
        "float16 and bfloat16": replace(problem, dtype=torch.float32),
        "on a GPU": replace(problem, device="cpu"),
        "integer groups": replace(problem, format="bcq"),
    }
    for sentence, other in wrong.items():
        assert sentence in str(KERNEL.supports(other))
    assert KERNEL.supports(replace(problem, activation="int8/4096", group=4096)) is None
    with pytest.raises(UnsupportedError, match="not floats, which"):
        registry.select(wrong["not floats, which"], "cuda-integer")


@emulated
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sizes", [(128, 64, 70), (64, 33, 20)])  # that can be joined, and not
@pytest.mark.sample(2)
def test_norm_and_matrices_of_one_input(scheme: str, sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    K = 512
    first = weight(scheme, sizes[0], K)
    biases = [torch.randn(n, dtype=HALF) if n != sizes[1] else None for n in sizes]
    layers = [
        Linear(weight(scheme, n, K, i, first.perm), b) for i, (n, b) in enumerate(zip(sizes, biases, strict=True))
    ]
    before = [KERNEL.run(torch.ones(1, K, dtype=HALF), layer.prepared.data) for layer in layers]
    fused = fuse(layers, HALF)  # type: ignore[arg-type]
    assert fused.takes_integers
    assert len(fused.weights) == (1 if sizes[1] % 64 == 0 else 3)
    for layer, y in zip(layers, before, strict=True):  # the layers point into what is joined
        assert torch.equal(KERNEL.run(torch.ones(1, K, dtype=HALF), layer.prepared.data), y)
    norm = Norm(torch.rand(K).half() + 0.5, None, 1e-5)
    for M in (1, 5):
        x, addend = torch.randn(2, M, K).half()
        wanted = oracle(normed(x + addend, norm), layers)
        y, total = fused.norm_linear(x, addend, "RMS_NORM", norm)
        assert torch.equal(total, x + addend)
        assert relative(y, wanted) < 2e-2  # a norm's last bit moves a code now and then
        assert torch.equal(fused(total, "RMS_NORM", norm), y)
        assert fused(total, "RMS_NORM", norm, dtype=torch.float32).dtype == torch.float32


@emulated
def test_matrices_with_orders_of_their_own() -> None:
    K = 384
    layers = [Linear(weight("w4a4", n, K, seed)) for seed, n in enumerate((64, 64, 64))]
    fused = fuse(layers, HALF)  # type: ignore[arg-type]
    assert len(fused.weights) == 3
    x = torch.randn(3, K).half()
    y, total = fused.norm_linear(x, None, "RMS_NORM", Norm(torch.ones(K).half(), None, 1e-5))
    assert total is x
    assert relative(y, oracle(normed(x, Norm(torch.ones(K).half(), None, 1e-5)), layers)) < 2e-2
    assert torch.equal(fused(x), torch.cat([KERNEL.run(x, layer.prepared.data) for layer in layers], 1))


@emulated
def test_activation_residual_and_sandwich_norm() -> None:
    K, N = 640, 100
    down = fuse([Linear(weight("w4a8", N, K), torch.randn(N).half())], HALF)  # type: ignore[list-item]
    layers = [Linear(weight("w4a8", N, K), down.bias)]
    inner, x = torch.randn(4, 2 * K).half(), torch.randn(4, N).half()
    h = (torch.nn.functional.silu(inner[:, :K].float()) * inner[:, K:].float()).half()
    wanted = oracle(h, layers)
    same, y = down.linear_residual(inner, x, "SILU_MUL")
    assert same is x
    assert y is not None
    assert relative(y, wanted) < 1e-2
    assert relative(down(inner, "SILU_MUL", residual=x), wanted + x.float()) < 1e-2
    assert torch.equal(down.linear(inner, "SILU_MUL", residual=x), down(inner, "SILU_MUL", residual=x))
    norm = Norm(torch.rand(N).half(), None, 1e-5)
    stored, seen = down.normed(inner, norm, down, "SILU_MUL", residual=x)  # no epilogue encodes for it
    assert stored is seen
    assert torch.equal(stored, down(inner, "SILU_MUL", residual=x))
    assert isinstance(down.activated(inner[:, :K].contiguous(), "SILU_MUL", down), Tensor)
    sandwich = down.linear_norm(inner, norm, "SILU_MUL")
    assert relative(sandwich, normed(y, norm)) < 2e-3


@emulated
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    K = 256
    fused = fuse([Linear(weight("w4a4", n, K, order=torch.randperm(K))) for n in (64, 30)], HALF)  # type: ignore[list-item]
    norm, x, addend = Norm(torch.rand(K).half(), None, 1e-5), torch.randn(70, K).half(), torch.randn(70, K).half()
    y, total = fused.norm_linear(x, addend, "RMS_NORM", norm, batch_invariant=True)
    assert y.shape == (70, 94)
    assert torch.equal(total, x + addend)
    for rows in (slice(0, 1), slice(63, 70), slice(6, 70)):
        some, _ = fused.norm_linear(x[rows], addend[rows], "RMS_NORM", norm, batch_invariant=True)
        assert torch.equal(some, y[rows])
    empty, none = fused.norm_linear(x[:0], None, "RMS_NORM", norm, batch_invariant=True)
    assert (empty.shape, none.shape) == ((0, 94), (0, K))
    one = fuse([Linear(weight("w4a4", 40, K))], HALF)  # type: ignore[list-item]
    residual = torch.randn(70, 40).half()
    whole = one.linear(x, residual=residual, batch_invariant=True)
    assert torch.equal(one.linear(x[64:], residual=residual[64:], batch_invariant=True), whole[64:])


@emulated
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_beside_a_matrix_of_another_kind(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of q, k and v in 16 bits: each takes its own kernel."""
    from crelle.formats.dense import DenseTensor
    from crelle.kernels.reference import Dense

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    K = 256
    integer, w = Linear(weight("w4a4", 64, K)), DenseTensor(torch.randn(48, K).half() / 16)
    plain: Any = Linear.__new__(Linear)
    plain.bias, plain.prepared = None, Prepared(Problem.of(w, HALF), Dense(), w.weight)
    x, norm = torch.randn(9, K).half(), Norm(torch.rand(K).half(), None, 1e-5)
    for layers in ([integer, plain], [plain, integer]):
        fused = fuse(layers, HALF)
        assert not fused.takes_integers
        y, _ = fused.norm_linear(x, None, "RMS_NORM", norm, batch_invariant)
        h = normed(x, norm)
        parts = {id(integer): oracle(h, [integer]), id(plain): h.float() @ w.weight.float().T}
        assert relative(y, torch.cat([parts[id(layer)] for layer in layers], 1)) < 2e-2
