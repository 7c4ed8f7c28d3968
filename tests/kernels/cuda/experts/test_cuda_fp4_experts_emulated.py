"""The kernels of experts in four-bit floats run on the CPU, thread by thread: what they compute, without a GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import expert_cases
import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from fp4_weights import FORMATS
from plane_weights import relative
from torch import Tensor

from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.experts import fp4_products, products
from crelle.kernels.cuda.experts.fp4_products import Fp4ExpertGemmConfig, Fp4ExpertGemvConfig
from crelle.kernels.cuda.experts.fused import FusedExperts
from crelle.kernels.cuda.experts.weights import supports_weights
from crelle.kernels.cuda.step.fused_linear import Norm
from crelle.kernels.spec import ExpertsSpec, MlpSpec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 5e-4, BF16: 4e-3}  # inner and y are rounded, nothing else but f32 sums
NORMS = {
    "RMS_NORM": lambda v, norm, shift: v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5) * norm,
    "LAYER_NORM": lambda v, norm, shift: torch.nn.functional.layer_norm(v, v.shape[-1:], norm, shift, 1e-5),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        """Memory full of NaN."""
        t = real(*size, **options)
        return t.fill_(torch.nan) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", poisoned)
    for module in (products, fp4_products):
        monkeypatch.setattr(module, "load", EmulatedKernel)
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)
    monkeypatch.setattr(fp4_products, "most_shared_memory", lambda: 99 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))


def few(case: expert_cases.Case, x: Tensor, logits: Tensor, **options: Tensor) -> Tensor:
    return fp4_products.down(fp4_products.up(x, logits, case.experts), logits, case.experts, **options)


def many(case: expert_cases.Case, x: Tensor, logits: Tensor, tokens: int, residual: Tensor | None = None) -> Tensor:
    e = case.experts
    weights, slots = expert_cases.sorted_slots(logits, e, tokens)
    made = fp4_products.grouped_down(fp4_products.grouped_up(x, slots, e), slots, e)
    return products.combine(made, weights, residual)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("grouped", [False, True], ids=["gemv", "gemm"])
@pytest.mark.parametrize(("top", "width", "inner"), [(3, 264, 40), (2, 1032, 600), (1, 8, 8), (5, 88, 272)])
def test_chosen_experts_match_oracle(
    kind: str, dtype: torch.dtype, grouped: bool, top: int, width: int, inner: int
) -> None:
    """Of sizes that are no multiple of a tile, a group or a block, in memory full of NaN."""
    torch.manual_seed(top)
    normalize, bias = top != 2, top != 3
    options = {"top": top, "width": width, "inner": inner, "normalize": normalize, "bias": bias, "dtype": dtype}
    case = expert_cases.make_fp4(kind, count=5, **options)  # type: ignore[arg-type]
    x, logits = (torch.randn(5, width) / 2).to(dtype), torch.randn(5, 6)  # one logit more, which is none of theirs
    y = many(case, x, logits, 8) if grouped else few(case, x, logits)
    wanted = expert_cases.oracle(case, x, logits[:, :5], top, normalize, "swigluoai")
    assert relative(y, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_a_bf16_model_multiplies_in_f16_only_where_inner_is_bounded(activation: str) -> None:
    torch.manual_seed(5)
    case = expert_cases.make_fp4("mxfp4", count=3, top=2, width=264, inner=40, activation=activation, dtype=BF16)
    x, logits = (torch.randn(3, 264) / 2).to(BF16), torch.randn(3, 3)
    inner = fp4_products.up(x, logits, case.experts)
    assert inner.dtype == (HALF if activation == "swigluoai" else BF16)
    wanted = expert_cases.oracle(case, x, logits, 2, True, activation)
    for y in (fp4_products.down(inner, logits, case.experts), many(case, x, logits, 8)):
        assert y.dtype == BF16
        assert relative(y, wanted) < TOLERANCE[BF16] * (1 if activation == "swigluoai" else 2)


@pytest.mark.parametrize("op", NORMS)
def test_norm_residual_and_shared_expert_are_fused(op: str) -> None:
    torch.manual_seed(0)
    case = expert_cases.make_fp4("mxfp4", count=4, top=2, width=712, inner=72, activation="silu")
    x, logits, weight, shift = torch.randn(2, 712).half(), torch.randn(2, 5), torch.rand(712).half(), torch.randn(712)
    residual, shared = torch.randn(2, 712).half(), torch.randn(2, 712).half()
    given = (weight, shift.half() if op == "LAYER_NORM" else None, 1e-5)
    inner = fp4_products.up(x, logits, case.experts, op, *given)  # type: ignore[arg-type]
    assert bool((inner[..., 72:] == 0).all())
    y = fp4_products.down(inner, logits, case.experts, residual, shared)
    h = NORMS[op](x.double(), weight.double(), shift.half().double())
    wanted = residual.double() + expert_cases.oracle(case, h, logits[:, :4], 2, True)
    wanted += torch.sigmoid(logits[:, 4:].double()) * shared.double()
    assert relative(y, wanted) < 8e-4


@pytest.mark.parametrize(
    "config", [Fp4ExpertGemvConfig(4, 2, 1), Fp4ExpertGemvConfig(3, 4, 1), Fp4ExpertGemvConfig(12, 1, 1)]
)
def test_any_tile_config_of_the_gemv_gives_the_same_but_for_the_order_of_sums(config: Fp4ExpertGemvConfig) -> None:
    """More warps than blocks, warps with parts of two slots, one stage."""
    torch.manual_seed(1)
    case = expert_cases.make_fp4("nvfp4", count=7, top=3, width=776, inner=520)
    x, logits = torch.randn(2, 776).half() / 2, torch.randn(2, 7)
    inner = fp4_products.up(x, logits, case.experts, config=config)
    y = fp4_products.down(inner, logits, case.experts, config=config)
    assert relative(y, expert_cases.oracle(case, x, logits, 3, True, "swigluoai")) < TOLERANCE[HALF]


@pytest.mark.parametrize("config", [(8, 1, 4, 1, 1), (16, 2, 2, 2, 1), (32, 4, 1, 1, 1), (16, 1, 1, 3, 1)])
def test_any_tile_config_of_the_gemm_gives_the_same_but_for_the_order_of_sums(config: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    case = expert_cases.make_fp4("mxfp4", count=3, top=2, width=520, inner=264)
    x, logits, s = torch.randn(21, 520).half() / 2, torch.randn(21, 3), Fp4ExpertGemmConfig(*config)
    weights, slots = expert_cases.sorted_slots(logits, case.experts, s.tokens)
    inner = fp4_products.grouped_up(x, slots, case.experts, s)
    y = products.combine(fp4_products.grouped_down(inner, slots, case.experts, s), weights)
    assert relative(y, expert_cases.oracle(case, x, logits, 2, True, "swigluoai")) < TOLERANCE[HALF]


def test_a_slot_has_the_same_bits_in_passes_of_any_size() -> None:
    torch.manual_seed(3)
    case = expert_cases.make_fp4("mxfp4", count=3, top=2, width=552, inner=296)
    x, logits, residual = torch.randn(20, 552).half(), torch.randn(20, 3), torch.randn(20, 552).half()
    whole = many(case, x, logits, 8, residual)
    assert torch.equal(many(case, x, logits, 16, residual), whole)
    assert torch.equal(many(case, x, logits, 32, residual), whole)
    some = slice(3, 9)
    alone = many(case, x[some].contiguous(), logits[some].contiguous(), 8, residual[some].contiguous())
    assert torch.equal(alone, whole[some])


@pytest.mark.parametrize("grouped", [False, True], ids=["gemv", "gemm"])
@pytest.mark.parametrize("broken", ["x", "logit"])
def test_rows_that_are_not_finite_stay_so_alone(grouped: bool, broken: str) -> None:
    case = expert_cases.make_fp4("mxfp4", count=4, top=2, width=264, inner=40)
    x, logits = torch.randn(3, 264).half(), torch.randn(3, 4)
    whole = many(case, x, logits, 8) if grouped else few(case, x, logits)
    if broken == "x":
        x[1, 7] = torch.inf
    else:
        logits[1, 3] = torch.nan
    y = many(case, x, logits, 8) if grouped else few(case, x, logits)
    assert not bool(y[1].isfinite().any())
    assert torch.equal(y[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("rows", [6, 9])
def test_a_layer_of_gpt_oss_matches_oracle(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, a router with a bias, experts with biases, the clamped activation: few tokens, and sorted ones."""
    torch.manual_seed(rows)
    monkeypatch.setattr(dense, "load", EmulatedKernel)
    case = expert_cases.make_fp4("mxfp4", count=64, top=2, width=328, inner=72)
    spec = MlpSpec(inner=72, activation="swigluoai", gated=True, experts=ExpertsSpec(count=64, top=2))

    def linear(w: Any, bias: Tensor | None, N: int, K: int) -> SimpleNamespace:
        return SimpleNamespace(prepared=Prepared(Problem("", N, K, 4, 32, "cpu", HALF), None, w), bias=bias)  # type: ignore[arg-type]

    each: Any = case.laid_out
    router, router_bias = torch.randn(64, 328).half() / 16, torch.randn(64).half()
    module = SimpleNamespace(
        router=linear(router, router_bias, 64, 328),
        shared_gate=None,
        experts=[SimpleNamespace(**{n: linear(w, b, w.N, w.K) for n, (w, b) in e.items()}) for e in each],
        shared=None,
    )
    experts = FusedExperts(module, spec, HALF)
    x, weight = torch.randn(rows, 328).half(), (1 + torch.randn(328) / 8).half()
    h = (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)).half().double() * weight.double()
    logits = h @ router.double().T + router_bias.double()
    wanted = x.double() + expert_cases.oracle(case, h, logits, 2, True, "swigluoai")
    assert experts.takes_few(rows) == (rows == 6)
    for invariant in (False, True):
        y = experts(x, Norm(weight, None, 1e-5), x, invariant)
        assert relative(y, wanted) < 8e-4


def test_experts_of_several_kinds_are_refused_in_a_sentence() -> None:
    case = expert_cases.make_fp4("mxfp4", count=2, top=1, width=64, inner=32)
    each: list[dict[str, object]] = case.laid_out  # type: ignore[assignment]
    assert supports_weights(each) is None  # type: ignore[arg-type]
    other = expert_cases.make_fp4("nvfp4", count=1, top=1, width=64, inner=32).laid_out[0]  # type: ignore[index]
    assert "'gate' has 2" in str(supports_weights([*each, other]))  # type: ignore[list-item]
    assert "gate and up" in str(supports_weights([each[0] | {"up": other["up"]}]))  # type: ignore[dict-item]
    dense = each[0] | {"down": (torch.zeros(64, 32), None)}
    assert "four-bit floats (mxfp4, nvfp4)" in str(supports_weights([dense]))  # type: ignore[list-item]


def test_rows_too_long_for_shared_memory_are_sorted() -> None:
    case = expert_cases.make_fp4("mxfp4", count=4, top=4, width=64, inner=32)
    assert fp4_products.takes_few(1, case.experts)
    long = replace(case.experts, down=replace(case.experts.down, K=1 << 14))
    assert not fp4_products.takes_few(1, long)
