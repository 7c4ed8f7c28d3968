"""Mixed 2/4-bit matrices: packing is exact for any shape, and what does not fit together is refused with a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import share_of
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import bits_per_weight, nbytes
from crelle.formats.mixed import GROUPS, MixedTensor
from crelle.formats.packing.mixed import MixedCodes, Sizes, can_be_aligned, pack, packed_shapes, scale_widths, unpack


def spec_of(N: int, K: int, group: int = 16, share: float = 0.25, outliers: int = 0, block: int = 16) -> dict[str, Any]:
    C = -(-K // group)
    four = round(share * C)
    packing = "aligned" if can_be_aligned(group, C - four, four) else "general"
    sizes = {"group": group, "packing": packing, "block": block, "four": four, "outliers": outliers}
    return {"format": "mixed", "shape": [N, K], **sizes}


def random(spec: dict[str, Any], seed: int = 0) -> MixedTensor:
    return MixedTensor.random(spec, torch.Generator().manual_seed(seed))


def dequantized(w: MixedTensor) -> Tensor:
    """The formula of the format, weight by weight, in f64."""
    codes, mask = w.codes(), w.four.tolist()
    two, four = iter(range(len(mask))), iter(range(len(mask)))
    out = torch.zeros(w.N, w.K, dtype=torch.float64)
    for c, is_four in enumerate(mask):
        at = next(four) if is_four else next(two)
        for k in range(c * w.G, min((c + 1) * w.G, w.K)):
            for n in range(w.N):
                if is_four:
                    assert w.row_scale is not None
                    assert w.row_zero is not None
                    q, z, s = codes.codes4[n, at, k % w.G], w.row_zero[n], float(w.row_scale[n])
                else:
                    b = n // w.block
                    s = float(w.second_scale[b, at]) * (int(codes.scale_codes[n, at]) + int(codes.second_zeros[b, at]))
                    q, z = codes.codes2[n, at, k % w.G], (int(codes.zeros[n, at]) + 1) / 2
                out[n, k] = s * (int(q) - float(z))
    if w.outlier_values is not None:
        for n, k, v in zip(*(t.tolist() for t in w.outlier_places()), w.outlier_values.tolist(), strict=True):
            out[n, k] += v
    return out


@settings(deadline=None, max_examples=share_of(60))
@given(
    N=st.integers(1, 40),
    C=st.integers(1, 12),
    cut=st.integers(0, 7),
    group=st.sampled_from(GROUPS),
    share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_shape_is_stored_and_read_exactly(N: int, C: int, cut: int, group: int, share: float, seed: int) -> None:
    K = C * group - cut
    spec = spec_of(N, K, group, share)
    if spec["four"] < C:
        whole_groups = (C - spec["four"]) * N  # at least so many weights lie in 2-bit groups
        spec["outliers"] = min(seed % 5, whole_groups)
    w = random(spec, seed)
    again = MixedTensor.from_parts(w.spec(), w.tensors())
    assert w.spec() == spec
    assert MixedTensor.parts(spec) == list(w.tensors())
    torch.testing.assert_close(w.dequantize(torch.float64), dequantized(w), rtol=1e-12, atol=0)
    assert torch.equal(again.dequantize(), w.dequantize())
    assert 0 <= N * MixedTensor.row_bits(spec) - 8 * nbytes(w) < N  # a fraction of a bit for each row


@settings(deadline=None, max_examples=40)
@given(N=st.integers(1, 33), C4=st.integers(1, 5), seed=st.integers(0, 999))
def test_both_packings_hold_the_same_codes(N: int, C4: int, seed: int) -> None:
    random_codes = torch.Generator().manual_seed(seed)

    def codes(top: int, *shape: int) -> Tensor:
        return torch.randint(top, shape, generator=random_codes, dtype=torch.uint8)

    s = Sizes(N, -(-N // 16), 3 * C4, C4, 16)
    tops = torch.tensor(scale_widths("aligned", s.C2))
    scale_codes = codes(256, N, s.C2) % (2**tops).to(torch.uint8)
    given_codes = MixedCodes(
        codes(4, N, s.C2, 16), codes(16, N, C4, 16), scale_codes, codes(4, N, s.C2), codes(16, s.B, s.C2)
    )
    for packing in ("general", "aligned"):
        packed = pack(packing, given_codes)  # type: ignore[arg-type]
        assert {n: (tuple(t.shape), t.dtype) for n, t in packed.items()} == packed_shapes(packing, s)  # type: ignore[arg-type]
        found = unpack(packing, s, packed)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(found, given_codes, strict=True))


def test_average_bits_are_those_of_the_paper() -> None:
    """Equation (10): 2.84 bits with a quarter of 4-bit groups; 2.91 with 0.2% outliers. Real bytes, a real shape."""
    N = K = 4096
    row = 24 / K  # scale and zero of the 4-bit groups, which the equation leaves out
    aligned = 0.75 * (2 + 16 / 48 + 24 / 256) + 0.25 * 4  # two of three scales have 3 bits, second-order zeros a byte
    assert bits_per_weight(random(spec_of(N, K))) == pytest.approx(aligned + row, abs=1e-3)
    general = 0.75 * (2 + 6 / 16 + 20 / 256) + 0.25 * 4
    spec = {**spec_of(N, K), "packing": "general"}
    assert bits_per_weight(random(spec)) == pytest.approx(general + row, abs=1e-3)
    assert general == pytest.approx(2.84, abs=0.005)
    spec["outliers"] = round(0.002 * N * K)
    assert bits_per_weight(random(spec)) == pytest.approx(2.91, abs=0.01)


def test_rows_are_those_of_the_whole() -> None:
    w = random(spec_of(50, 90, outliers=40))
    full = w.dequantize()
    index = torch.tensor([49, 3, 3, 17])
    for which in (slice(None), slice(16, 40), slice(5, 9), slice(32, 50), index):
        part = w.rows(which)
        assert torch.equal(part.dequantize(), full[which])
        assert torch.equal(MixedTensor.from_parts(part.spec(), part.tensors()).dequantize(), full[which])
    assert w.rows(slice(16, 40)).block == 16
    assert w.rows(slice(5, 9)).block == 1


def test_gradients_reach_every_scale() -> None:
    w = random(spec_of(20, 64, outliers=9))
    scales = {name: t.float().requires_grad_() for name, t in w.scales().items()}
    assert set(scales) == {"second_scale", "row_scale", "outlier_values"}
    w.with_scales(scales).dequantize().square().sum().backward()
    assert all(t.grad is not None and (t.grad != 0).any() for t in scales.values())


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name].clone())}


def put(at: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t.view(-1)[at] = value
        return t

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("outlier_rows", put(3, 1000)), "must ascend from 0 to 12"),
        (changed("outlier_rows", put(0, 1)), "must ascend from 0 to 12"),
        (changed("outlier_rows", put(-1, 11)), "must ascend from 0 to 12"),
        (changed("outlier_rows", put(2, -5)), "must ascend from 0 to 12"),
        (changed("outlier_columns", put(0, 64)), "column 64 of 64"),
        (changed("outlier_columns", put(0, -1)), "column 65535 of 64"),
        (changed("outlier_columns", lambda t: t * 0), "outliers must ascend"),
        (changed("outlier_columns", lambda t: t[1:]), "'outlier_columns' should be int16 [12]"),
        (changed("outlier_values", lambda t: t.double()), "'outlier_values' should be float16 or float32 [12]"),
        (changed("four", put(0, 2)), "must mark 1 groups"),
        (changed("four", lambda t: 1 - t), "must mark 1 groups"),
        (changed("words", lambda t: t[:, :, :3]), "'words' should be int32 [20, 1, 4]"),
        (changed("first", lambda t: t.int()), "'first' should be int16"),
        (changed("second_zeros", put(0, 16)), "'second_zeros' contains a value above 15"),
        (changed("row_zero", put(0, 16)), "'row_zero' contains a value above 15"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != "halves"}, "the tensor 'halves' is missing"),
    ],
)
def test_corrupted_tensors_are_refused(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], words: str) -> None:
    w = random(spec_of(20, 64, outliers=12))
    with pytest.raises(FormatError) as caught:
        MixedTensor.from_parts(w.spec(), change(w.tensors()))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("group", 24, "one of 8, 16, 32, 64"),
        ("group", True, "one of 8, 16, 32, 64"),
        ("packing", "tight", "one of general, aligned"),
        ("four", 3, "a quarter of the groups in 4 bits; got 3 of 4 groups of 16"),
        ("four", 5, "from 0 to 4"),
        ("outliers", -1, "a number from 0"),
        ("block", 0, "positive number of rows"),
        ("shape", [20, 0], "two positive integers"),
        ("more", 1, "does not know the key 'more'"),
    ],
)
def test_bad_specs_are_refused(key: str, value: object, words: str) -> None:
    w = random(spec_of(20, 64, outliers=12))
    with pytest.raises(FormatError) as caught:
        MixedTensor.from_parts({**w.spec(), key: value}, w.tensors())
    assert words in str(caught.value)
