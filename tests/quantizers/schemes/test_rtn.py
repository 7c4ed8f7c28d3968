"""Round to nearest: the codes are the nearest of the grid, and the grid covers the group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle.errors import FormatError, SchemeError
from crelle.formats.bcq import UniformTensor, expand_groups
from crelle.quantizers.base import Group
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.solvers import grouping

quick = settings(deadline=None, max_examples=60)
F16 = 2.0**-11  # how far a number moves, relatively, when it is rounded to f16


def weight(N: int = 6, K: int = 50, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, RTN]:
    """Weights of any shape, place and size, and a grid to put them on."""
    N, K, bits = draw(st.integers(1, 4)), draw(st.integers(1, 40)), draw(st.integers(1, 8))
    group: Group = draw(st.one_of(st.just("row"), st.integers(1, 48)))
    w = weight(N, K, draw(st.integers(0, 2**31))) * draw(st.sampled_from([0.1, 1.0, 1000.0]))
    w = w + draw(st.sampled_from([0.0, 0.01, -0.05]))
    symmetric = bits > 1 and draw(st.booleans())
    return w, RTN(bits=bits, group=group, symmetric=symmetric)


def grid(q: UniformTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return step, lowest and highest level of every weight's grid, f64 [N, K]."""
    step = expand_groups(q.scale.double(), q.group, q.K)
    zero = expand_groups(q.zeros().double(), q.group, q.K)
    return step, -zero * step, (2**q.bits - 1 - zero) * step


@quick
@given(cases())
def test_error_is_at_most_half_a_step_inside_the_range(case: tuple[Tensor, RTN]) -> None:
    w, config = case
    q = config.fit(w)
    step, low, high = grid(q)
    nearest = torch.minimum(torch.maximum(w.double(), low), high)  # a weight beyond the grid goes to its end
    assert ((q.dequantize(torch.float64) - nearest).abs() <= step * (0.5 + 1e-4)).all()


@quick
@given(cases())
def test_the_grid_covers_its_group(case: tuple[Tensor, RTN]) -> None:
    w, config = case
    q = config.fit(w)
    step, low, high = grid(q)
    # Half a step for rounding the zero point (the symmetric grid is half a step short above), and f16 for the scale,
    # whose smallest numbers lie 2^-24 apart.
    top = 2**config.bits - 1
    slack = step * (0.5 + 2 * top * F16) + top * 2.0**-25
    assert (w >= low - slack).all()
    assert (w <= high + slack).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_grid_that_it_can_represent_comes_back_exactly(bits: int) -> None:
    top = 2**bits - 1
    q = torch.randint(0, top + 1, (top + 1, 64), generator=torch.Generator().manual_seed(bits))
    q[:, :2] = torch.tensor([0, top])  # both ends are used
    zero = torch.arange(top + 1)[:, None]  # every zero point
    w = 0.125 * (q - zero).float()
    fitted = RTN(bits=bits, group="row").fit(w)
    assert torch.equal(fitted.dequantize(), w)
    assert torch.equal(fitted.codes().long(), q)


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_symmetric_grid_has_its_zero_in_the_middle_and_stores_none(bits: int) -> None:
    w = weight()
    q = RTN(bits=bits, group=16, symmetric=True).fit(w)
    assert q.zero is None
    assert (q.zeros() == 2 ** (bits - 1)).all()
    wanted = torch.stack([w[:, k : k + 16].abs().amax(1) for k in range(0, 50, 16)], 1) * 2 / (2**bits - 1)
    torch.testing.assert_close(q.scale.float(), wanted, rtol=F16, atol=0)


def test_codes_scale_and_zero_of_an_example_worked_by_hand() -> None:
    w = torch.tensor([[-1.0, 0.0, 0.5, 2.0], [3.0, 1.0, 0.2, 1.6]])
    q = RTN(bits=2, group=4).fit(w)  # steps of 1 from -1 and from 0
    assert q.scale.flatten().tolist() == [1.0, 1.0]
    assert q.zeros().flatten().tolist() == [1, 0]
    assert q.codes().tolist() == [[0, 1, 1, 3], [3, 1, 0, 2]]
    assert q.dequantize().tolist() == [[-1.0, 0.0, 0.0, 2.0], [3.0, 1.0, 0.0, 2.0]]


