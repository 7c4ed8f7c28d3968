"""What the tests of the solvers' kernels share: where they run, problems, and the reference in torch."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from torch import Tensor

from crelle.kernels import cpu

T = TypeVar("T")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")),  # in the emulator
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SIZES = [(1, 1), (1, 16), (32, 64), (37, 50), (65, 131), (40, 600)]  # rows, columns


def device_fixture(kernels: ModuleType) -> Any:
    """Return a fixture that says where the kernels of a module run: on a CPU in the emulator."""

    @pytest.fixture(params=DEVICES)
    def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        name = str(request.param)
        if name == "cpu":
            monkeypatch.setattr(kernels, "load", EmulatedKernel)
        return name

    return device


def hessian_of(K: int) -> Tensor:
    chance = torch.Generator().manual_seed(K)
    x = torch.randn(3 * K + 8, K, generator=chance)
    x = x @ (torch.eye(K) + torch.randn(K, K, generator=chance) / K**0.5)
    return x.T @ x / len(x)


def in_torch(call: Callable[..., T], *args: object) -> T:
    """Call the reference, not C++."""
    with mock.patch.object(cpu, "available", return_value="is not asked"):
        return call(*args)


def mostly(same: Tensor) -> bool:
    """Whether rows [N] agree: a tie that rounding decides otherwise changes the rest of its row."""
    return float(same.float().mean()) > 0.95 if len(same) > 20 else bool(same.all())
