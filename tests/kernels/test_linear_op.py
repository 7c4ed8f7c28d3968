"""`crelle::linear`: the numbers of ops.matmul, under torch.compile too; a weight that is gone gets a sentence."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from crelle.errors import UnsupportedError
from crelle.kernels import linear_op, ops  # defines crelle::linear
from crelle.kernels.base import Prepared
from crelle.kernels.eager import is_eager
from crelle.kernels.handles import number
from crelle.quantizers.schemes.rtn import RTN


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


class _Lazy(linear_op.LazyWeight):
    def __init__(self) -> None:
        self.asked = list[tuple[str, bool]]()
        self.made: Prepared | None = None

    def prepared(self, x: Tensor) -> Prepared:
        self.asked.append((x.device.type, torch.compiler.is_compiling()))
        self.made = self.made or _prepared()
        return self.made

    def dequantized(self, x: Tensor) -> Tensor:
        return torch.ones(24, 64, dtype=x.dtype)


def test_lazy_weight_is_prepared_before_a_compiled_graph_runs() -> None:
    """A CUDA graph owns what is allocated in its first run: the weight must be there before."""
    w = _Lazy()
    n = number(w)
    ran = list[Prepared | None]()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        def run(*args: Tensor) -> object:
            ran.append(w.made)
            return graph(*args)

        return run

    x = torch.randn(2, 64)
    y = torch.compile(lambda x: torch.ops.crelle.linear(x, n, 24), fullgraph=True, backend=backend)(x)
    assert ran == [w.made]
    assert w.made is not None
    assert torch.equal(y, ops.matmul(x, w.made))


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        return func(*args, **(kwargs or {}))  # type: ignore[operator,misc]


def test_the_op_is_skipped_only_where_nobody_looks() -> None:
    x, seen = torch.randn(2, 4), list[bool]()
    assert is_eager(x)
    assert not is_eager(x.clone().requires_grad_())
    with torch.no_grad():
        assert is_eager(x.clone().requires_grad_())
    with FakeTensorMode() as mode:
        assert not is_eager(mode.from_tensor(x))
    with _Watch():
        assert not is_eager(x)
    with pytest.warns(DeprecationWarning, match="trace"):
        torch.jit.trace(lambda x: seen.append(is_eager(x)) or x + 1, x, check_trace=False)  # type: ignore[func-returns-value]
    assert seen[0] is False
    compiled = torch.compile(lambda x: x + 1 if is_eager(x) else x - 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), x - 1)


def test_a_gradient_through_a_kernels_layout_is_refused() -> None:
    n = number(w := _prepared())
    assert w is not None
    x = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="has no gradient"):
        torch.ops.crelle.linear(x, n, 24).sum().backward()
