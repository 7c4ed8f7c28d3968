"""Integer weights and activations in C++: the reference's integers, exact sums, any shape and instruction set."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled_cases import share_of
from torch import Tensor

from crelle.formats.activations import ActivationSpec
from crelle.formats.base import format_of
from crelle.formats.grouped import GroupedTensor
from crelle.kernels import cpu, ops
from crelle.kernels.base import Problem
from crelle.kernels.cpu import available
from crelle.kernels.integer_reference import IntegerReference
from crelle.kernels.registry import explain

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from test_integer_reference import (
    CASES,
    by_integers,
    inputs,
    shares_inputs_in_the_same_order_and_format_only,
    weight,
)

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(6)]

NAME = "cpu-integer"
Case = tuple[str, int, int, int, int, int]
INTEGER: list[Case] = [
    *(case for case in CASES if case[5] == 8),
    ("grouped", 3, 8, 48, 5, 8),
    ("grouped", 8, 4, 96, 0, 8),
    ("grouped", 4, 3, 1, 2, 8),
    ("two-level", 4, 8, 0, 0, 8),
    ("two-level", 4, 4, 128, 128, 8),
]
SHAPES = [(64, 512), (33, 300), (1, 129), (7, 1), (96, 131)]  # N, K


def encoded(x: Tensor, w: Any) -> tuple[Tensor, Tensor]:
    prepared, act = ops.prepare(w, torch.float32, NAME), w.activation
    codes = torch.full(x.shape, 99, dtype=torch.int8)
    scales = torch.full((len(x), len(act.slices(x.shape[1]))), math.pi)
    cpu.core().encode_integer(x.numpy(), prepared.data.data, codes.numpy(), scales.numpy())
    return codes, scales


def same_integers(x: Tensor, w: Any) -> None:
    wanted = w.activation.quantize(x if w.perm is None else x[:, w.perm.long()])
    codes, scales = encoded(x, w)
    assert torch.equal(codes, wanted.codes)
    assert torch.equal(scales.view(torch.int32)[wanted.scales == wanted.scales], bits(wanted.scales))
    assert torch.equal(scales.isnan(), wanted.scales.isnan())


def bits(scales: Tensor) -> Tensor:
    return scales.view(torch.int32)[scales == scales]


def product(x: Tensor, w: Any) -> Tensor:
    """Multiply into an output full of NaN: what is not written shows."""
    prepared = ops.prepare(w, torch.float32, NAME).data
    y = torch.full((len(x), w.sizes.N), math.nan)
    cpu.core().matmul(x.contiguous().numpy(), prepared.data, y.numpy(), prepared.precision)
    return y


def close(y: Tensor, x: Tensor, w: Any) -> None:
    """As near as the roundings of f32 where sums are scaled: one each for the scales, the product and the sum."""
    q = w.activation.quantize(x if w.perm is None else x[:, w.perm.long()])
    size = by_integers(x, w).abs()  # of the sum; its terms may be larger
    steps = len(w.scale_slices()) + q.scales.shape[1]
    terms = by_integers(x, absolute(w)) if len(x) else size
    assert bool(((y.double() - by_integers(x, w)).abs() <= terms * steps * 2**-23 + 1e-37).all())


def absolute(w: Any) -> Any:
    """The weight whose product with x sums the magnitudes of the terms of w's."""

    class Codes:
        slices = staticmethod(w.activation.slices)

        @staticmethod
        def quantize(x: Tensor) -> Any:
            found = w.activation.quantize(x)
            return found._replace(codes=found.codes.abs())

    class Larger:
        activation, perm, sizes = Codes, w.perm, w.sizes
        scale = w.scale.abs()
        scale_slices = staticmethod(w.scale_slices)

        @staticmethod
        def integers() -> Tensor:
            return w.integers().abs()

    return Larger


