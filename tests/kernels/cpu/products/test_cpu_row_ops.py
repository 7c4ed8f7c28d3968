"""Norms, rotary positions, gated activations and sums over many rows against f64, and the bits of rounding to bf16."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from crelle.kernels.cpu import _core, row_ops
from crelle.kernels.spec import Activation, RopeSpec
from crelle.models import rope

pytestmark = [pytest.mark.usefixtures("threads_as_before", "isa"), pytest.mark.sample(3)]

F32, BF16 = torch.float32, torch.bfloat16
TYPES = (F32, BF16)
WIDTHS = (1, 15, 16, 17, 576, 1000, 5000)  # a row of 5000 is longer than a piece
ROWS = (0, 1, 3, 100)
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
ULP = 2.0**-23


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=chance) * torch.logspace(-1, 1, shape[-1])).to(dtype)


def check(found: Tensor, wanted: Tensor, dtype: torch.dtype, ulps: float, scale: Tensor | None = None) -> None:
    """Compare with f64: `ulps` of f32, of the result or of `scale`, and one rounding to the dtype."""
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    scale = wanted.abs() if scale is None else scale
    near = ulps * ULP * scale + (2.0**-8 * wanted.abs() if dtype == BF16 else 0)
    off = ((found.double() - wanted).abs() - near).max().item() if found.numel() else 0.0
    assert off <= 1e-35


@pytest.mark.parametrize("n", WIDTHS)
def test_rms_norm(n: int) -> None:
    weight = random(n, seed=1)
    for rows, kind, dtype in product(ROWS, TYPES, TYPES):
        x = random(rows, n, dtype=kind)
        wide = x.double()
        wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        check(row_ops.rms_norm(x, weight, 1e-5, dtype), wanted, dtype, 4)


def test_rms_norm_of_short_rows() -> None:
    """Many rows in a piece, the last piece not full: heads that are normed one by one."""
    x, weight = random(2, 77, 9, 64, dtype=BF16), random(64, seed=1)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    check(row_ops.rms_norm(x, weight, 1e-6, BF16), wanted, BF16, 4)


@pytest.mark.parametrize(("D", "R"), [(8, 8), (64, 64), (80, 80), (80, 32), (64, 6), (64, 2), (8, 0)])
def test_rotate(D: int, R: int) -> None:
    frequency = 1.0 / 10_000.0 ** (torch.arange(0, R, 2) / max(R, 1))
    for B, T, H, kind, dtype in product((1, 3), (0, 1, 17), (1, 9), TYPES, TYPES):
        cos, sin = rope.angles(RopeSpec(frequency), torch.arange(T) + 5, F32)
        x = random(B, T, H, D, dtype=kind)
        wide, c, s = x.double(), cos.double(), sin.double()
        size = rope.rotate(wide.abs(), c.abs(), s.abs()).abs() + wide.abs()
        check(row_ops.rotate(x, cos, sin, dtype), rope.rotate(wide, c, s), dtype, 2, size)
        kept = row_ops.rotate(x, cos, sin, kind)[..., R:]
        assert torch.equal(kept, x[..., R:])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name: Activation) -> None:
    for n, rows, kinds, dtype in product(WIDTHS, (0, 1, 3), product(TYPES, TYPES), TYPES):
        gate, up = random(rows, n, dtype=kinds[0]), random(rows, n, dtype=kinds[1], seed=1)
        f = ACTIVATIONS[name](gate.double())
        scale = f.abs() if name in ("silu", "relu") else gate.double().abs()
        check(row_ops.gated(name, gate, up, dtype), f * up.double(), dtype, 4, scale * up.double().abs())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_far_out(name: Activation) -> None:
    gate = torch.tensor([200.0, -200.0, 1e4, -1e4, 0.0, -0.0, torch.nan, torch.inf] * 3)
    for kind, dtype in product(TYPES, TYPES):
        found = row_ops.gated(name, gate.to(kind), torch.full_like(gate, 2.0), dtype)
        wanted = torch.where(gate > 0, 2 * gate.to(kind).to(dtype), torch.where(gate.isnan(), gate, 0.0).to(dtype))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("n", WIDTHS)
def test_added(n: int) -> None:
    for rows, kinds, dtype in product(ROWS, product(TYPES, TYPES), TYPES):
        x, y = random(rows, n, dtype=kinds[0]), random(rows, n, dtype=kinds[1], seed=1)
        assert torch.equal(row_ops.added(x, y, dtype), (x.float() + y.float()).to(dtype))


def test_rounding_to_bf16() -> None:
    """Every upper half of a float, with lower halves around the tie; both in vectors and behind them."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    bits = (upper[:, None] | lower).view(-1)
    x = bits.view(F32)
    wanted = ((bits.long() & 0xFFFFFFFF) + 0x7FFF + (bits >> 16 & 1)) >> 16
    wanted = torch.where(x.isnan(), 0x7FC0, wanted & 0xFFFF).to(torch.int32)

    def rounded(x: Tensor) -> Tensor:  # without a sum on the way: it would make signalling NaN quiet, and 0 of -0
        cos = torch.zeros(len(x), 1, 0)
        return row_ops.rotate(x[:, None], cos, cos, BF16)[:, 0].view(torch.int16).int() & 0xFFFF

    assert torch.equal(rounded(x.view(-1, 4096)).view(-1), wanted)
    for n in (1, 3, 7, 15):
        rows = len(x) // n
        assert torch.equal(rounded(x[: rows * n].view(rows, n)).view(-1), wanted[: rows * n])


