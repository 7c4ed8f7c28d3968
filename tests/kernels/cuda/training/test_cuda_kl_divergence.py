"""The divergence of two models in one kernel, against f64: in the emulator, and (gpu) on a device."""

import pytest
import torch
from solver_cases import device_fixture

from crelle.kernels import cuda
from crelle.kernels.cuda.training import kl_divergence as kernels
from crelle.quantizers.training.divergence import kl_divergence

pytestmark = pytest.mark.sample(2)

device = device_fixture(kernels)
USABLE = kernels.usable
SHAPES = [(1, 1), (3, 7), (2, 256), (3, 1000), (2, 2048 + 8), (5, 4099)]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr(kernels, "usable", lambda *_: True)


def logits(M: int, V: int, dtype: torch.dtype, device: str, size: float = 4.0) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(M * V)
    theirs = torch.randn(M, V, generator=chance) * size
    return [t.to(device, dtype) for t in (theirs + torch.randn(M, V, generator=chance) * 0.3, theirs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("M", "V"), SHAPES)
def test_divergence_and_its_gradient(M: int, V: int, dtype: torch.dtype, device: str) -> None:
    mine, theirs = logits(M, V, dtype, device)
    mine.requires_grad_()
    found = kl_divergence(mine, theirs)
    (found * 0.5).backward()  # type: ignore[no-untyped-call]
    wide = mine.detach().double().requires_grad_()
    p = theirs.double().softmax(-1)
    wanted = (p * (theirs.double().log_softmax(-1) - wide.log_softmax(-1))).sum()
    (wanted * 0.5).backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    assert wide.grad is not None
    assert abs(float(found.detach()) - float(wanted.detach())) < 1e-4 * M
    rounding = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert mine.grad.dtype == dtype
    off = (mine.grad.double() - wide.grad).abs()
    # Below the smallest normal f16 what is left are steps of 2^-24.
    assert (off <= rounding * wide.grad.abs() + 2e-7).all()


def test_logits_far_apart_and_far_from_zero(device: str) -> None:
    mine, theirs = logits(4, 600, torch.float32, device, size=40.0)
    for shift in (-1e4, 0.0, 1e4):
        found = kl_divergence(mine + shift, theirs - shift)
        wanted = kl_of(mine + shift, theirs - shift)
        assert float(found) == pytest.approx(wanted, rel=1e-3, abs=1e-2 if shift else 1e-3)


def kl_of(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    a, b = mine.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return float((b.exp() * (b - a)).sum())


def test_equal_models_do_not_diverge(device: str) -> None:
    _, theirs = logits(3, 1000, torch.bfloat16, device)
    mine = theirs.clone().requires_grad_()
    found = kl_divergence(mine, theirs)
    found.backward()  # type: ignore[no-untyped-call]
    assert abs(float(found.detach())) < 1e-5
    assert mine.grad is not None
    assert not mine.grad.any()


def test_nan_is_not_hidden(device: str) -> None:
    mine, theirs = logits(3, 1000, torch.bfloat16, device)
    mine[1, 17] = float("nan")
    each, _, _ = kernels.divergences(mine, theirs)
    assert each.isnan().tolist() == [False, True, False]


@pytest.mark.gpu
def test_what_cannot_be_compared_is_left_to_torch() -> None:
    assert cuda.available() is None
    here = torch.zeros(2, 8, device="cuda")
    assert USABLE(here, here)
    assert not USABLE(here, here.half())
    assert not USABLE(here.double(), here.double())
    assert not USABLE(here.cpu(), here.cpu())
