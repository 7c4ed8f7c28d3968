"""The kernels of mixtures of experts run on the CPU, thread by thread: what they compute, without a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import expert_cases
import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from plane_weights import TOLERANCE, random_weight, relative
from torch import Tensor

from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.experts import products
from crelle.kernels.cuda.experts.fused import FusedExperts
from crelle.kernels.cuda.experts.weights import supports, supports_weights
from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.weight_layout import CudaWeight, ScaleKind, lay_out
from crelle.kernels.cuda.step.fused_linear import Norm
from crelle.kernels.spec import ExpertsSpec, MlpSpec

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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("count", "top", "rows", "tokens"), [(3, 2, 70, 8), (40, 8, 9, 16), (1, 1, 5, 8), (130, 3, 33, 32)]
)
def test_sorted_slots_are_in_order_and_passes_cover_them(count: int, top: int, rows: int, tokens: int) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, count).round(decimals=1)  # some are equal
    table = torch.arange(count * 9).view(count, 9)
    case = expert_cases.make(ScaleKind.UNIFORM, 2, 256, count=1, top=1, width=8, inner=8)
    e = replace(case.experts, table=table, count=count, top=top)
    chosen, weights = products.route(logits, e)
    experts, shares = expert_cases.choices(logits, top, True)
    assert torch.equal(chosen.long(), experts)
    assert torch.allclose(weights.double(), shares, atol=1e-6)
    slots = products.sort(chosen, e, tokens)
    assert torch.equal(slots.order.long(), chosen.flatten().argsort(stable=True))
    at, found = 0, []
    for words in slots.passes[: int(slots.pass_count)]:
        first, n = int(words[0]) & 0xFFFFFFFF, int(words[0]) >> 32
        assert (first, 0 < n <= tokens) == (at, True)
        here = chosen.flatten()[slots.order[first : first + n].long()]
        assert torch.equal(table[here.long()], words[1:].expand(n, 9))
        at, found = at + n, [*found, int(here[0])]
    assert at == rows * top
    assert len(found) <= slots.passes.shape[0]


def test_a_logit_that_is_not_finite_makes_all_weights_of_its_token_so() -> None:
    case = expert_cases.make(ScaleKind.UNIFORM, 2, 256, count=1, top=1, width=8, inner=8)
    e = replace(case.experts, count=5, top=2)
    logits = torch.randn(4, 5)
    logits[1, 2], logits[2, 0], logits[3, 1] = float("nan"), float("inf"), -float("inf")
    chosen, weights = products.route(logits, e)
    assert weights.isfinite().all(-1).tolist() == [True, False, False, True]
    assert bool(((chosen >= 0) & (chosen < 5)).all())


@pytest.mark.parametrize(("dtype", "kind", "P"), [(HALF, ScaleKind.UNIFORM, 4), (BF16, ScaleKind.AFFINE, 3)])
def test_codes_with_offsets_keep_their_precision(
    dtype: torch.dtype, kind: ScaleKind, P: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets of up to 1024 stay in sums that the tensor cores truncate (offset_codes.cuh)."""
    monkeypatch.setattr(products, "load", lambda *what: EmulatedKernel(*what, truncates=True))
    torch.manual_seed(4)
    case = expert_cases.make(kind, P, 128, count=2, top=2, width=1024, inner=128, dtype=dtype)
    x, logits = (torch.randn(3, 1024) / 8 + 0.1).to(dtype), torch.randn(3, 2)
    assert relative(many(case, x, logits, 8), expert_cases.oracle(case, x, logits, 2, True)) < 2 * TOLERANCE[dtype]


def test_x_of_a_pass_may_stay_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    case = expert_cases.make(ScaleKind.UNIFORM, 4, 128, count=3, top=2, width=520, inner=40)
    x, logits = torch.randn(14, 520).half(), torch.randn(14, 3)
    monkeypatch.setattr(products, "_KEEPS_X", True)
    assert products.gemm_config(case.experts.gate, 8).keeps
    assert relative(many(case, x, logits, 8), expert_cases.oracle(case, x, logits, 2, True)) < 2 * TOLERANCE[HALF]


@pytest.mark.parametrize("activation", ["gelu", "swigluoai"])
def test_activations_match_oracle(activation: str) -> None:
    torch.manual_seed(1)
    case = expert_cases.make(
        ScaleKind.UNIFORM, 4, 128, count=3, top=2, width=256, inner=24, bias=True, activation=activation
    )
    x, logits = torch.randn(3, 256).half(), torch.randn(3, 3)
    wanted = expert_cases.oracle(case, x, logits, 2, True, activation)
    for y in (few(case, x, logits), many(case, x, logits, 8)):
        assert relative(y, wanted) < 2 * TOLERANCE[HALF]


