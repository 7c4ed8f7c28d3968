"""Hadamard matrices of known orders: rows are orthogonal, products are those of the matrix, orders that there are."""

import pytest
import torch

from crelle.formats.wrappers.hadamard import (
    MOST_CHANNELS,
    MOST_PALEY,
    block_size,
    hadamard_blocks,
    known_orders,
    paley_matrix,
    paley_order,
)

# Multiples of 4 up to 128 that no Paley matrix of a prime, doubled or not, has.
MISSING = (52, 92, 100, 116)


def matrix(order: int) -> torch.Tensor:
    """P ⊗ S by definition, entries ±1."""
    p = paley_order(order)
    assert p is not None
    S = torch.ones(1, 1, dtype=torch.int64)
    while len(S) * p < order:
        S = torch.kron(torch.tensor([[1, 1], [1, -1]]), S)
    return torch.kron(paley_matrix(p).long(), S)


def test_every_paley_matrix_is_a_hadamard_matrix() -> None:
    orders = [p for p in range(1, MOST_PALEY + 1) if paley_order(p) == p]
    assert {1, 12, 20, 28, 36, 44, 60} <= set(orders)
    for p in orders:
        P = paley_matrix(p).long()
        assert torch.equal(P.abs(), torch.ones_like(P))
        assert torch.equal(P @ P.T, p * torch.eye(p, dtype=torch.int64)), p
        assert torch.equal(P, P.T), "and so its own inverse"


def test_all_multiples_of_four_but_some_have_one() -> None:
    assert [n for n in range(4, 129, 4) if paley_order(n) is None] == list(MISSING)
    assert all(paley_order(n) is None for n in (-4, 0, 3, 6, 9, 18, 11008, 172))
    assert all(paley_order(1 << k) == 1 for k in range(16))
    assert [paley_order(n) for n in (576, 1536, 5120, 14336, 896)] == [36, 12, 20, 28, 28]
    with pytest.raises(ValueError, match="order 52"):
        paley_matrix(52)


@pytest.mark.parametrize("order", [1, 2, 12, 24, 40, 56, 72, 144, 576])
def test_products_are_those_of_the_matrix(order: int) -> None:
    x = torch.randn(3, 2 * order, dtype=torch.float64, generator=torch.Generator().manual_seed(order))
    H = matrix(order).double() / order**0.5
    assert torch.allclose(H @ H.T, torch.eye(order, dtype=torch.float64), atol=1e-12)
    wanted = (x.view(3, 2, order) @ H.T).flatten(1)
    y = hadamard_blocks(x, order)
    assert torch.allclose(y, wanted, atol=1e-12)
    assert torch.allclose(hadamard_blocks(y, order), x, atol=1e-12), "its own inverse"
    assert torch.equal(hadamard_blocks(x[1:2], order), y[1:2]), "a row's bits depend on nothing else"


def test_nothing_is_left_as_it_is() -> None:
    assert hadamard_blocks(torch.empty(3, 0)).shape == (3, 0)
    x = torch.randn(3, 7)
    assert torch.equal(hadamard_blocks(x), x), "blocks of one channel"


def test_known_orders_divide_and_ascend() -> None:
    for channels in (1, 7, 96, 288, 576, 1536, 11008, 49152):
        found = known_orders(channels)
        assert found == sorted(found)
        assert found[-1] >= min(block_size(channels), MOST_CHANNELS)
        assert all(channels % n == 0 and paley_order(n) is not None for n in found)
    assert known_orders(576)[-1] == 576
    assert known_orders(11008)[-1] == 256, "no matrix of order 172 or 344 is made"
