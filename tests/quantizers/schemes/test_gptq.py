"""Uniform grids by output error: every step lowers it, odd shapes and inputs are no trouble, bad ones a sentence."""

from dataclasses import replace

import pytest
import torch
from problems import correlated, output_error, stats_of, weight
from torch import Tensor

from crelle.errors import FormatError, SchemeError
from crelle.formats.affine import AffineTensor
from crelle.formats.bcq import UniformTensor
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.hbcq import HBCQ
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.solvers import grouping

VARIANTS = {
    "uniform": GPTQ(),
    "free": GPTQ(free=True),
    "symmetric": GPTQ(symmetric=True),
    "in order": GPTQ(act_order=False),
    "dynamic": GPTQ(act_order=False, static=False),
    "dynamic, free": GPTQ(act_order=False, static=False, free=True),
}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def variant(name: str, bits: int = 3, group: int | str = 32, **settings: object) -> GPTQ:
    return replace(VARIANTS[name], bits=bits, group=group, **settings)  # type: ignore[arg-type]


def error(config: GPTQ | HBCQ | RTN, w: Tensor, stats: Stats) -> float:
    return output_error(config.fit(w, stats), w, stats)


@pytest.mark.parametrize("bits", [2, 3, 4])
@every_variant
def test_each_step_lowers_the_output_error(name: str, bits: int) -> None:
    w, stats = weight(32, 160), correlated(160)
    plain = error(RTN(bits=bits, group=32, symmetric=VARIANTS[name].symmetric), w, stats)
    steps = [error(variant(name, bits, refine=r), w, stats) for r in (0, 1, 2, 4)]
    assert steps[0] < 0.7 * plain
    assert steps[1] < 0.99 * steps[0]
    assert steps[2] < steps[1]
    assert steps[3] <= steps[2]


@pytest.mark.parametrize("bits", [2, 3])
def test_a_free_grid_is_better_than_a_zero_point(bits: int) -> None:
    w, stats = weight(32, 160), correlated(160)
    assert error(variant("free", bits), w, stats) < error(variant("uniform", bits), w, stats)


@pytest.mark.parametrize("bits", range(1, 9))
@every_variant
def test_independent_inputs_are_rounded_not_worse_than_plainly(name: str, bits: int) -> None:
    if bits == 1 and VARIANTS[name].symmetric:
        pytest.skip("no such grid")
    w, stats = weight(16, 96), stats_of(torch.eye(96))
    plain = error(RTN(bits=bits, group=32, symmetric=VARIANTS[name].symmetric), w, stats)
    assert error(variant(name, bits, refine=0), w, stats) <= plain * 1.001
    assert error(variant(name, bits), w, stats) <= plain * 1.001


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("free", [False, True])
def test_the_result_is_of_the_format_asked_for(bits: int, free: bool) -> None:
    w, stats = weight(5, 50), correlated(50)
    q = GPTQ(bits=bits, group=16, free=free).fit(w, stats)
    assert isinstance(q, AffineTensor if free else UniformTensor)
    assert q.shape == (5, 50)
    assert (q.bits, q.group) == (bits, 16)
    assert q.scale.dtype == torch.float16
    assert (q.scale > 0).all()


def test_a_symmetric_grid_stores_no_zero_points() -> None:
    assert GPTQ(symmetric=True, group=16).fit(weight(5, 50), correlated(50)).tensors().keys() == {"planes", "scale"}


@every_variant
@pytest.mark.parametrize(
    ("N", "K", "group"), [(1, 1, 1), (1, 1, "row"), (3, 7, 1), (4, 50, 16), (4, 50, "row"), (4, 33, 32), (2, 300, 128)]
)
def test_any_shape_and_group(name: str, N: int, K: int, group: int | str) -> None:
    w, stats = weight(N, K), correlated(K)
    config = variant(name, group=group)
    found = error(config, w, stats)
    plain = error(RTN(bits=3, group=config.group, symmetric=config.symmetric), w, stats)
    assert found <= plain * 1.001 + 1e-7 * stats.output_error(w)


@every_variant
def test_inputs_that_are_always_zero_do_no_harm(name: str) -> None:
    w, stats = weight(8, 64), correlated(64)
    H = stats.hessian.clone()
    dead = torch.arange(0, 64, 3)
    H[dead], H[:, dead] = 0, 0
    q = variant(name).fit(w, stats_of(H))
    there = q.dequantize()
    assert torch.isfinite(there).all()
    assert ((there - w)[:, dead]).abs().amax() < 0.05  # they are rounded too, as well as the group's grid allows
    assert output_error(q, w, stats_of(H)) < 0.5 * output_error(RTN(bits=3, group=32).fit(w), w, stats_of(H))