@pytest.mark.parametrize("case", INTEGER, ids=str)
def test_products_are_those_of_the_formula(isa: str, case: Case) -> None:
    for i, (N, K) in enumerate(SHAPES):
        case = (*case[:4], min(case[4], K), case[5])
        w = weight(case, N, K, permuted=i % 2 == 0)
        for M in (0, 1, 3, 17, 64):
            x = inputs(M, K)
            y = product(x, w)
            close(y, x, w)
            same_integers(x, w)
            for m in {0, M - 1, M // 2} if M else ():
                assert torch.equal(product(x[m : m + 1], w), y[m : m + 1])  # the same bits in any batch


@pytest.mark.parametrize("case", INTEGER, ids=str)
def test_adversarial_inputs(isa: str, case: Case) -> None:
    K = 300
    w = weight(case, 35, K)
    x = torch.zeros(10, K)
    x[1, 17] = 3e37  # one huge value
    x[2] = 1e-41  # denormals
    x[3] = -1e-3
    x[4] = 2.0**-100 * torch.arange(K)  # at the limit below which a group counts as zeros
    x[5, ::2], x[5, 1::2] = 3.4e38, -3.4e38
    x[6] = torch.arange(K).remainder(15).sub(7).add(0.5)  # halves are rounded to even
    x[7] = torch.arange(K).remainder(2).mul(2).sub(1) * 127.0
    x[8] = -0.0
    x[9] = 1e-30
    same_integers(x, w)
    y = product(x, w)
    usual = [0, 1, 2, 3, 6, 7, 8, 9]
    close(y[usual], x[usual], w)
    assert not y[[0, 8]].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("case", INTEGER, ids=str)
def test_not_finite_values_spoil_their_row_and_no_other(isa: str, case: Case, bad: float) -> None:
    w, x = weight(case, 35, 300), inputs(20, 300)
    clean = product(x, w)
    rest = [m for m in range(20) if m != 2]
    for k in (0, 150, 299):
        hurt = x.clone()
        hurt[2, k] = bad
        same_integers(hurt, w)
        y = product(hurt, w)
        assert bool(y[2].isnan().all())
        assert torch.equal(y[rest], clean[rest])


def test_sums_of_extreme_codes_are_exact(isa: str) -> None:
    N, K = 33, 5000
    for sign in (1, -1):
        codes = torch.full((N, K), 127 * sign, dtype=torch.int8)
        act = ActivationSpec(8, 1 << 20)
        w = GroupedTensor.from_codes(codes, 8, torch.ones(N, 1), 1 << 20, activation=act)
        x = torch.full((18, K), 127.0)
        x[1] = -127
        x[2, 1:] = -127 * 2 ** torch.arange(K - 1).remainder(2).float().neg()
        q = act.quantize(x)
        wanted = (q.codes.long() @ codes.long().T).double() * q.scales.double()
        torch.testing.assert_close(product(x, w).double(), wanted, rtol=1e-7, atol=0)
        low = torch.full((N, K), -8 if sign == 1 else 7, dtype=torch.int8)
        w = GroupedTensor.from_codes(low, 4, torch.ones(N, 40), 128, activation=act)
        wanted = (q.codes.long() @ low.long().T).double() * q.scales.double()
        torch.testing.assert_close(product(x, w).double(), wanted, rtol=1e-6, atol=0)


@settings(max_examples=share_of(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_shape_and_format(isa: str, data: st.DataObject) -> None:
    draw = data.draw
    N, K, M = draw(st.integers(1, 70)), draw(st.integers(1, 400)), draw(st.integers(0, 20))
    form = draw(st.sampled_from(["grouped", "two-level"]))
    w_bits = draw(st.sampled_from([3, 4, 8])) if form == "grouped" else 4
    group, n = draw(st.integers(1, 200)), draw(st.integers(0, K))
    clip, hadamard = draw(st.sampled_from([1.0, 0.85, 1e-3])), draw(st.booleans())
    act = ActivationSpec(draw(st.sampled_from([3, 4, 8])), group, n, clip=clip, hadamard=hadamard)
    if draw(st.booleans()):
        act = ActivationSpec(8, K + 5, draw(st.sampled_from([0, n])))
    spec = {"format": form, "shape": [N, K], "bits": w_bits, "group": group, "outliers": n}
    spec |= {"permuted": draw(st.booleans()), "activation": act.to_json()}
    spec |= {"outlier_bits": 8} if form == "grouped" else {}
    w: Any = format_of(spec).random(spec, torch.Generator().manual_seed(N))
    if form == "grouped" and draw(st.booleans()):
        w = w.with_scales({"scale": w.scale.float() * 1.0001})  # f32 that f16 does not hold
    x = inputs(M, K, seed=K) * draw(st.sampled_from([1.0, 1e-20, 1e20]))
    same_integers(x, w)
    close(product(x, w), x, w)


def test_instruction_sets_agree() -> None:
    core = cpu.core()
    before, found = core.isa(), {}
    for name in core.isas():
        core.set_isa(name)
        found[name] = [product(inputs(17, 300), weight(case, 70, 300)) for case in INTEGER]
    core.set_isa(before)
    first = next(iter(found.values()))
    for case, *all_of in zip(INTEGER, *found.values(), strict=True):
        for y in all_of:
            torch.testing.assert_close(y, first[INTEGER.index(case)], rtol=1e-5, atol=1e-5)


def test_values_are_those_of_the_format(isa: str) -> None:
    for case in INTEGER:
        w = weight(case, 35, 300)
        out = torch.full((35, 300), math.nan)
        ops.prepare(w, torch.float32, NAME).data.data.dequantize(out.numpy())
        assert torch.equal(out, w.dequantize())


def test_as_near_as_the_reference() -> None:
    for case in INTEGER:
        w, x = weight(case, 70, 300), inputs(9, 300)
        reference = IntegerReference()
        wanted = reference.run(x, reference.prepare(w, torch.float32))
        torch.testing.assert_close(product(x, w), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        half = ops.matmul(x.half(), ops.prepare(w, torch.float16, NAME))
        assert half.dtype == torch.float16


def test_threads_change_no_bit() -> None:
    w, x = weight(INTEGER[0], 300, 512), inputs(33, 512)
    found = []
    for n in (1, 2, 3):
        cpu.core().set_threads(n)
        found.append(product(x, w))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_inputs_are_shared_in_the_same_order_and_format_only(isa: str) -> None:
    shares_inputs_in_the_same_order_and_format_only(NAME, INTEGER[0])


def test_says_what_it_does_not_take() -> None:
    def why(w: Any) -> str:
        return str(dict(explain(Problem.of(w, torch.float32)))[NAME])

    assert "8 bits, not floats" in why(weight(("grouped", 4, 4, 64, 20, 16), 8, 256))
    wide = weight(("grouped", 4, 4, 128, 0, 8), 1, (1 << 17) + 1, permuted=False)
    assert "at most 131072 inputs" in why(wide)
    spec = {"format": "grouped", "shape": [9, 70], "bits": 4, "group": 16, "outliers": 6, "permuted": True}
    spec |= {"activation": None, "outlier_bits": 8}
    assert "takes quantized activations" in why(format_of(spec).random(spec, torch.Generator().manual_seed(0)))
