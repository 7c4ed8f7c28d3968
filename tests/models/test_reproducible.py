"""Attention's backward pass in a fixed order: only that node runs with torch's setting, and gradients stay the same."""

import pytest
import torch
from torch import Tensor

from crelle.kernels.reference_attention import AttendOptions
from crelle.models.cache import attention
from crelle.models.reproducible import fix_backward_order


def inputs(device: str = "cpu", T: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = [(2, T, 4, 64), (2, 2, T, 64), (2, 2, T, 64)]  # q [B, T, H, D], k and v [B, Hkv, T, D]
    return [torch.randn(s, generator=random).to(device, dtype).requires_grad_() for s in shapes]


def gradients(given: list[Tensor], fixed: bool) -> list[Tensor]:
    y = attention(*given)
    if fixed:
        fix_backward_order(y)
    return list(torch.autograd.grad(y, given, torch.ones_like(y)))


def test_only_the_backward_pass_of_attention_is_strict() -> None:
    modes: list[int] = []

    def note(gradient: Tensor) -> None:
        modes.append(torch.get_deterministic_debug_mode())

    q, k, v = inputs()
    doubled = 2 * q
    y = attention(doubled, k, v)
    fix_backward_order(y)
    node = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda _: note(q))  # type: ignore[union-attr]
    y.register_hook(note)
    doubled.register_hook(note)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert modes == [0, 2, 0]
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_gradients_are_the_same() -> None:
    for plain, fixed in zip(gradients(inputs(), False), gradients(inputs(), True), strict=True):
        assert torch.equal(plain, fixed)


def test_attention_in_plain_products_and_without_a_graph_is_left_alone() -> None:
    q, k, v = inputs()
    capped = attention(q, k, v, AttendOptions(softcap=5.0))
    fix_backward_order(capped)
    capped.sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        fix_backward_order(attention(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_on_a_gpu_are_the_same_in_every_run(dtype: torch.dtype) -> None:
    one = torch.ones(1, device="cuda", requires_grad=True)
    torch.autograd.grad(one.exp(), one)  # torch warns where the first that a backward pass does is a product
    given = inputs("cuda", T=1024, dtype=dtype)
    first, *others = (gradients(given, True) for _ in range(10))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
