"""`crelle::linear`: the numbers of ops.matmul, under torch.compile too; a weight that is gone gets a sentence."""

import pytest
import torch

from crelle.errors import UnsupportedError
from crelle.kernels import linear_op, ops  # noqa: F401  # defines crelle::linear
from crelle.kernels.base import Prepared
from crelle.kernels.handles import number
from crelle.quantizers.rtn import RTN


def _prepared(N: int = 24, K: int = 64) -> Prepared:
    return ops.prepare(RTN(bits=4, group=32).fit(torch.randn(N, K)), torch.float32)


def test_equals_matmul() -> None:
    w, x = _prepared(), torch.randn(3, 5, 64)
    assert torch.equal(torch.ops.crelle.linear(x, number(w), 24), ops.matmul(x, w))


def test_two_weights_keep_their_numbers() -> None:
    a, b = _prepared(8), _prepared(16)
    na, nb = number(a), number(b)
    x = torch.randn(2, 64)
    assert torch.equal(torch.ops.crelle.linear(x, nb, 16), ops.matmul(x, b))
    assert torch.equal(torch.ops.crelle.linear(x, na, 8), ops.matmul(x, a))


def test_compiled_without_a_graph_break() -> None:
    w = _prepared()
    n = number(w)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.crelle.linear(x, n, 24).relu()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (1, 7):
        x = torch.randn(rows, 64)
        assert torch.equal(compiled(x), f(x))


def test_weight_that_is_gone() -> None:
    n = number(_prepared())
    with pytest.raises(UnsupportedError, match="is gone"):
        torch.ops.crelle.linear(torch.randn(1, 64), n, 24)


def test_object_that_is_no_weight() -> None:
    thing = {1, 2}
    with pytest.raises(UnsupportedError, match="is a set, which cannot be multiplied by"):
        torch.ops.crelle.linear(torch.randn(1, 64), number(thing), 24)
