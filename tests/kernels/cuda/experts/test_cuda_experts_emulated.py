"""The kernels of mixtures of experts run on the CPU, thread by thread: what they compute, without a GPU."""

import expert_cases
import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from plane_weights import TOLERANCE, relative
from torch import Tensor

from crelle.kernels.cuda.experts import products
from crelle.kernels.cuda.planes.weight_layout import ScaleKind

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF, BF16 = torch.float16, torch.bfloat16
KINDS = [
    (ScaleKind.UNIFORM, 4, 128, HALF),
    (ScaleKind.BCQ, 2, 128, BF16),
    (ScaleKind.BCQ_SYMMETRIC, 3, 64, HALF),
    (ScaleKind.AFFINE, 4, 32, BF16),
    (ScaleKind.UNIFORM_SYMMETRIC, 4, 256, HALF),
]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "load", EmulatedKernel)
    monkeypatch.setattr(products, "multiprocessors", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def few(case: expert_cases.Case, x: Tensor, logits: Tensor, **options: Tensor) -> Tensor:
    return products.down(products.up(x, logits, case.experts), logits, case.experts, **options)


def many(case: expert_cases.Case, x: Tensor, logits: Tensor, tokens: int, residual: Tensor | None = None) -> Tensor:
    e = case.experts
    chosen, weights = products.route(logits, e)
    slots = products.sort(chosen, e, tokens)
    return products.combine(products.grouped_down(products.grouped_up(x, slots, e), slots, e), weights, residual)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "P", "group", "dtype"), KINDS)
@pytest.mark.parametrize("grouped", [False, True], ids=["gemv", "gemm"])
@pytest.mark.parametrize("normalize", [True, False])
def test_chosen_experts_match_oracle(
    kind: ScaleKind, P: int, group: int, dtype: torch.dtype, grouped: bool, normalize: bool
) -> None:
    torch.manual_seed(P)
    options = {"count": 5, "top": 3, "width": 264, "inner": 40, "normalize": normalize, "bias": grouped}
    case = expert_cases.make(kind, P, group, dtype=dtype, **options)  # type: ignore[arg-type]
    x, logits = torch.randn(5, 264).to(dtype), torch.randn(5, 5)
    y = many(case, x, logits, 8) if grouped else few(case, x, logits)
    assert relative(y, expert_cases.oracle(case, x, logits, 3, normalize)) < 2 * TOLERANCE[dtype]