@quick
@given(cases())
def test_zero_stays_zero(case: tuple[Tensor, RTN]) -> None:
    w, config = case
    w = w.clone()
    w[:, ::3] = 0.0
    assert (config.fit(w).dequantize()[:, ::3] == 0).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_group_of_zeros_is_exact(symmetric: bool) -> None:
    w = weight()
    w[:, 16:32] = 0.0
    q = RTN(bits=3, group=16, symmetric=symmetric).fit(w)
    assert torch.isfinite(q.scale).all()
    assert (q.dequantize()[:, 16:32] == 0).all()
    assert (RTN(bits=3, group=16, symmetric=symmetric).fit(torch.zeros(2, 40)).dequantize() == 0).all()


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize("symmetric", [False, True])
def test_error_shrinks_with_bits(bits: int, symmetric: bool) -> None:
    w = weight(64, 256)

    def error(b: int) -> float:
        return (RTN(bits=b, group=64, symmetric=symmetric).fit(w).dequantize() - w).norm().item()

    assert error(bits + 1) < 0.7 * error(bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_negated_weights_give_negated_numbers(bits: int) -> None:
    w = weight(32, 128)
    for symmetric in (False, True):
        config = RTN(bits=bits, group=32, symmetric=symmetric)
        there, back = config.fit(w), config.fit(-w)
        assert torch.equal(there.scale, back.scale)
        if not symmetric:  # a symmetric grid has one level more below zero than above
            assert torch.equal(back.dequantize(), -there.dequantize())


@pytest.mark.parametrize("factor", [2.0**-3, 2.0, 2.0**9])
def test_scaled_weights_give_the_same_codes(factor: float) -> None:
    w = weight(32, 128)
    there, scaled = RTN(bits=4, group=32).fit(w), RTN(bits=4, group=32).fit(w * factor)
    assert torch.equal(scaled.planes, there.planes)
    assert torch.equal(scaled.dequantize(), there.dequantize() * factor)


@pytest.mark.parametrize("K", [1, 7, 50, 64])
def test_row_wise_equals_group_k(K: int) -> None:
    w = weight(K=K)
    row, k, more = (RTN(bits=4, group=g).fit(w) for g in ("row", K, K + 1000))
    assert row.group == k.group == more.group == K
    assert torch.equal(row.dequantize(), k.dequantize())
    assert torch.equal(row.dequantize(), more.dequantize())


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_short_last_group_is_a_group_of_its_own(symmetric: bool) -> None:
    w = weight(K=50)
    config = RTN(bits=4, group=16, symmetric=symmetric)
    parts = [config.fit(w[:, k : k + 16]).dequantize() for k in range(0, 50, 16)]
    assert torch.equal(config.fit(w).dequantize(), torch.cat(parts, 1))


def test_row_slabs_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(17, 50)
    whole = RTN(bits=3, group=16).fit(w)
    for slab in (1, 50, 120):
        monkeypatch.setattr(grouping, "_SLAB", slab)
        cut = RTN(bits=3, group=16).fit(w)
        assert all(torch.equal(t, cut.tensors()[name]) for name, t in whole.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_taken_as_their_numbers(dtype: torch.dtype) -> None:
    w = weight().to(dtype)
    assert torch.equal(RTN().fit(w).dequantize(), RTN().fit(w.float()).dequantize())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    w = weight()
    w[2, 3] = bad
    with pytest.raises(FormatError, match="NaN or infinity"):
        RTN().fit(w)


def test_a_scale_beyond_f16_is_refused() -> None:
    with pytest.raises(SchemeError, match="outside the range of f16"):
        RTN(bits=2).fit(torch.tensor([[1e6, -1e6]]))
