"""Weights of training on their grids in one kernel each way, against torch: in the emulator, and (gpu) on a device."""

import pytest
import torch
from solver_cases import device_fixture
from torch import Tensor

from crelle.kernels.cuda.training import straight_through as kernels
from crelle.quantizers.training.ste_base import OnGrid, on_grid, on_own_grid, stored_grid

device = device_fixture(kernels)
USABLE = kernels.usable
SHAPES = [(1, 1, 1), (3, 2, 8), (5, 3, 16), (2, 2, 64), (3, 1, 100), (2, 3, 7), (1, 1, 257), (33, 4, 128)]
TOP = 7


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr(kernels, "usable", lambda *_: True)


def weights(N: int, C: int, G: int, device: str) -> list[Tensor]:
    """Return w, step, scale and low, the last two in steps: some weights are beyond the grid, one scale vanishes."""
    chance = torch.Generator().manual_seed(N * C * G)
    w = torch.randn(N, C, G, generator=chance) * 3
    step = torch.rand(N, C, 1, generator=chance) * 0.02 + 1e-3
    scale = 1 + 0.2 * torch.randn(N, C, 1, generator=chance)
    scale[0, -1] = 1e-9
    low = -3.5 + 0.3 * torch.randn(N, C, 1, generator=chance)
    return [t.to(device) for t in (w, step, scale, low)]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def compared(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        size = float(theirs.grad.abs().max())
        assert float((mine.grad - theirs.grad).abs().max()) <= 1e-5 * size + 1e-12


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_torch_computes_it(shape: tuple[int, int, int], device: str) -> None:
    w, step, scale, low = weights(*shape, device)
    given, reference = leaves(w, scale, low), leaves(w, scale, low)
    found = on_own_grid(given[0], step, given[1], given[2], TOP)
    wanted = OnGrid.apply(reference[0], step, *stored_grid(step, reference[1], reference[2]), TOP)  # type: ignore[no-untyped-call]
    assert torch.equal(found, wanted)
    by = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    found.backward(by)  # type: ignore[no-untyped-call]
    wanted.backward(by)
    compared(given, reference)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grids_as_they_are(shape: tuple[int, int, int], device: str) -> None:
    w, step, scale, low = weights(*shape, device)
    scale, low = stored_grid(step, scale, low)
    given, reference = leaves(w, scale, low), leaves(w, scale, low)
    found = on_grid(given[0], step, given[1], given[2], TOP)
    wanted = OnGrid.apply(reference[0], step, reference[1], reference[2], TOP)  # type: ignore[no-untyped-call]
    assert torch.equal(found, wanted)
    by = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)
    found.backward(by)  # type: ignore[no-untyped-call]
    wanted.backward(by)
    compared(given, reference)


def test_groups_that_are_part_of_longer_rows(device: str) -> None:
    w, step, scale, low = weights(4, 5, 16, device)
    scale, low = stored_grid(step, scale, low)
    for at in (slice(0, 2), slice(2, 5), slice(1, 4)):
        given, reference = leaves(w, scale, low), leaves(w, scale, low)
        for leaf, by in ((given, on_grid), (reference, OnGrid.apply)):
            found = by(leaf[0][:, at], step[:, at], leaf[1][:, at], leaf[2][:, at], 3)
            found.backward(torch.ones_like(found))  # type: ignore[no-untyped-call]
        compared(given, reference)


def test_values_in_the_dtype_of_products(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, step, scale, low = weights(3, 4, 32, device)
    wide = on_own_grid(w, step, scale, low, TOP)
    leaf = leaves(w)[0]
    with torch.autocast(device, torch.bfloat16):
        found = on_own_grid(leaf, step, scale, low, TOP)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wide.bfloat16())
    found.backward(torch.ones_like(found))  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
    assert leaf.grad.any()


def test_a_scale_at_its_least_does_not_train(device: str) -> None:
    w, step, scale, low = weights(2, 2, 16, device)
    leaf = leaves(scale)[0]
    on_own_grid(w, step, leaf, low, TOP).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad[0, -1] == 0
    assert leaf.grad.count_nonzero() == leaf.numel() - 1


def test_nan_is_not_hidden(device: str) -> None:
    w, step, scale, low = weights(2, 2, 16, device)
    w[1, 0, 3] = float("nan")
    assert on_own_grid(w, step, scale, low, TOP).isnan().nonzero().tolist() == [[1, 0, 3]]


@pytest.mark.gpu
def test_used_by_trained_weights() -> None:
    assert USABLE(torch.zeros(1, 1, 8, device="cuda"))
    assert not USABLE(torch.zeros(1, 1, 8))
