"""Affine and nested grids: the numbers they stand for, against the plain formula."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.affine import AffineTensor, NestedTensor
from crelle.formats.base import QuantTensor, bits_per_weight

quick = settings(deadline=None, max_examples=60)
FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def codes_and(
    *per_group: int, N: int, K: int, bits: int, group: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes [N, K], scales and lows [*per_group, N, C]."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (N, K), generator=random, dtype=torch.uint8)
    size = (*per_group, N, math.ceil(K / group))
    scale = (torch.randn(size, generator=random).exp() * 0.01).to(dtype)
    return codes, scale, (torch.randn(size, generator=random) * 0.1).to(dtype)


def affine(
    N: int, K: int, bits: int, group: int, *, seed: int = 0, dtype: torch.dtype = torch.float16
) -> tuple[AffineTensor, Tensor]:
    codes, scale, low = codes_and(N=N, K=K, bits=bits, group=group, seed=seed, dtype=dtype)
    return AffineTensor.from_codes(codes, bits, scale, low, group), codes


def nested(
    N: int, K: int, precisions: tuple[int, ...], group: int, *, seed: int = 0, dtype: torch.dtype = torch.float16
) -> tuple[NestedTensor, Tensor]:
    codes, scale, low = codes_and(len(precisions), N=N, K=K, bits=precisions[-1], group=group, seed=seed, dtype=dtype)
    return NestedTensor.from_codes(codes, precisions, scale, low, group), codes


def formula(codes: Tensor, scale: Tensor, low: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return low + scale q, one weight after the other."""
    N, K = codes.shape
    out = torch.empty(N, K, dtype=dtype)
    for n in range(N):
        for k in range(K):
            out[n, k] = low[n, k // group].to(dtype) + scale[n, k // group].to(dtype) * codes[n, k].to(dtype)
    return out


@st.composite
def dimensions(draw: st.DrawFn) -> dict[str, Any]:
    K = draw(st.integers(1, 37))
    sizes = {"N": draw(st.integers(1, 4)), "K": K, "group": draw(st.integers(1, K))}
    return {**sizes, "seed": draw(st.integers(0, 2**31)), "dtype": draw(st.sampled_from(FLOATS))}


@quick
@given(dimensions(), st.integers(1, 8))
def test_affine_is_low_plus_scale_times_code(d: dict[str, Any], bits: int) -> None:
    w, codes = affine(bits=bits, **d)
    assert torch.equal(w.codes(), codes)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(w.dequantize(dtype), formula(codes, w.scale, w.low, w.group, dtype))


@quick
@given(dimensions(), st.sets(st.integers(1, 8), min_size=1, max_size=4))
def test_each_precision_of_a_nested_tensor_is_its_leading_planes(d: dict[str, Any], chosen: set[int]) -> None:
    precisions = tuple(sorted(chosen))
    w, codes = nested(precisions=precisions, **d)
    for i, p in enumerate(precisions):
        part = w.at(p)
        assert isinstance(part, AffineTensor)
        assert (part.bits, part.group, part.shape) == (p, w.group, w.shape)
        assert part.planes.data_ptr() == w.planes.data_ptr()  # a view
        top = codes >> (precisions[-1] - p)
        assert torch.equal(part.dequantize(), formula(top, w.scale[i], w.low[i], w.group, torch.float32))
    assert torch.equal(w.dequantize(), w.at(precisions[-1]).dequantize())


def test_a_precision_that_is_not_there_is_refused() -> None:
    w, _ = nested(3, 21, (2, 3, 4), 8)
    with pytest.raises(UnsupportedError, match="supports 2, 3, 4 bits, not 5"):
        w.at(5)


EXAMPLES: dict[str, QuantTensor] = {"affine": affine(3, 21, 3, 8)[0], "nested": nested(3, 21, (2, 4), 8)[0]}
both = pytest.mark.parametrize("w", EXAMPLES.values(), ids=EXAMPLES.keys())


@both
@pytest.mark.parametrize("which", [slice(1, 3), slice(0, 0), torch.tensor([2, 0, 2])], ids=str)
def test_rows_equals_slicing(w: QuantTensor, which: slice | Tensor) -> None:
    part = w.rows(which)
    assert type(part) is type(w)
    assert torch.equal(part.dequantize(), w.dequantize()[which])


@both
def test_parts_round_trip(w: QuantTensor) -> None:
    assert isinstance(w, QuantTensor)
    assert sorted(w.parts(w.spec())) == sorted(w.tensors())
    again = type(w).from_parts(w.spec(), w.tensors())
    assert again.spec() == w.spec() == w.to("cpu").spec()
    assert all(torch.equal(t, again.tensors()[name]) for name, t in w.tensors().items())


@both
def test_parts_that_do_not_fit_are_refused(w: QuantTensor) -> None:
    with pytest.raises(FormatError, match="does not know the key 'sparsity'"):
        type(w).from_parts({**w.spec(), "sparsity": 2}, w.tensors())
    for key in set(w.spec()) - {"format"}:
        with pytest.raises(FormatError, match=f"needs the key '{key}'"):
            type(w).from_parts({k: v for k, v in w.spec().items() if k != key}, w.tensors())
    for name, t in w.tensors().items():
        for bad in (t.to(torch.int32), torch.cat([t, t[..., :1]], dim=-1), t.flatten()):
            with pytest.raises(FormatError, match=f"'{name}' should be"):
                type(w).from_parts(w.spec(), {**w.tensors(), name: bad})
        with pytest.raises(FormatError, match=f"'{name}' is missing"):
            type(w).from_parts(w.spec(), {k: v for k, v in w.tensors().items() if k != name})


@pytest.mark.parametrize("precisions", [[], [4, 2], [2, 2, 4], [0, 4], [2, 3], "24", 4, [2.0, 4], None])
def test_precisions_that_make_no_sense_are_refused(precisions: object) -> None:
    w = EXAMPLES["nested"]
    with pytest.raises(FormatError, match=r"precisions must ascend to the number of planes, 4"):
        NestedTensor.from_parts({**w.spec(), "precisions": precisions}, w.tensors())


def test_bits_per_weight_is_the_formula_where_sizes_divide() -> None:
    assert bits_per_weight(affine(4, 128, 3, 32)[0]) == 3 + 32 / 32
    assert bits_per_weight(nested(4, 128, (2, 3, 4), 32)[0]) == 4 + 3 * 32 / 32