def test_widening_of_bf16() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    x = bits.to(torch.int16).view(BF16)
    for n in (4096, 1, 7, 15):
        rows = len(x) // n
        some, cos = x[: rows * n].view(rows, 1, n), torch.zeros(rows, 1, 0)
        found = row_ops.rotate(some, cos, cos, F32).view(-1)
        assert torch.equal(found.view(torch.int32), bits[: rows * n] << 16)


def test_nan_stays_in_its_row() -> None:
    x = random(5, 40)
    x[2, 17] = torch.nan
    y = row_ops.rms_norm(x, torch.ones(40), 1e-5, BF16)
    assert y[2].isnan().all()
    assert not y[[0, 1, 3, 4]].isnan().any()
    assert torch.equal(row_ops.added(x, x, BF16).isnan(), x.isnan())
    cos = torch.ones(5, 1, 40)
    turned = row_ops.rotate(x[:, None], cos, cos, BF16)[:, 0].isnan()
    assert turned.nonzero().tolist() == [[2, 17], [2, 37]]


@pytest.mark.parametrize("dtype", TYPES)
def test_views(dtype: torch.dtype) -> None:
    """Inputs that are not contiguous, or that have a gradient."""
    x, other = random(6, 40, 30, dtype=dtype), random(40, 30, 6, dtype=dtype)
    swapped, weight, cos = x.transpose(0, 1), random(60)[::2], random(40, 30)[:, None, ::2]
    plain, even = swapped.contiguous(), cos.contiguous()
    assert torch.equal(
        row_ops.rms_norm(swapped, weight, 1e-5, BF16), row_ops.rms_norm(plain, weight.clone(), 1e-5, BF16)
    )
    turned = row_ops.rotate(swapped, cos[..., :14], cos[..., :14], F32)
    assert torch.equal(turned, row_ops.rotate(plain, even[..., :14], even[..., :14], F32))
    y = other.permute(0, 2, 1).requires_grad_()
    assert torch.equal(row_ops.gated("silu", swapped, y, F32), row_ops.gated("silu", plain, y.detach(), F32))
    assert torch.equal(row_ops.added(swapped, y, F32), plain.float() + y.detach().float())
    assert not row_ops.added(swapped, y, F32).requires_grad
    one = row_ops.added(plain[0, 0, 0], plain[0, 0, 1], F32)
    assert torch.equal(one, plain[0, 0, 0].float() + plain[0, 0, 1].float())


