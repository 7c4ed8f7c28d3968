"""NaN and infinity stay what they are in every kernel, and whoever is not concerned keeps every bit."""

import math

import pytest
import torch
from torch import Tensor

from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.kv.pages import KVFormat, KVPages, dequantize, quantize
from crelle.formats.mixed import MixedTensor
from crelle.kernels import ops
from crelle.kernels import reference_attention as kv
from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from cpu_models import mixed_weight, nearest_group

from crelle.kernels.cpu import core
from crelle.kernels.cpu.kernel import Cpu, Precision

pytestmark = pytest.mark.sample(8)

VALUES = [math.nan, math.inf, -math.inf]
ROWS = [1, 3, 6, 40]  # of x: one, those of a step, by digits in tiles, by tiles
KINDS = [("bcq", 1), ("bcq", 3), ("bcq without z", 2), ("uniform", 2), ("uniform", 4), ("uniform", 8)]  # every stream
KINDS += [("mixed", 2), ("mixed", 3)]
N, K, G = 70, 333, 64  # a last group that is shorter than a chunk


def weight(kind: str, bits: int, group: int = G) -> BCQTensor | UniformTensor | MixedTensor:
    if kind == "mixed":  # every other group of 4 bits, for "3" bits
        dtype = torch.float32 if bits == 2 else torch.float16
        return mixed_weight(N, K, nearest_group(group // 4), (bits - 2) / 2, 0.01, dtype=dtype)
    rng = torch.Generator().manual_seed(bits)
    C = -(-K // group)
    codes = torch.randint(0, 2**bits, (N, K), generator=rng, dtype=torch.uint8)
    scale = torch.rand(bits, N, C, generator=rng) * 0.02 + 0.01
    if kind.startswith("bcq"):
        z = torch.randn(N, C, generator=rng) * 0.02 if kind == "bcq" else None
        return BCQTensor.from_codes(codes, scale, z, group)
    zero = torch.randint(0, 2**bits, (N, C), generator=rng, dtype=torch.uint8)
    return UniformTensor.from_codes(codes, bits, scale[0], zero, group)


def inputs(M: int) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M))


def scales_and_rows(w: BCQTensor | UniformTensor | MixedTensor) -> list[tuple[Tensor, list[int]]]:
    """Scales, the first index of each being a row or 16 of them, and the rows that the one of row 5 concerns."""
    if isinstance(w, MixedTensor):
        found = [(w.second_scale, list(range(16))), (w.row_scale, [5])]
    else:
        found = [(t, [5]) for t in ([w.alpha[0], w.z] if isinstance(w, BCQTensor) else [w.scale])]
    return [(t, rows) for t, rows in found if t is not None]


def others(M: int, row: int) -> list[int]:
    return [m for m in range(M) if m != row]


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("kind", "bits"), KINDS)
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_products_of_x(precision: Precision, kind: str, bits: int, M: int, isa: str) -> None:
    """One value of one row: that row is not finite, in all its outputs; the others have the bits they had."""
    for group in (G, K):
        kernel, w = Cpu(precision), Cpu(precision).prepare(weight(kind, bits, group), torch.float32)
        before = kernel.run(inputs(M), w)
        for value in VALUES:
            for at in (0, 131, K - 1):
                x, row = inputs(M), M // 2
                x[row, at] = value
                y = kernel.run(x, w)
                assert not y[row].isfinite().any(), (value, at)
                assert torch.equal(y[others(M, row)], before[others(M, row)])


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("kind", "bits"), KINDS)
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_products_of_scales(precision: Precision, kind: str, bits: int, M: int, isa: str) -> None:
    for value in VALUES:
        w = weight(kind, bits)
        kernel, before = Cpu(precision), Cpu(precision).run(inputs(M), Cpu(precision).prepare(w, torch.float32))
        for part, concerned in scales_and_rows(w):
            at = (5 if len(part) == N else 5 // 16, 2)[: part.dim()]
            was, part[at] = part[at].clone(), value
            y = kernel.run(inputs(M), kernel.prepare(w, torch.float32))
            part[at] = was
            rest = [n for n in range(N) if n not in concerned]
            assert not y[:, concerned].isfinite().any()
            assert torch.equal(y[:, rest], before[:, rest])


@pytest.mark.parametrize("size", [1e38, 3e37, 1e30, 1e-20, 1e-30, 1e-38, 1e-41, 1e-44])
@pytest.mark.parametrize(("kind", "bits"), KINDS)
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_products_of_very_large_and_very_small_values(
    precision: Precision, kind: str, bits: int, size: float, isa: str
) -> None:
    """What f32 can hold is right: only a product that is too large itself becomes infinite."""
    w = weight(kind, bits)
    numbers = w.dequantize(torch.float64)
    for M in (1, 40):
        x = inputs(M)
        x[M // 2] = (x[M // 2] / x[M // 2].abs().max()).double().mul(size).float()
        y, wanted = Cpu(precision).run(x, Cpu(precision).prepare(w, torch.float32)), x.double() @ numbers.T
        fits = wanted.abs() < torch.finfo(torch.float32).max / 2
        assert y.isfinite()[fits].all()
        for got, right, fit in zip(y, wanted, fits, strict=True):
            off = (got.double() - right)[fit].norm()
            assert off <= {"exact": 1e-3, "int8": 3e-2}[precision] * right.norm() + 2e-44
        assert fits[M // 2].any()


@pytest.mark.parametrize("kernel", ["reference", "dequantized", "cpu", "cpu-int8"])
@pytest.mark.parametrize("value", VALUES)
def test_every_kernel_by_its_name(kernel: str, value: float) -> None:
    x = inputs(4)
    w = ops.prepare(weight("bcq", 3), torch.float32, kernel)
    before = ops.matmul(x, w)
    x[2, 9] = value
    y = ops.matmul(x, w)
    assert not y[2].isfinite().any()
    assert torch.equal(y[others(4, 2)], before[others(4, 2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", VALUES)
def test_plain_products(value: float, dtype: torch.dtype, isa: str) -> None:
    x, w = inputs(9), torch.randn(N, K, generator=torch.Generator().manual_seed(3)).to(dtype)

    def product() -> Tensor:
        y = torch.zeros(9, N)
        core().dense_matmul(x.numpy(), w, y.numpy())
        return y

    before = product()
    x[4, 332] = value
    y = product()
    assert not y[4].isfinite().any()
    assert torch.equal(y[others(9, 4)], before[others(9, 4)])
    x[4, 332], w[7, 100] = 0.0, value
    assert not product()[:, 7].isfinite().any()


# --- between the products ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 16, 100])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_small_operations(kind: str, value: float, n: int, isa: str) -> None:
    for at in {0, n // 2, n - 1}:
        x, y, ones = torch.ones(2, n), torch.zeros(2, n), torch.ones(n)
        x[1, at] = value
        core().rms_norm(x.numpy(), ones.numpy(), 1e-5, y.numpy())
        assert y[0].isfinite().all()
        assert not y[1, at].isfinite()  # of an infinite row the others are 0, as in torch
        gate, up = torch.ones(n), torch.ones(n)
        gate[at] = value
        core().activate(kind, gate.numpy(), up.numpy())
        assert (~gate.isfinite()).nonzero().flatten().tolist() == [at]
        gate, up[at] = torch.ones(n), value
        core().activate(kind, gate.numpy(), up.numpy())
        assert (~gate.isfinite()).nonzero().flatten().tolist() == [at]
        head, half = torch.ones(1, 2 * n), torch.full((n,), 0.6)
        head[0, at] = value
        core().rope(head.numpy(), half.numpy(), half.numpy())
        assert (~head[0].isfinite()).nonzero().flatten().tolist() == [at, at + n]


# --- keys and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention(dtype: torch.dtype, value: float, what: str, isa: str) -> None:
    for S in (1, 16, 70, 130):
        for at in {0, S // 2, S - 1}:
            q, k, v = torch.randn(40), torch.randn(S, 40).to(dtype), torch.randn(S, 40).to(dtype)
            {"query": q[None], "key": k, "value": v}[what][0 if what == "query" else at, 3] = value
            out = torch.zeros(40)
            core().attention(q.numpy(), k, v, out.numpy())
            assert not (out[3] if what == "value" else out).isfinite().any(), (S, at)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", VALUES)
def test_a_coded_group_with_nan_is_read_back_as_such(value: float, bits: int) -> None:
    for sign in (1, -1):
        x = torch.randn(6, 64)
        before = dequantize(*quantize(x, bits, 2), bits)
        x[3, 40] = sign * value
        after = dequantize(*quantize(x, bits, 2), bits)
        assert not after[3, 32:].isfinite().any()
        assert torch.equal(after[3, :32], before[3, :32])
        assert torch.equal(after[others(6, 3)], before[others(6, 3)])


@pytest.mark.parametrize("text", ["kv16", "kv8", "kv4", "kv4:rotate=false,center=false"])
@pytest.mark.parametrize("what", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("value", VALUES)
def test_paged_attention_in_torch(value: float, what: int, text: str) -> None:
    """Who sees the token is told; those before it, and other sequences, are not concerned."""
    fmt, T = KVFormat.parse(text), 20

    def run(spoil: bool) -> Tensor:
        rng = torch.Generator().manual_seed(0)
        pages = KVPages.new(fmt, 4, 2, 32, torch.float32, "cpu")
        q, *new = (torch.randn(2 * T, heads, 32, generator=rng) for heads in (4, 2, 2))
        if spoil:
            new[what][7, 0, 5] = value
        table = torch.arange(4).view(2, 2)
        kv.append(*new, pages, table, [0, 0])
        return kv.attend(q, pages, table, [T, T])

    before, after = run(False), run(True)
    touched = ~after.isfinite().all(-1)  # [2 T, H]
    assert touched[7:T, :2].all()
    touched[7:T, :2] = False
    assert not touched.any()
    rest = torch.ones(2 * T, 4, dtype=torch.bool)
    rest[7:T, :2] = False
    assert torch.equal(after[rest], before[rest])
