"""Trellis quantizer: paths against brute force and against torch, error beside gptq, odd shapes, settings."""

import pytest
import torch
from problems import correlated, output_error, stats_of, weight

from crelle.errors import SchemeError
from crelle.formats.base import bits_per_weight, format_of
from crelle.formats.trellis import BITS, CODES, STATES, TrellisTensor, rings_of, states_of
from crelle.formats.wrappers.rotated import RotatedTensor
from crelle.kernels.cpu import core
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.trellis import Trellis
from crelle.quantizers.solvers import trellis_solver
from crelle.quantizers.solvers.gptq_solver import factor
from crelle.quantizers.solvers.trellis_solver import BlockFactor, paths
from crelle.quantizers.training.ste import ScaleTuner, trainable, trainable_weight

KINDS = [(code.name, bits) for code in CODES.values() for bits in BITS if not (code.weights * bits) % 1]


def table(code: str) -> torch.Tensor:
    return CODES[code].values(torch.arange(STATES)).float()


def distance(values: torch.Tensor, roots: torch.Tensor, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The distance of each sequence [S] of weights x [S, n, V], already times roots."""
    got = torch.stack([values[states[:, t]] @ roots[t % len(roots)] for t in range(states.shape[1])], 1)
    return (x - got).square().sum((1, 2))


@pytest.mark.parametrize(("code", "bits"), [("pair", 2), ("mul1", 3), ("pair", 1.5)])
def test_a_short_path_is_the_best_of_all(code: str, bits: float) -> None:
    """Every path of three steps: 2^16 beginnings with all that can follow."""
    kind, values = CODES[code], table(code)
    shift = kind.shift(bits)
    x = torch.randn(2, 3, kind.weights, generator=torch.Generator().manual_seed(1)) * kind.std
    found = trellis_solver._viterbi(values[None], x, shift, None)
    roots = torch.eye(kind.weights)[None]
    for s in range(2):
        each = (values[None] - x[s, :, None]).square().sum(-1)  # [3, states]
        own = torch.arange(1 << shift)
        second = (torch.arange(STATES) >> shift)[:, None] | own << (16 - shift)  # [states, J]
        third = (second >> shift)[..., None] | own << (16 - shift)
        all_paths = each[0][:, None, None] + each[1][second][..., None] + each[2][third]
        least = distance(values, roots, x[s : s + 1], found[s : s + 1])
        assert torch.allclose(all_paths.min(), least, rtol=1e-5)


@pytest.mark.parametrize(("code", "bits"), KINDS)
def test_rings_in_cpp_are_as_near_as_those_in_torch(code: str, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, values = CODES[code], table(code)
    shift, n = kind.shift(bits), 128 // kind.weights
    rng = torch.Generator().manual_seed(2)
    roots = torch.linalg.cholesky(torch.eye(kind.weights) + 0.3 * torch.ones(kind.weights, kind.weights)).repeat(
        2, 1, 1
    )
    roots[1] *= 0.7
    x = (torch.randn(3, n // 2, 2, 1, kind.weights, generator=rng) * kind.std @ roots).reshape(3, n, kind.weights)
    in_cpp = paths(values, roots, x, shift, kind.std)
    monkeypatch.setattr(trellis_solver.solver, "usable", lambda t: False)
    in_torch = paths(values, roots, x, shift, kind.std)
    for states in (in_cpp, in_torch):
        assert torch.equal(states_of(rings_of(states, shift), shift), states), "the path is a ring"
    a, b = (distance(values, roots, x, states).sum() for states in (in_cpp, in_torch))
    assert abs(float(a / b) - 1) < 0.03, (a, b)


def test_every_instruction_set_finds_the_same_rings() -> None:
    before = core().isa()
    kind, values = CODES["pair"], table("pair")
    x = torch.randn(3, 64, 2, generator=torch.Generator().manual_seed(3)) * kind.std
    found = {}
    try:
        for name in core().isas():
            core().set_isa(name)
            found[name] = paths(values, torch.eye(2)[None], x, 4, kind.std)
    finally:
        core().set_isa(before)
    first = next(iter(found.values()))
    assert all(torch.equal(states, first) for states in found.values())


def test_the_block_factor_is_the_hessian() -> None:
    K = 46
    by = BlockFactor.of(factor(correlated(K).hessian, 0.05, act_order=False))
    unit = by.mix.double() + torch.eye(48, dtype=torch.float64)
    whole = torch.block_diag(*by.cost.double())
    assert torch.allclose((unit @ whole @ unit.T)[:K, :K], by.damped.double(), rtol=1e-4, atol=1e-4)
    for b in range(12):
        assert not by.mix[4 * b :, 4 * b : 4 * b + 4].any(), "a block does not reach itself or earlier ones"


@pytest.mark.parametrize("bits", [2, 3])
def test_less_error_than_gptq_with_more_bits(bits: int) -> None:
    w, stats = weight(64, 128), correlated(128)
    ours = parse(f"trellis:bits={bits}").fit(w, stats)
    other = parse(f"gptq:bits={bits},group=64").fit(w, stats)
    assert bits_per_weight(ours) < bits_per_weight(other)
    assert output_error(ours, w, stats) < 0.75 * output_error(other, w, stats)


def test_feedback_and_rotation_each_make_the_error_less() -> None:
    w, stats = weight(32, 128), correlated(128)
    w[:, 7] *= 12  # a channel of large weights
    flat = Stats(torch.eye(128), stats.absmean, stats.tokens)
    plain = Trellis(bits=2, rotate=False)
    assert output_error(plain.fit(w, stats), w, stats) < 0.8 * output_error(plain.fit(w, flat), w, stats)
    whole = Trellis(bits=2)
    assert output_error(whole.fit(w, stats), w, stats) < 0.8 * output_error(plain.fit(w, stats), w, stats)


@pytest.mark.parametrize(("N", "K"), [(33, 70), (5, 130), (64, 4)])
def test_odd_shapes_and_rows_of_zeros(N: int, K: int) -> None:
    w, stats = weight(N, K), correlated(K)
    w[min(3, N - 1)] = 0
    q = Trellis(bits=4).fit(w, stats)
    assert q.shape == (N, K)
    assert output_error(q, w, stats) < 0.1 * float(((w @ stats.hessian) * w).sum())
    assert q.dequantize()[min(3, N - 1)].abs().max() < 1e-6


@pytest.mark.parametrize(
    "scheme",
    [
        "trellis:bits=2",
        "trellis:bits=2.5,rotate=false",
        "trellis:bits=3,damp=0.1",
        "trellis:bits=2,rotate_outputs=true",
        "trellis:bits=2,rotate_outputs=true,hadamard=any",
    ],
)
def test_the_spec_is_known_before_and_the_string_comes_back(scheme: str) -> None:
    quantizer = parse(scheme)
    assert str(quantizer) == scheme
    q = quantizer.fit(weight(40, 72), correlated(72))
    assert q.spec() == quantizer.storage((40, 72))
    assert format_of(q.spec()).row_bits(q.spec()) > 0
    assert isinstance(q, TrellisTensor if "rotate=false" in scheme else RotatedTensor)


def test_blocks_of_any_order_and_rotated_outputs_spread_what_a_block_of_two_cannot() -> None:
    w, stats = weight(36, 72), correlated(72)
    w[:, :8] *= 12  # a block of 8 that is larger than the others
    w[:4] *= 12
    fits = {
        s: parse(f"trellis:bits=2{s}").fit(w, stats) for s in ("", ",hadamard=any", ",hadamard=any,rotate_outputs=true")
    }
    two, known, both = (output_error(q, w, stats) for q in fits.values())
    assert known < 0.8 * two
    assert both < two
    tensor = fits[",hadamard=any,rotate_outputs=true"]
    assert isinstance(tensor, RotatedTensor)
    assert tensor.outputs is not None
    assert (tensor.rotation.block, tensor.outputs.block) == (72, 36)


def test_scales_of_rotated_outputs_train() -> None:
    w, stats = weight(40, 72), correlated(72)
    start = Trellis(bits=2, rotate_outputs=True).fit(w, stats)
    module = trainable(start, w, "all")
    assert isinstance(module, ScaleTuner), "a scale belongs to no output"
    assert torch.allclose(module(), start.dequantize(), rtol=1e-4, atol=1e-6)
    module().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters())
    assert module.export().spec() == start.spec()


def test_matrices_of_one_input_are_rotated_alike_and_share_no_memory() -> None:
    stats = correlated(64)
    a, b = (Trellis().fit(weight(32, 64, seed), stats) for seed in (1, 2))
    assert isinstance(a, RotatedTensor)
    assert isinstance(b, RotatedTensor)
    assert a.rotation.equal(b.rotation)
    assert a.rotation.packed.data_ptr() != b.rotation.packed.data_ptr()


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        ("trellis:bits=5", "trellis has 1, 1.5, 2, 2.5, 3, 3.5, 4 bits, got 5"),
        ("trellis:bits=2.5,code=mul1", "code=mul1 needs whole bits, got 2.5"),
        ("trellis:damp=2", "damp must be 0 to 1"),
        ("trellis:rotate=false,hadamard=any", "rotate=false leaves nothing for rotate_outputs and hadamard"),
        ("trellis:hadamard=4", "hadamard must be 'two' or 'any'"),
        ("trellis:group=64", "scheme 'trellis' has no setting 'group'"),
        ("trellis:guidance=2", "guidance must be 0 to 1"),
        ("trellis:code=x", "code must be 'auto' or 'pair' or 'mul1'"),
    ],
)
def test_bad_settings_get_a_sentence(scheme: str, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        parse(scheme)


def test_without_statistics_it_says_what_it_needs() -> None:
    with pytest.raises(SchemeError, match="trellis"):
        Trellis().fit(weight(32, 64))


def test_compensation_of_earlier_layers_is_taken_in_the_rotated_basis() -> None:
    K = 64
    stats = correlated(K)
    moved = stats_of(stats.hessian, cross=stats.hessian * 1.1)  # the full model's inputs are larger by a tenth
    w = weight(32, K)
    q = Trellis(bits=4, damp=0.0001).fit(w, moved)
    assert output_error(q, 1.1 * w, stats) < 0.3 * output_error(q, w, stats)


@pytest.mark.parametrize("bits", [1.5, 3])
def test_the_fast_estimate_for_a_search_is_near_the_error(bits: float) -> None:
    w, stats = weight(64, 128), correlated(128)
    quantizer = Trellis(bits=bits)
    estimate = quantizer.row_errors(w, torch.arange(64), factor(stats.hessian, 0.2, act_order=True))
    error = w - quantizer.fit(w, stats).dequantize()
    a, b = (float(((e @ stats.hessian) * e).sum()) for e in (estimate, error))
    assert abs(a / b - 1) < 0.15, (a, b)


def test_auto_chooses_among_trellis_codes_only_where_quality_is_preferred() -> None:
    assert not any(isinstance(s, Trellis) for s in parse("auto:bits=2.35").settings())
    chosen = parse("auto:bits=2.35,prefer=quality,guidance=0.5").settings()
    assert {s.bits for s in chosen if isinstance(s, Trellis)} == set(BITS)
    assert all(s.guidance == 0.5 for s in chosen if isinstance(s, Trellis))


def test_auto_without_its_search_takes_as_many_bits_of_a_trellis_as_fit() -> None:
    w, stats = weight(64, 256), correlated(256)
    for bits, of_trellis in ((2.35, 2.0), (2.9, 2.5), (4.35, 4.0)):
        quantizer = parse(f"auto:bits={bits},prefer=quality,search=false")
        found = quantizer.fit(w, stats)
        assert isinstance(found, RotatedTensor)
        assert found.bits == of_trellis
        assert bits_per_weight(found) <= bits
        assert found.spec() == quantizer.storage((64, 256))
    for other in ("auto:bits=2.35,search=false", "auto:bits=6,prefer=quality,search=false"):
        assert not isinstance(parse(other).fit(w, stats), RotatedTensor)


def test_row_scales_train_and_codes_stay() -> None:
    w, stats = weight(64, 128), correlated(128)
    start = Trellis().fit(w, stats)
    module = trainable_weight(start, w)
    assert module is not None
    assert torch.allclose(module(), start.dequantize(), rtol=1e-5, atol=1e-7)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        (module() - 1.1 * start.dequantize()).square().sum().backward()
        optimizer.step()
    trained = module.export()
    assert torch.equal(trained.tensors()["codes"], start.tensors()["codes"])
    ratio = trained.scales()["scale"].float() / start.scales()["scale"].float()
    assert (ratio - 1.1).abs().max() < 0.03
