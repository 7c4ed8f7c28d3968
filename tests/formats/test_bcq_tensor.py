"""Binary-coded and uniform weights: the numbers they stand for, against the plain formula."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor, bits_per_weight, nbytes
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.dense import DenseTensor

quick = settings(deadline=None, max_examples=60)
FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def uniform(
    N: int, K: int, bits: int, group: int, *, symmetric: bool = False, dtype: torch.dtype = torch.float16, seed: int = 0
) -> UniformTensor:
    random = torch.Generator().manual_seed(seed)
    C = math.ceil(K / group)
    codes = torch.randint(0, 2**bits, (N, K), generator=random, dtype=torch.uint8)
    scale = (torch.randn(N, C, generator=random).exp() * 0.01).to(dtype)
    zero = None if symmetric else torch.randint(0, 2**bits, (N, C), generator=random, dtype=torch.uint8)
    return UniformTensor.from_codes(codes, bits, scale, zero, group)


def bcq(
    N: int, K: int, bits: int, group: int, *, bias: bool = True, dtype: torch.dtype = torch.float16, seed: int = 0
) -> BCQTensor:
    random = torch.Generator().manual_seed(seed)
    C = math.ceil(K / group)
    codes = torch.randint(0, 2**bits, (N, K), generator=random, dtype=torch.uint8)
    alpha = torch.randn(bits, N, C, generator=random).to(dtype)
    z = torch.randn(N, C, generator=random).to(dtype) if bias else None
    return BCQTensor.from_codes(codes, alpha, z, group)


def bit(planes: Tensor, p: int, n: int, k: int) -> int:
    return (int(planes[p, n, k // 8]) >> (k % 8)) & 1


def bcq_formula(w: BCQTensor) -> Tensor:
    """Return z + sum_p alpha_p b_p, one weight after the other, in f64."""
    N, K = w.shape
    out = torch.zeros(N, K, dtype=torch.float64)
    for n in range(N):
        for k in range(K):
            c = k // w.group
            terms = [float(w.alpha[p, n, c]) * (2 * bit(w.planes, p, n, k) - 1) for p in range(w.bits)]
            out[n, k] = math.fsum([*terms, 0.0 if w.z is None else float(w.z[n, c])])
    return out


def uniform_formula(w: UniformTensor) -> Tensor:
    """Return scale (q - zero), one weight after the other, in f64."""
    N, K = w.shape
    out = torch.zeros(N, K, dtype=torch.float64)
    for n in range(N):
        stream = None if w.zero is None else int.from_bytes(bytes(w.zero[n].tolist()), "little")
        for k in range(K):
            c = k // w.group
            q = sum(bit(w.planes, p, n, k) << (w.bits - 1 - p) for p in range(w.bits))
            zero = 2 ** (w.bits - 1) if stream is None else (stream >> (c * w.bits)) % 2**w.bits
            out[n, k] = float(w.scale[n, c]) * (q - zero)
    return out


@st.composite
def dimensions(draw: st.DrawFn) -> dict[str, Any]:
    """N, K, bits and a group that need not divide K."""
    K = draw(st.integers(1, 37))
    sizes = {"N": draw(st.integers(1, 4)), "K": K, "bits": draw(st.integers(1, 8))}
    return {**sizes, "group": draw(st.integers(1, K)), "seed": draw(st.integers(0, 2**31))}


@quick
@given(dimensions(), st.booleans(), st.sampled_from(FLOATS))
def test_bcq_dequantize_matches_the_formula(d: dict[str, Any], bias: bool, dtype: torch.dtype) -> None:
    w = bcq(**d, bias=bias, dtype=dtype)
    want = bcq_formula(w)
    torch.testing.assert_close(w.dequantize(torch.float64), want, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(w.dequantize().double(), want, rtol=1e-5, atol=1e-5)
    assert w.dequantize(torch.float16).dtype == torch.float16


@quick
@given(dimensions(), st.booleans(), st.sampled_from(FLOATS))
def test_uniform_dequantize_matches_the_formula(d: dict[str, Any], symmetric: bool, dtype: torch.dtype) -> None:
    w = uniform(**d, symmetric=symmetric, dtype=dtype)
    want = uniform_formula(w)
    assert torch.equal(w.dequantize(torch.float64), want)
    torch.testing.assert_close(w.dequantize().double(), want, rtol=1e-6, atol=0)
    assert w.dequantize(torch.bfloat16).dtype == torch.bfloat16


@quick
@given(dimensions(), st.booleans(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_planes_of_a_uniform_grid_reproduce_it_exactly(d: dict[str, Any], symmetric: bool, dtype: torch.dtype) -> None:
    w = uniform(**d, symmetric=symmetric, dtype=dtype)
    as_planes = w.to_bcq()
    assert torch.equal(as_planes.planes, w.planes)
    for wide in (torch.float32, torch.float64):
        assert torch.equal(as_planes.dequantize(wide), w.dequantize(wide))


@pytest.mark.parametrize("scale", [2.0**-24, 6.0e-5, 1.0, 65504.0], ids=lambda s: f"scale={s:.3g}")
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("symmetric", [False, True])
def test_planes_are_exact_for_every_code_and_zero_point(bits: int, symmetric: bool, scale: float) -> None:
    codes = torch.arange(2**bits, dtype=torch.uint8).repeat(2**bits, 1)  # every code with every zero point
    zero = None if symmetric else torch.arange(2**bits, dtype=torch.uint8)[:, None]
    scales = torch.full((2**bits, 1), scale).half()
    w = UniformTensor.from_codes(codes, bits, scales, zero, 2**bits)
    assert torch.equal(w.to_bcq().dequantize(), w.dequantize())


def test_planes_of_a_grid_with_f32_scales_are_within_rounding() -> None:
    w = uniform(5, 40, 4, 16, dtype=torch.float32)
    torch.testing.assert_close(w.to_bcq().dequantize(), w.dequantize(), rtol=1e-6, atol=1e-7)


@quick
@given(dimensions(), st.booleans(), st.data())
def test_rows_equals_slicing(d: dict[str, Any], flag: bool, data: st.DataObject) -> None:
    N = d["N"]
    start, stop = sorted((data.draw(st.integers(0, N)), data.draw(st.integers(0, N))))
    some = torch.tensor(data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=5)))  # any order, repeats
    for w in (bcq(**d, bias=flag), uniform(**d, symmetric=flag), DenseTensor(torch.randn(N, d["K"]))):
        for which in (slice(start, stop), some):
            part = w.rows(which)
            assert part.format == w.format
            assert part.shape == (len(range(N)[which]) if isinstance(which, slice) else len(some), d["K"])
            assert torch.equal(part.dequantize(), w.dequantize()[which])


def same(a: QuantTensor, b: QuantTensor) -> bool:
    """Tell whether two encoded matrices are the same, bit for bit."""
    return a.spec() == b.spec() and all(torch.equal(t, b.tensors()[name]) for name, t in a.tensors().items())


EXAMPLES = {
    "bcq": bcq(3, 21, 3, 8),
    "bcq-no-z": bcq(3, 21, 3, 8, bias=False),
    "uniform": uniform(3, 21, 3, 8),
    "uniform-symmetric": uniform(3, 21, 3, 8, symmetric=True),
    "dense": DenseTensor(torch.randn(3, 21).half()),
}
every_format = pytest.mark.parametrize("w", EXAMPLES.values(), ids=EXAMPLES.keys())


@every_format
def test_parts_round_trip(w: QuantTensor) -> None:
    assert sorted(w.parts(w.spec())) == sorted(w.tensors())
    again = type(w).from_parts(w.spec(), w.tensors())
    assert same(again, w)
    assert torch.equal(again.dequantize(), w.dequantize())


@every_format
def test_answers_the_protocol(w: QuantTensor) -> None:
    assert isinstance(w, QuantTensor)
    assert w.device == torch.device("cpu")
    assert same(w.to("cpu"), w)
    assert w.spec()["shape"] == list(w.shape) == [3, 21]


@every_format
def test_unknown_and_missing_keys_are_refused(w: QuantTensor) -> None:
    with pytest.raises(FormatError, match="does not know the key 'sparsity'"):
        type(w).from_parts({**w.spec(), "sparsity": 2}, w.tensors())
    for key in set(w.spec()) - {"format"}:
        lacking = {k: v for k, v in w.spec().items() if k != key}
        with pytest.raises(FormatError, match=f"needs the key '{key}'"):
            type(w).from_parts(lacking, w.tensors())


@every_format
def test_missing_misshapen_and_mistyped_tensors_are_refused(w: QuantTensor) -> None:
    for name, t in w.tensors().items():
        wrong_type = t.to(torch.int32)
        wrong_shape = torch.cat([t, t[..., :1]], dim=-1)
        for bad in (wrong_type, wrong_shape, t.flatten()):
            with pytest.raises(FormatError, match=f"'{name}' should be"):
                type(w).from_parts(w.spec(), {**w.tensors(), name: bad})
        with pytest.raises(FormatError, match=f"'{name}' is missing"):
            type(w).from_parts(w.spec(), {k: v for k, v in w.tensors().items() if k != name})


@every_format
@pytest.mark.parametrize("shape", [[3], [3, 0], [3, -21], [3.0, 21], "3x21", [3, 21, 1], None, [True, 21]])
def test_shapes_that_are_no_shapes_are_refused(w: QuantTensor, shape: object) -> None:
    with pytest.raises(FormatError, match="two positive integers"):
        type(w).from_parts({**w.spec(), "shape": shape}, w.tensors())


@pytest.mark.parametrize("w", [EXAMPLES["bcq"], EXAMPLES["uniform"]], ids=["bcq", "uniform"])
@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("bits", 0, "bits must be 1 to 8, got 0"),
        ("bits", 9, "bits must be 1 to 8, got 9"),
        ("bits", "3", "bits must be 1 to 8, got '3'"),
        ("group", 0, "group must be 1 to K = 21, got 0"),
        ("group", 22, "group must be 1 to K = 21, got 22"),
        ("group", 8.0, r"group must be 1 to K = 21, got 8\.0"),
        ("bits", 4, "'planes' should be"),
        ("group", 4, "should be"),
    ],
)
def test_specs_that_do_not_fit_are_refused(w: QuantTensor, key: str, value: object, sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        type(w).from_parts({**w.spec(), key: value}, w.tensors())


@every_format
def test_bits_per_weight_counts_every_byte(w: QuantTensor) -> None:
    size = sum(len(t.contiguous().view(torch.uint8).flatten()) for t in w.tensors().values())
    assert nbytes(w) == size
    assert bits_per_weight(w) == 8 * size / (3 * 21)


@pytest.mark.parametrize("group", [8, 32, 64])
@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_per_weight_is_the_formula_where_sizes_divide(bits: int, group: int) -> None:
    N, K = 4, 512  # 8 | K, G | K, and the zero points of a row fill whole bytes
    assert bits_per_weight(bcq(N, K, bits, group)) == bits + 16 * (bits + 1) / group
    assert bits_per_weight(bcq(N, K, bits, group, bias=False)) == bits + 16 * bits / group
    assert bits_per_weight(uniform(N, K, bits, group)) == bits + (16 + bits) / group
    assert bits_per_weight(uniform(N, K, bits, group, symmetric=True)) == bits + 16 / group


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 16), (torch.bfloat16, 16), (torch.float32, 32)])
def test_dense_costs_its_type(dtype: torch.dtype, bits: int) -> None:
    w = DenseTensor(torch.randn(5, 9).to(dtype))
    assert bits_per_weight(w) == w.bits == bits
    assert w.group == 9
    assert torch.equal(w.dequantize(dtype), w.weight)