def test_a_slot_has_the_same_bits_in_passes_of_any_size() -> None:
    torch.manual_seed(2)
    case = expert_cases.make(ScaleKind.BCQ, 2, 128, count=3, top=2, width=264, inner=24)
    x, logits = torch.randn(20, 264).half(), torch.randn(20, 3)
    residual = torch.randn(20, 264).half()
    whole = many(case, x, logits, 8, residual)
    assert torch.equal(many(case, x, logits, 16, residual), whole)
    assert torch.equal(
        many(case, x[3:9].contiguous(), logits[3:9].contiguous(), 8, residual[3:9].contiguous()), whole[3:9]
    )


@pytest.mark.parametrize("rows", [6, 20])
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_matches_oracle(rows: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, plain router, experts and the shared one: tokens each by themselves, and sorted."""
    torch.manual_seed(rows)
    for module in (dense, bmma_gemv):
        monkeypatch.setattr(module, "load", EmulatedKernel)
    case = expert_cases.make(ScaleKind.UNIFORM, 4, 128, count=8, top=1, width=256, inner=24)
    spec = MlpSpec(
        inner=24,
        activation="silu",
        gated=True,
        experts=ExpertsSpec(count=8, top=1, normalize=False, shared=24 * shared),
    )

    def linear(w: Tensor | CudaWeight, N: int, K: int) -> SimpleNamespace:
        problem = Problem("", N, K, 4, 128, "cpu", HALF)
        return SimpleNamespace(prepared=Prepared(problem, None, w), bias=None)  # type: ignore[arg-type]

    def mlp(each: dict[str, Tensor | CudaWeight]) -> SimpleNamespace:
        return SimpleNamespace(**{n: linear(w, *((256, 24) if n == "down" else (24, 256))) for n, w in each.items()})

    plain = {n: torch.randn(*((256, 24) if n == "down" else (24, 256))).half() / 8 for n in ("gate", "up", "down")}
    router, gate = torch.randn(8, 256).half() / 16, torch.randn(1, 256).half() / 16
    module = SimpleNamespace(
        router=linear(router, 8, 256),
        shared_gate=linear(gate, 1, 256) if shared else None,
        experts=[mlp({n: w[0] for n, w in each.items()}) for each in case.laid_out],  # type: ignore[attr-defined]
        shared=mlp(plain) if shared else None,
    )
    experts = FusedExperts(module, spec, HALF)
    x, weight = torch.randn(rows, 256).half(), (1 + torch.randn(256) / 8).half()
    h = (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)).half().double() * weight.double()
    wanted = x.double() + expert_cases.oracle(case, h, h @ router.double().T, 1, False)
    if shared:
        inner = torch.nn.functional.silu(h @ plain["gate"].double().T) * (h @ plain["up"].double().T)
        wanted += torch.sigmoid(h @ gate.double().T) * (inner @ plain["down"].double().T)
    assert experts.takes_few(rows) == (rows == 6)
    for invariant in (False, True):
        y = experts(x, Norm(weight, None, 1e-5), x, invariant)
        assert relative(y, wanted) < 2 * TOLERANCE[HALF]


def test_experts_of_several_layouts_are_refused_in_a_sentence() -> None:
    def expert(P: int, group: int = 128) -> dict[str, tuple[CudaWeight, None]]:
        shapes = {"gate": (24, 256), "up": (24, 256), "down": (256, 24)}
        return {n: (lay_out(random_weight(ScaleKind.UNIFORM, P, *s, group)), None) for n, s in shapes.items()}

    assert supports_weights([expert(4), expert(4)]) is None
    assert "'gate' has 2" in str(supports_weights([expert(4), expert(2)]))
    assert "gate and up" in str(supports_weights([expert(4) | {"up": expert(2)["up"]}]))
    assert "padded" in str(supports_weights([expert(4, 48)]))
    assert "bit-planes" in str(supports_weights([expert(4) | {"down": (torch.zeros(256, 24), None)}]))
    mlp = MlpSpec(inner=8, activation="silu", gated=True, experts=ExpertsSpec(count=600, top=2))
    assert supports(mlp, 64) == "takes up to 32 of 512 experts a token, not 2 of 600"
    assert supports(replace(mlp, experts=replace(mlp.experts, count=8)), 64) is None  # type: ignore[type-var]
