"""Binary coding by output error: each of its steps lowers the error, and odd cases are no trouble."""

from itertools import pairwise

import pytest
import torch
from problems import correlated, output_error, stats_of, weight
from torch import Tensor

from crelle.errors import FormatError, SchemeError
from crelle.formats.bcq import BCQTensor
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.bcq import BCQ, binary_scales
from crelle.quantizers.schemes.hbcq import HBCQ
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.solvers.grouping import importances

biased = pytest.mark.parametrize("bias", [True, False], ids=["z", "no-z"])


def error(config: HBCQ | BCQ | RTN, w: Tensor, stats: Stats) -> float:
    return output_error(config.fit(w, stats), w, stats)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_step_lowers_the_output_error(bits: int) -> None:
    w, stats = weight(32, 160), correlated(160)
    steps = [
        RTN(bits, 32),
        BCQ(bits, 32),
        HBCQ(bits, 32, feedback=False, solve=False, refine=0),
        HBCQ(bits, 32, solve=False, refine=0),
        HBCQ(bits, 32, refine=0),
        HBCQ(bits, 32, refine=1),
        HBCQ(bits, 32, refine=3),
    ]
    for before, after in pairwise(steps):
        assert error(after, w, stats) < error(before, w, stats), str(after)
    assert error(steps[-1], w, stats) < 0.5 * error(steps[1], w, stats)


@biased
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_more_planes_are_better(bits: int, bias: bool) -> None:
    w, stats = weight(16, 96), correlated(96)
    assert error(HBCQ(bits + 1, 32, bias=bias), w, stats) < 0.5 * error(HBCQ(bits, 32, bias=bias), w, stats)


@biased
@pytest.mark.parametrize("bits", range(1, 7))
def test_independent_inputs_give_plain_binary_coding_or_better(bits: int, bias: bool) -> None:
    w, stats = weight(16, 100), stats_of(torch.eye(100))
    plain = error(BCQ(bits, 32, bias=bias), w, stats)
    assert error(HBCQ(bits, 32, bias=bias, solve=False, refine=0), w, stats) == pytest.approx(plain, rel=1e-3)
    assert error(HBCQ(bits, 32, bias=bias), w, stats) <= plain * 1.0001


@biased
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_important_weights_are_met_better(bits: int, bias: bool) -> None:
    g = weight(64, 32)
    h = torch.randn(32, generator=torch.Generator().manual_seed(1)).mul(2).exp().expand(64, 32)

    def left(alpha: Tensor, z: Tensor) -> float:
        levels = (alpha @ torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * bits).reshape(-1, bits).T) + z[:, None]
        return float((h * (levels[:, None] - g[..., None]).abs().amin(-1).square()).sum())

    found = left(*binary_scales(g, h.contiguous(), bits, 20, bias))
    assert found < (0.97 if bits == 1 else 0.8) * left(*binary_scales(g, None, bits, 20, bias))
    assert found <= left(*binary_scales(g, h.contiguous(), bits, 0, bias)) * 1.00001  # f16


def test_equal_importances_are_none_at_all() -> None:
    g = weight(40, 32)
    plain, weighted = binary_scales(g, None, 3, 20, True), binary_scales(g, torch.ones_like(g), 3, 20, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, weighted, strict=True))


def test_importances_are_1_on_average_and_never_0_but_in_the_padding() -> None:
    h = importances(torch.tensor([1.0, 3.0, 0.0, 4.0, 0.0, 0.0, 5.0]), 2)
    torch.testing.assert_close(h, torch.tensor([[0.5, 1.5], [1e-6, 2.0], [1.0, 1.0], [1.0, 0.0]]))


@biased
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_result_is_a_bcq_tensor_written_one_way(bits: int, bias: bool) -> None:
    q = HBCQ(bits, 16, bias=bias).fit(weight(6, 50), correlated(50))
    assert isinstance(q, BCQTensor)
    assert (q.bits, q.group, q.z is not None) == (bits, 16, bias)
    assert q.alpha.dtype == torch.float16
    assert (q.alpha >= 0).all()
    assert (q.alpha.diff(dim=0) <= 0).all()


@biased
@pytest.mark.parametrize(
    ("N", "K", "group"), [(1, 1, 1), (1, 1, "row"), (3, 7, 1), (4, 50, 16), (4, 50, "row"), (4, 33, 32), (2, 300, 128)]
)
def test_any_shape_and_group(N: int, K: int, group: int | str, bias: bool) -> None:
    w, stats = weight(N, K), correlated(K)
    plain = error(BCQ(3, group, bias=bias), w, stats)
    assert error(HBCQ(3, group, bias=bias), w, stats) <= plain * 1.001 + 1e-7 * stats.output_error(w)


@biased
@pytest.mark.parametrize(
    "hessian",
    [torch.zeros(48, 48), torch.ones(48, 48), correlated(48, tokens=5).hessian, torch.diag(torch.arange(48.0) % 3)],
    ids=["zero", "ones", "few", "dead"],
)
def test_a_singular_hessian_does_no_harm(hessian: Tensor, bias: bool) -> None:
    w = weight(6, 48)
    assert torch.isfinite(HBCQ(3, 16, damp=0.0, bias=bias).fit(w, stats_of(hessian)).dequantize()).all()
    assert (HBCQ(3, 16, bias=bias).fit(w, stats_of(hessian)).dequantize() - w).norm() < w.norm()


def test_constant_and_zero_weights() -> None:
    stats = correlated(40)
    assert (HBCQ().fit(torch.zeros(3, 40), stats).dequantize() == 0).all()
    torch.testing.assert_close(
        HBCQ().fit(torch.full((3, 40), 0.3), stats).dequantize(), torch.full((3, 40), 0.3), rtol=1e-3, atol=1e-3
    )


def test_the_same_bits_each_time() -> None:
    w, stats = weight(17, 50), correlated(50)
    first, second = (HBCQ(3, 16).fit(w, stats).tensors() for _ in range(2))
    assert all(torch.equal(t, second[part]) for part, t in first.items())


def test_bad_input_is_a_sentence() -> None:
    with pytest.raises(SchemeError, match="'hbcq' needs statistics of the layer's inputs"):
        HBCQ().fit(weight(2, 4))
    with pytest.raises(SchemeError, match="outside the range of f16"):
        HBCQ(2).fit(torch.tensor([[1e6, -1e6, 3e5]]), stats_of(torch.eye(3)))
    with pytest.raises(FormatError, match="NaN or infinity"):
        HBCQ().fit(torch.full((1, 3), float("nan")), stats_of(torch.eye(3)))
