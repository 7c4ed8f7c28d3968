"""Two to four tokens: x in base 3, and what comes of inputs that are hard to round. bitserial.cuh has the layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plane_weights import TOLERANCE, random_weight, relative
from torch import Tensor

from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out
from crelle.kernels.reference import matmul_fp64

MOST, LEAST = 2186, -4374
WORTH = [3**i for i in range(7)] + [-(3**7)]


def digits_of_3(q: int) -> int:
    """As bitserial.cuh makes them, in 32 bits."""
    u = q - LEAST
    v = u + (u * 6473 >> 19) * (0x10000 - 81)
    third, ninth, last = v * 171 >> 9 & 0x3F003F, v * 57 >> 9 & 0xF000F, v * 19 >> 9 & 0x30003
    assert max(u * 6473, v * 171) < 1 << 32
    pairs = v + third + 4 * ninth + 16 * last
    both = pairs + (pairs >> 1 & 0x550055)
    return (both | both >> 8) & 0xFFFF ^ 0xC000


@given(st.integers(LEAST, MOST))
def test_eight_digits_of_base_three_hold_the_integer(q: int) -> None:
    bits = digits_of_3(q)
    assert 0 <= bits < 1 << 16
    assert sum((bits >> 2 * i & 3).bit_count() * worth for i, worth in enumerate(WORTH)) == q


def values_in(x: BitSerialX, parts: int) -> Tensor:
    """Read x f64 [tokens, 256 blocks] back out of its digits in base 3, by the description of their layout alone."""
    halves, M = x.bits.shape[0], x.bits.shape[2]
    L = 4 // M  # pairs of columns of a token
    words = x.bits.cpu().view(halves, max(1, M // 2), 32, min(2, M), 2).long()  # half, pair, lane, instruction, bit
    q = torch.zeros(M, halves * 128, dtype=torch.long)
    for lane in range(32):
        (g, t), (m, pair) = divmod(lane, 4), divmod(lane // 8, L)
        for instruction in range(M):
            for bit in range(2):
                word = words[:, instruction // 2, lane, instruction % 2, bit]
                for j in range(32):
                    worth = WORTH[8 // L * pair + 2 * instruction + g % 2]
                    q[m, 32 * t + j :: 128] += worth * (word >> j & 1)
    scale = x.scale.cpu().double()  # [halves, M, 1 + parts]
    sums = q.view(M, halves, parts, -1).sum(-1).permute(1, 0, 2).double() * 2.0**-42
    assert torch.equal(scale[:, : x.tokens, 1:], sums[:, : x.tokens])
    return (q * scale[:, :, 0].T.repeat_interleave(128, 1))[: x.tokens]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "group"), [(1, 64), (1, 32), (2, 128), (3, 128), (4, 128), (4, 64), (2, 32), (4, 256)]
)
def test_digits_are_x_rounded(tokens: int, group: int) -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 2, 16, 1000, group, device="cuda"))
    x = torch.randn(tokens, 1000, device="cuda", dtype=torch.float16)
    x[0, 128:256].abs_()
    x[0, 256:384].abs_().neg_()
    x[0, 384:512] = 0
    x[0, 512] = 3000
    digits = bmma_gemv.encode(x, w)
    plain = torch.nn.functional.pad(x.double().cpu(), (0, 24))
    error = (values_in(digits, bmma_gemv.parts(w)) - plain).abs().view(tokens, 8, 128)
    near, far = plain.view(tokens, 8, 128).clamp(min=0).amax(-1), plain.view(tokens, 8, 128).clamp(max=0).neg().amax(-1)
    step = torch.maximum(torch.maximum(near, far) / -LEAST, torch.minimum(near, far) / MOST)
    assert bool((error <= step[..., None] * 0.502).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 3, 4])
@pytest.mark.parametrize("hard", ["gauss", "laplace", "outlier", "many outliers", "gated", "positive"])
def test_inputs_that_are_hard_to_round(hard: str, tokens: int) -> None:
    w = random_weight(ScaleKind.BCQ, 3, 512, 2048, 128, device="cuda")
    x = torch.randn(tokens, 2048, device="cuda")
    match hard:
        case "laplace":
            x *= torch.randn_like(x).abs() + 0.1
        case "outlier":
            x[:, 5] = 1000
        case "many outliers":
            x[:, ::128] *= 100
        case "gated":
            x = torch.nn.functional.silu(x) * torch.randn_like(x)
        case "positive":
            x.relu_()
    x, prepared = x.half(), lay_out(w)
    out = torch.full((tokens, 512), torch.nan, device="cuda", dtype=torch.float16)
    bmma_gemv.product(bmma_gemv.encode(x, prepared), prepared, torch.float16, out=out)
    assert relative(out, matmul_fp64(x, w)) < TOLERANCE[torch.float16]
    again = bmma_gemv.product(bmma_gemv.encode(x, prepared), prepared, torch.float16)
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 4])
def test_a_token_does_not_see_the_others(tokens: int) -> None:
    w = random_weight(ScaleKind.UNIFORM, 4, 100, 700, 128, device="cuda")
    x, prepared = torch.randn(tokens, 700, device="cuda", dtype=torch.float16), lay_out(w)
    whole = bmma_gemv.product(bmma_gemv.encode(x, prepared), prepared, torch.float16)
    for m in range(tokens):
        other = torch.randn_like(x) * 1000
        other[m] = x[m]
        assert torch.equal(bmma_gemv.product(bmma_gemv.encode(other, prepared), prepared, torch.float16)[m], whole[m])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(ScaleKind))
def test_eight_planes_of_four_tokens_stay_finite(kind: ScaleKind) -> None:
    w = random_weight(kind, 8, 64, 512, 128, device="cuda")
    x = torch.randn(4, 512, device="cuda", dtype=torch.float16)
    prepared = lay_out(w)
    y = bmma_gemv.product(bmma_gemv.encode(x, prepared), prepared, torch.float16)
    assert relative(y, matmul_fp64(x, w)) < TOLERANCE[torch.float16]
