"""Attention over whole sequences in f32 against f64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crelle.kernels import cpu
from crelle.kernels.cpu import f32_attention

if (reason := cpu.available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture(params=["generic", "avx2", "avx512", "neon"], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    core = cpu.core()
    if request.param not in core.isas():
        pytest.skip(f"needs {request.param}")
    before = core.isa()
    core.set_isa(request.param)
    yield
    core.set_isa(before)


def inputs(B: int, T: int, H: int, Hkv: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(B, T, n, D, generator=chance) for n in (H, Hkv, Hkv))
    return 2 * q, k, v


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    T, R = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.double().repeat_interleave(R, 2), v.double().repeat_interleave(R, 2)
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) * q.shape[-1] ** -0.5
    age = torch.arange(T)[:, None] - torch.arange(T)
    seen = (age >= 0) & (age < (window or T))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 16), (2, 50, 6, 2, 32), (1, 130, 3, 3, 48)])
def test_attention_matches_f64(shape: tuple[int, int, int, int, int], window: int | None) -> None:
    q, k, v = inputs(*shape)
    found = f32_attention.causal_attention(q, k, v, window)
    torch.testing.assert_close(found.double(), reference(q, k, v, window), rtol=0, atol=5e-6)


def test_a_sequence_has_the_same_bits_in_any_batch_and_on_any_number_of_threads() -> None:
    q, k, v = inputs(3, 70, 4, 2, 32)
    cpu.core().set_threads(1)
    wanted = f32_attention.causal_attention(q, k, v)
    assert torch.equal(f32_attention.causal_attention(q[1:2], k[1:2], v[1:2])[0], wanted[1])
    cpu.core().set_threads(3)
    assert torch.equal(f32_attention.causal_attention(q, k, v), wanted)


def test_what_is_not_finite_reaches_only_tokens_that_see_it() -> None:
    q, k, v = inputs(1, 70, 2, 1, 32)
    wanted = f32_attention.causal_attention(q, k, v)
    v[0, 40, 0, 3] = torch.nan
    found = f32_attention.causal_attention(q, k, v)
    assert torch.equal(found[:, :40], wanted[:, :40])
    assert found[:, 40:, :, 3].isnan().all()


def test_wrong_shapes_are_refused() -> None:
    q, k, v = inputs(1, 5, 3, 2, 32)
    assert not f32_attention.supports(q, k)
    with pytest.raises(ValueError, match="multiple of those of k"):
        f32_attention.causal_attention(q, k, v)
    with pytest.raises(ValueError, match="k and v must be alike"):
        f32_attention.causal_attention(q, k[:, :, :1], v)