@pytest.mark.parametrize("dtype", TYPES)
def test_threads(dtype: torch.dtype) -> None:
    x, up, weight = random(7, 61, 99, dtype=dtype), random(7, 61, 99, dtype=BF16, seed=1), random(99)
    cos, sin = rope.angles(RopeSpec(0.5 ** torch.arange(22)), torch.arange(7), F32)

    def results() -> list[Tensor]:
        gates = [row_ops.gated(name, x, up, F32) for name in ACTIVATIONS]
        return [
            row_ops.rms_norm(x, weight, 1e-5, BF16),
            row_ops.rotate(x, cos, sin, BF16),
            row_ops.added(x, up, F32),
            *gates,
        ]

    found = []
    for threads in (1, 2, 3):
        _core.set_threads(threads)
        found.append(results())
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_errors() -> None:
    x, half, weight = torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 6, 8).half(), torch.ones(8)
    cos = torch.ones(4, 1, 8)
    with pytest.raises(ValueError, match=r"x must be f32 or bf16 on the CPU, got torch.float16 on cpu"):
        row_ops.rms_norm(half, weight, 1e-5, F32)
    with pytest.raises(ValueError, match=r"x must be f32 or bf16 on the CPU, got torch.float32 on meta"):
        row_ops.rms_norm(x.to("meta"), weight, 1e-5, F32)
    with pytest.raises(ValueError, match=r"x must be \[..., n\], got a single number"):
        row_ops.rms_norm(torch.tensor(1.0), weight, 1e-5, F32)
    with pytest.raises(ValueError, match=r"weight must be f32 \[8\], got torch.float32 \[7\]"):
        row_ops.rms_norm(x, weight[:7], 1e-5, F32)
    with pytest.raises(ValueError, match=r"weight must be f32 \[8\], got torch.bfloat16 \[8\]"):
        row_ops.rms_norm(x, weight.bfloat16(), 1e-5, F32)
    with pytest.raises(ValueError, match=r"the result can be f32 or bf16, not torch.float16"):
        row_ops.rms_norm(x, weight, 1e-5, torch.float16)
    with pytest.raises(ValueError, match=r"x must be \[..., T, H, D\], got \[6, 8\]"):
        row_ops.rotate(x[0, 0], cos, cos, F32)
    with pytest.raises(ValueError, match=r"cos must be f32 \[4, 1, 8\], got torch.float32 \[3, 1, 8\]"):
        row_ops.rotate(x, cos[:3], cos, F32)
    with pytest.raises(ValueError, match=r"sin must be f32 \[4, 1, 8\], got torch.float32 \[4, 1, 6\]"):
        row_ops.rotate(x, cos, cos[..., :6], F32)
    with pytest.raises(ValueError, match=r"an even number of channels up to the 8 of x, got 7"):
        row_ops.rotate(x, cos[..., :7], cos[..., :7], F32)
    with pytest.raises(ValueError, match=r"an even number of channels up to the 6 of x, got 8"):
        row_ops.rotate(x[..., :6], cos, cos, F32)
    with pytest.raises(ValueError, match=r"up must be f32 or bf16"):
        row_ops.gated("silu", x, half, F32)
    with pytest.raises(ValueError, match=r"gate and up must have one shape, got \[2, 4, 6, 8\] and \[4, 6, 8\]"):
        row_ops.gated("silu", x, x[0], F32)
    with pytest.raises(ValueError, match=r"there is no activation 'tanh'"):
        row_ops.gated("tanh", x, x, F32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x and y must have one shape"):
        row_ops.added(x, x[..., :7], F32)
    with pytest.raises(ValueError, match=r"y must be f32 or bf16"):
        row_ops.added(x, x.int(), F32)
