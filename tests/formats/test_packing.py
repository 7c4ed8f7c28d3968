"""Codes to bytes and back: every bit in the place that the docstring of `packing` gives it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle.formats.packing import (
    pack_planes,
    pack_stream,
    pack_words,
    unpack_planes,
    unpack_signs,
    unpack_stream,
    unpack_words,
)

quick = settings(deadline=None, max_examples=80)
BITS = range(1, 9)
shapes = st.lists(st.integers(1, 5), max_size=2).flatmap(lambda lead: st.integers(1, 40).map(lambda K: (*lead, K)))


@st.composite
def codes_of(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Random codes of any shape, and how many bits each takes."""
    bits, shape, seed = draw(st.integers(1, 8)), draw(shapes), draw(st.integers(0, 2**31))
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, shape, generator=random, dtype=torch.uint8), bits


@quick
@given(codes_of())
def test_pack_unpack_planes_is_exact(case: tuple[Tensor, int]) -> None:
    codes, bits = case
    K = codes.shape[-1]
    planes = pack_planes(codes, bits)
    assert planes.dtype == torch.uint8
    assert planes.shape == (bits, *codes.shape[:-1], -(-K // 8))
    assert torch.equal(unpack_planes(planes, K), codes)


@quick
@given(codes_of())
def test_pack_unpack_stream_is_exact(case: tuple[Tensor, int]) -> None:
    codes, bits = case
    G = codes.shape[-1]
    stream = pack_stream(codes, bits)
    assert stream.dtype == torch.uint8
    assert stream.shape == (*codes.shape[:-1], -(-G * bits // 8))
    assert torch.equal(unpack_stream(stream, bits, G), codes)


@quick
@given(codes_of())
def test_every_plane_bit_is_where_the_layout_says(case: tuple[Tensor, int]) -> None:
    codes, bits = case
    rows = codes.reshape(-1, codes.shape[-1]).tolist()
    planes = pack_planes(codes, bits).reshape(bits, len(rows), -1).tolist()
    for n, row in enumerate(rows):
        for p in range(bits):
            number = int.from_bytes(bytes(planes[p][n]), "little")  # bit k belongs to input k, padding above it is 0
            assert number == sum(((code >> (bits - 1 - p)) & 1) << k for k, code in enumerate(row))


@quick
@given(codes_of())
def test_every_stream_bit_is_where_the_layout_says(case: tuple[Tensor, int]) -> None:
    codes, bits = case
    rows = codes.reshape(-1, codes.shape[-1]).tolist()
    streams = pack_stream(codes, bits).reshape(len(rows), -1).tolist()
    for row, stream in zip(rows, streams, strict=True):
        assert int.from_bytes(bytes(stream), "little") == sum(code << (i * bits) for i, code in enumerate(row))


@quick
@given(codes_of(), st.integers(1, 8))
def test_first_planes_are_a_coarser_version(case: tuple[Tensor, int], keep: int) -> None:
    codes, bits = case
    keep = min(keep, bits)
    coarse = unpack_planes(pack_planes(codes, bits)[:keep], codes.shape[-1])
    assert torch.equal(coarse, codes >> (bits - keep))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_signs_are_minus_one_and_plus_one(dtype: torch.dtype) -> None:
    bits = torch.tensor([[1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0]], dtype=torch.uint8)
    signs = unpack_signs(pack_planes(bits, 1)[0], 11, dtype)
    assert signs.dtype == dtype
    assert torch.equal(signs, 2 * bits.to(dtype) - 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("bits", BITS)
def test_codes_of_any_integer_type_pack_alike(bits: int, dtype: torch.dtype) -> None:
    codes = torch.arange(2**bits).repeat(2)[:100]
    assert torch.equal(pack_planes(codes.to(dtype), bits), pack_planes(codes.to(torch.uint8), bits))
    assert torch.equal(pack_stream(codes.to(dtype), bits), pack_stream(codes.to(torch.uint8), bits))


@quick
@given(codes_of())
def test_words_are_the_stream_in_little_endian_integers(case: tuple[Tensor, int]) -> None:
    codes, bits = case
    G = codes.shape[-1]
    words = pack_words(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (*codes.shape[:-1], -(-G * bits // 32))
    rows = codes.reshape(-1, G).tolist()
    for row, packed in zip(rows, words.reshape(len(rows), -1).tolist(), strict=True):
        value = sum(w % 2**32 << (32 * i) for i, w in enumerate(packed))
        assert value == sum(c << (bits * i) for i, c in enumerate(row))
    assert torch.equal(unpack_words(words, bits, G), codes)
    turned = words.transpose(0, -1).contiguous().transpose(0, -1)  # any strides
    assert torch.equal(unpack_words(turned, bits, G), codes)
