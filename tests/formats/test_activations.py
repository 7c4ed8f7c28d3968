"""Quantized activations: the integers are those of the formula, and NaN, zeros and tiny values do what is stated."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.activations import ActivationSpec, least_and_top


def by_hand(x: list[float], bits: int, clip: float) -> tuple[list[int], float]:
    """The formula of a group, value by value, in numpy's f32."""
    least, top = least_and_top(bits)
    values = np.array(x, dtype=np.float32)
    scale = np.float32(np.abs(values).max() * np.float32(clip / top))
    if scale < 2.0**-100:
        return [0] * len(x), 0.0
    inverse = np.float32(1) / scale
    return [int(min(top, max(least, np.rint(v * inverse)))) for v in values], float(scale)


@settings(deadline=None, max_examples=60)
@given(
    K=st.integers(1, 70),
    group=st.sampled_from([1, 4, 16, 33, 128]),
    share=st.floats(0, 1),
    bits=st.sampled_from([3, 4, 8]),
    clip=st.sampled_from([1.0, 0.9, 0.7]),
    seed=st.integers(0, 99),
)
def test_the_integers_are_those_of_the_formula(
    K: int, group: int, share: float, bits: int, clip: float, seed: int
) -> None:
    spec = ActivationSpec(bits, group, round(share * K), clip=clip)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 20 - 10)
    found = spec.quantize(x)
    slices = spec.slices(K)
    assert sorted(k for s in slices for k in range(s.start, s.stop)) == list(range(K))
    assert found.scales.shape == (3, len(slices))
    for i, s in enumerate(slices):
        outlier = s.start >= K - spec.outliers
        assert s.stop - s.start <= group
        for m in range(3):
            codes, scale = by_hand(x[m, s].tolist(), 8 if outlier else bits, 1.0 if outlier else clip)
            assert found.codes[m, s].tolist() == codes
            assert float(found.scales[m, i]) == scale
    error = (spec.dequantize(found) - x).abs()
    if clip == 1.0:
        width = torch.tensor([s.stop - s.start for s in slices])
        assert bool((error <= 0.5001 * found.scales.repeat_interleave(width, 1)).all())


def test_halves_go_to_the_even_integer_and_codes_stay_in_range() -> None:
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -7.0]])
    assert ActivationSpec(4, 8).quantize(x).codes.tolist() == [[7, 0, 2, 2, 0, -2, -7]]
    clipped = ActivationSpec(4, 8, clip=0.5).quantize(x).codes
    assert (int(clipped.min()), int(clipped.max())) == (-8, 7)
    assert int(ActivationSpec(8, 8, clip=0.5).quantize(x).codes.min()) == -127


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_reach_the_scale_of_their_group(bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 5] = bad
    found = ActivationSpec(4, 4).quantize(x)
    assert found.scales.isfinite().tolist() == [[True, True], [True, False]]
    assert not found.codes[1, 4:].any()
    assert found.codes[0].tolist() == [7] * 8


def test_zeros_and_denormals_are_zeros() -> None:
    x = torch.tensor([[0.0, 0.0, 1e-40, -1e-42, 1e-25, 0.0]])
    found = ActivationSpec(4, 2).quantize(x)
    assert found.codes.tolist() == [[0, 0, 0, 0, 7, 0]]
    assert (found.scales[0] == 0).tolist() == [True, True, False]
    assert ActivationSpec(4, 2).quantize(torch.empty(0, 6)).codes.shape == (0, 6)


def test_outliers_may_stay_floats() -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    spec = ActivationSpec(4, 8, outliers=5, outlier_bits=16)
    found = spec.quantize(x)
    assert found.floats is not None
    assert torch.equal(found.floats, x[:, 15:])
    assert torch.equal(spec.dequantize(found)[:, 15:], x[:, 15:])


def test_rounding_keeps_the_order_and_passes_the_gradient() -> None:
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
    perm = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    spec = ActivationSpec(4, 8, outliers=4)
    seen = spec.round(x, perm)
    flat: Tensor = x.reshape(6, 24)[:, perm]
    torch.testing.assert_close(seen.reshape(6, 24)[:, perm], spec.dequantize(spec.quantize(flat)))
    x.requires_grad_()
    spec.round(x, perm).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 5}, "3, 4 or 8 bits"),
        ({"bits": "4"}, "3, 4 or 8 bits"),
        ({"outlier_bits": 4}, "3, 4 or 8 bits"),
        ({"group": 0}, "at least one channel"),
        ({"outliers": -1}, "at least one channel"),
        ({"clip": 0.0}, "above 0 and at most 1"),
        ({"clip": math.nan}, "above 0 and at most 1"),
        ({"clip": "1"}, "above 0 and at most 1"),
        ({"more": 1}, "'activation' should have"),
        ({"hadamard": 1}, "'hadamard' should be true or false"),
    ],
)
def test_bad_specs_are_sentences(change: dict[str, object], words: str) -> None:
    good = ActivationSpec(4, 128, 16, clip=0.9).to_json()
    assert ActivationSpec.from_json(good, "test") == ActivationSpec(4, 128, 16, clip=0.9)
    assert ActivationSpec.from_json(None, "test") is None
    with pytest.raises(FormatError, match=words):
        ActivationSpec.from_json(good | change, "test")
    with pytest.raises(FormatError, match="'activation' should have"):
        ActivationSpec.from_json([1], "test")


def hadamard_matrix(n: int) -> Tensor:
    """By its definition: the sign is the parity of the common bits of row and column."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]).double() / math.sqrt(n)


@pytest.mark.parametrize(
    ("group", "outliers", "K", "blocks"),
    [
        (128, 0, 256, [128, 128]),
        (256, 8, 264, [128, 128]),  # a block is never longer than 128
        (16, 4, 60, [16, 16, 16, 8]),  # 8 channels behind the last whole block
        (48, 0, 54, [16, 16, 16, 2, 2, 2]),  # 16 is what divides 48, 2 what divides the 6 behind
        (32, 5, 30, [1] * 25),  # no block divides 25
    ],
)
def test_blocks_of_channels_are_rotated(group: int, outliers: int, K: int, blocks: list[int]) -> None:
    spec = ActivationSpec(4, group, outliers, hadamard=True)
    assert sum(blocks) == K - outliers
    H = torch.block_diag(*[hadamard_matrix(n) for n in blocks], torch.eye(outliers).double())
    x = torch.randn(3, K, dtype=torch.float64)
    torch.testing.assert_close(spec.rotated(x), x @ H)
    torch.testing.assert_close(spec.rotated(spec.rotated(x)), x)
    plain, found = replace(spec, hadamard=False), spec.quantize(x)
    wanted = plain.quantize(spec.rotated(x.float()))
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
    torch.testing.assert_close(spec.dequantize(found), (plain.dequantize(wanted).double() @ H).float())


def test_a_large_value_costs_a_rotated_block_less() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 20
    specs = [ActivationSpec(4, 128, hadamard=h) for h in (False, True)]
    lost = [(spec.dequantize(spec.quantize(x)) - x).square().mean() for spec in specs]
    assert lost[1] < lost[0] / 4


def test_specs_without_a_rotation_are_written_as_before() -> None:
    assert "hadamard" not in ActivationSpec(4, 128).to_json()
    for spec in (ActivationSpec(4, 128), ActivationSpec(4, 128, hadamard=True)):
        assert ActivationSpec.from_json(spec.to_json(), "test") == spec