@every_variant
@pytest.mark.parametrize(
    "hessian", [torch.zeros(48, 48), torch.ones(48, 48), correlated(48, tokens=5).hessian], ids=["zero", "ones", "few"]
)
def test_a_singular_hessian_does_no_harm(name: str, hessian: Tensor) -> None:
    w = weight(6, 48)
    assert torch.isfinite(variant(name, damp=0.0).fit(w, stats_of(hessian)).dequantize()).all()
    assert (variant(name).fit(w, stats_of(hessian)).dequantize() - w).norm() < w.norm()


@every_variant
def test_a_weight_on_the_grid_stays(name: str) -> None:
    q = torch.randint(0, 8, (8, 64), generator=torch.Generator().manual_seed(0))
    q[:, 0::32], q[:, 1::32] = 0, 7
    w = 0.125 * (q - 4).float()
    again = variant(name).fit(w, correlated(64))
    if not VARIANTS[name].symmetric:  # whose grid begins half a step further out
        torch.testing.assert_close(again.dequantize(), w, rtol=1e-3, atol=1e-3)


def test_a_weight_of_zeros_stays() -> None:
    for config in VARIANTS.values():
        assert config.fit(torch.zeros(3, 40), correlated(40)).dequantize().abs().amax() < 1e-6


def test_the_target_undoes_the_error_that_came_in() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 64, generator=rng) @ torch.randn(64, 64, generator=rng) / 8
    noisy = x + 0.3 * torch.randn(4000, 64, generator=rng) @ torch.randn(64, 64, generator=rng) / 8
    stats = stats_of(noisy.T @ noisy / 4000, x.T @ noisy / 4000)
    w = weight(32, 64)

    def output(config: GPTQ) -> float:
        return float((noisy @ config.fit(w, stats).dequantize().T - x @ w.T).square().sum())

    assert output(GPTQ(group=32)) < 0.95 * output(GPTQ(group=32, target=False))
    alone = stats_of(stats.hessian)
    same = [GPTQ(group=32, target=t).fit(w, alone).tensors() for t in (True, False)]
    assert all(torch.equal(t, same[1][name]) for name, t in same[0].items())


@every_variant
def test_the_same_bits_each_time_and_in_slabs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, stats = weight(17, 50), correlated(50)
    config = variant(name, group=16)
    first, second = config.fit(w, stats).tensors(), config.fit(w, stats).tensors()
    assert all(torch.equal(t, second[part]) for part, t in first.items())
    whole = error(config, w, stats)
    monkeypatch.setattr(grouping, "_SLAB", 150)
    assert error(config, w, stats) == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_taken_as_their_numbers(dtype: torch.dtype) -> None:
    w, stats = weight(6, 50).to(dtype), correlated(50)
    assert torch.equal(GPTQ().fit(w, stats).dequantize(), GPTQ().fit(w.float(), stats).dequantize())


def test_neither_the_weight_nor_the_statistics_are_changed() -> None:
    w, stats = weight(6, 50), correlated(50)
    before = w.clone(), stats.hessian.clone()
    for config in VARIANTS.values():
        config.fit(w, stats)
    assert torch.equal(w, before[0])
    assert torch.equal(stats.hessian, before[1])


def test_without_statistics_it_says_what_it_needs() -> None:
    with pytest.raises(SchemeError, match="'gptq' needs statistics of the layer's inputs"):
        GPTQ().fit(weight(2, 4))
    with pytest.raises(SchemeError, match="statistics have 5 inputs, but the weight has 4"):
        GPTQ().fit(weight(2, 4), correlated(5))


@pytest.mark.parametrize("free", [False, True])
def test_a_scale_beyond_f16_is_refused(free: bool) -> None:
    with pytest.raises(SchemeError, match="outside the range of f16"):
        GPTQ(bits=2, free=free).fit(torch.tensor([[1e6, -1e6, 3e5]]), stats_of(torch.eye(3)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    w = weight(4, 8)
    w[2, 3] = bad
    with pytest.raises(FormatError, match="NaN or infinity"):
        GPTQ().fit(w, correlated(8))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*VARIANTS.values(), HBCQ()], ids=str)
def test_a_gpu_does_as_well(config: GPTQ | HBCQ) -> None:
    w, stats = weight(64, 300), correlated(300)
    there = Stats(stats.hessian.cuda(), stats.absmean.cuda(), stats.tokens)
    q = config.fit(w.cuda(), there)
    assert q.device.type == "cuda"
    assert output_error(q.to("cpu"), w, stats) == pytest.approx(error(config, w, stats), rel=0.02)
