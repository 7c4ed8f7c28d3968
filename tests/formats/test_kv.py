"""Pages of keys and values: packing is exact, errors are within half a step, bytes are what the docstring says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from crelle.errors import SchemeError
from crelle.formats.kv.codes import CLIP, pack_codes, row_bytes, unpack_codes
from crelle.formats.kv.pages import KVFormat, KVPages, dequantize, hadamard, quantize, scale_zero

quick = settings(deadline=None, max_examples=60)
formats = st.builds(
    KVFormat,
    bits=st.sampled_from([2, 3, 4, 8]),
    v_bits=st.sampled_from([0, 2, 3, 4, 8, 16]),
    group=st.sampled_from([8, 16, 32, 64, 128]),
    rotate=st.booleans(),
    center=st.booleans(),
    page=st.sampled_from([1, 8, 16, 32]),
)
HEADS = [48, 64, 80, 96, 128]


@given(fmt=formats | st.builds(KVFormat, page=st.integers(1, 64)))
def test_format_round_trips_with_its_string(fmt: KVFormat) -> None:
    assert KVFormat.parse(str(fmt)) == fmt


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        ("16", KVFormat(16)),
        (8, KVFormat(8)),
        ("kv=4", KVFormat(4)),
        ("kv4", KVFormat(4)),
        ("kv4:group=64,center=false", KVFormat(4, group=64, center=False)),
        (" kv8:page=32 ", KVFormat(8, page=32)),
        (3, KVFormat(3)),
        ("k4v2", KVFormat(4, v_bits=2)),
        ("k8v4:group=64", KVFormat(8, v_bits=4, group=64)),
        ("4,layers.0=8", KVFormat(4, overrides=((0, KVFormat(8)),))),
        ("4, layers.2=4", KVFormat(4)),
        ("k4v4", KVFormat(4)),
        (
            "16:page=8,layers.3-4=k8v2",
            KVFormat(16, page=8, overrides=((3, KVFormat(8, v_bits=2, page=8)), (4, KVFormat(8, v_bits=2, page=8)))),
        ),
    ],
)
def test_ways_of_writing_a_format(text: str | int, fmt: KVFormat) -> None:
    assert KVFormat.parse(text) == fmt
    assert KVFormat.parse(fmt) is fmt


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "one of 16, 8, 4, 3, 2, k4v2"),
        ("four", "one of 16, 8, 4, 3, 2, k4v2"),
        ("k4", "one of 16, 8, 4, 3, 2, k4v2"),
        ("v4k2", "one of 16, 8, 4, 3, 2, k4v2"),
        ("4,layers.0=5", "one of 16, 8, 4, 3, 2, k4v2"),
        ("4,layers.x=8", "'layers.x=8' should be one of"),
        ("4,layers.3-1=8", "layers.3-1 names no layer"),
        ("4,layers.0=8,layers.0-2=2", "layers.0-2 names a layer twice"),
        ("kv4:groups=32", "'groups=32' should be one of group=…, rotate=…, center=…, page=…, layers.N=…"),
        ("kv4:bits=8", "'bits=8' should be one of"),
        ("kv4:group=x", "group must be an integer"),
        ("kv4:rotate=1", "rotate must be true or false"),
        ("kv4:group=32,group=64", "given twice"),
        ("kv4:group=4", "at least 8 channels"),
        ("kv4:page=0", "1 to 4096 tokens"),
        ("kv16:group=32", "only page can be set"),
        ("kv16:center=true", "only page can be set"),
    ],
)
def test_what_is_no_format_is_refused(text: str, said: str) -> None:
    with pytest.raises(SchemeError, match=said.replace("(", r"\(")):
        KVFormat.parse(text)


def test_odd_heads_are_refused() -> None:
    with pytest.raises(SchemeError, match="a head has 63 channels"):
        KVPages.new(KVFormat(4), 1, 1, 63, torch.float16, "cpu")


@pytest.mark.parametrize(
    ("text", "head_size", "groups", "bits"),
    [
        ("kv4", 64, 2, 4.5),
        ("kv4", 128, 4, 4.5),
        ("kv4", 96, 3, 4.5),
        ("kv4", 80, 2, 4.4),
        ("kv4", 48, 1, 4 + 1 / 3),
        ("kv4:group=64", 64, 1, 4.25),
        ("kv4:group=128", 128, 1, 4.125),
        ("kv8", 64, 1, 8.25),
        ("kv8", 128, 2, 8.25),
        ("kv16", 64, 0, 16),
        ("kv3", 64, 2, 3.5),
        ("kv2", 128, 4, 2.5),
        ("k4v2", 64, 2, 3.5),
    ],
)
def test_groups_and_bits_are_as_stated(text: str, head_size: int, groups: int, bits: float) -> None:
    fmt = KVFormat.parse(text)
    assert fmt.key.groups(head_size) == fmt.value.groups(head_size) == groups
    assert fmt.bits_per_value(head_size) == pytest.approx(bits, abs=1e-9)


@pytest.mark.parametrize(
    "text", ["kv16", "kv8", "kv4", "kv3", "kv2", "kv4:group=64", "kv4:page=8", "k4v2", "k8v4", "k16v3"]
)
@pytest.mark.parametrize("head_size", HEADS)
def test_pages_take_the_bytes_that_are_stated(text: str, head_size: int) -> None:
    fmt, heads, count = KVFormat.parse(text), 3, 5
    pages = KVPages.new(fmt, count, heads, head_size, torch.float16, "cpu")
    assert pages.nbytes == count * fmt.page_bytes(heads, head_size)
    values = count * 2 * heads * fmt.page * head_size
    assert 8 * pages.nbytes / values == pytest.approx(fmt.bits_per_value(head_size))


@pytest.mark.parametrize("head_size", HEADS)
def test_four_bits_hold_three_and_a_half_times_the_tokens_of_f16(head_size: int) -> None:
    assert KVFormat(16).page_bytes(8, head_size) / KVFormat(4).page_bytes(8, head_size) >= 3.5


floats = npst.arrays("float32", (3, 48), elements=st.floats(-1000, 1000, width=32))


@quick
@given(x=floats, bits=st.sampled_from([2, 3, 4, 8]), groups=st.sampled_from([1, 2, 3]))
def test_error_is_at_most_half_a_step_and_a_step_is_what_the_range_needs(x: object, bits: int, groups: int) -> None:
    values = torch.as_tensor(x)
    codes, words = quantize(values, bits, groups)
    assert codes.shape == (3, 48 * bits // 8)
    assert codes.dtype == torch.uint8
    assert words.shape == (3, groups)
    assert words.dtype == torch.int16
    back = dequantize(codes, words, bits)
    scale, zero = scale_zero(words, bits)
    each = values.unflatten(-1, (groups, -1))
    spread = each.amax(-1).clamp(min=0) - each.amin(-1).clamp(max=0)
    coarse = 2.0**-3 if bits == 8 else 2.0**-5  # to which a scale is rounded up
    assert (scale <= spread / (2**bits - 1) * (1 + coarse) * 1.001 + 2.0**-17).all()
    assert ((zero >= 0) & (zero < 2**bits)).all()
    error = (back - values).abs().unflatten(-1, (groups, -1))
    if CLIP[bits] < 1:  # what lies outside of the codes' span is clipped
        reach = (2**bits - 1 - zero) * scale, -zero * scale
        kept = (each <= reach[0][..., None]) & (each >= reach[1][..., None])
        error = torch.where(kept, error, 0)
    # A scale is an f16: half a unit in its last place may be lacking, and below 2^-24 there is none.
    assert (error <= scale[..., None] * (0.5 + 2.0**-11 * 2**bits) + 2.0**-24 * 2**bits).all()


@quick
@given(codes=npst.arrays("uint8", (2, 3, 8)), words=npst.arrays("uint16", (2, 3, 2), elements=st.integers(0, 0xF7FF)))
def test_packed_bits_mean_what_the_layout_says(codes: object, words: object) -> None:
    """Channel i of four bits is at bit 4i; the word is eeeeemmmmmzzzzzz: checked one by one in Python's integers."""
    packed, word = torch.as_tensor(codes), torch.as_tensor(words.astype("int16"))  # type: ignore[attr-defined]
    x = dequantize(packed, word, 4)
    for at in [(0, 0), (1, 2)]:
        row = int.from_bytes(bytes(packed[at].tolist()), "little")
        for i in range(16):
            w = int(word[at][i // 8]) & 0xFFFF
            exponent, mantissa = w >> 11, (w >> 6) & 31
            scale = 2.0 ** (exponent - 15) * (1 + mantissa / 32) if exponent else 2.0**-14 * mantissa / 32
            assert x[at][i].item() == pytest.approx(scale * ((row >> 4 * i & 15) - (w & 63) / 4), rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("head_size", [*HEADS, 2, 6, 10, 20, 36])
def test_codes_are_packed_as_the_layout_says(bits: int, head_size: int) -> None:
    codes = torch.randint(0, 2**bits, (5, head_size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, row_bytes(bits, head_size))
    assert torch.equal(unpack_codes(packed, bits, head_size), codes)
    row = int.from_bytes(bytes(packed[0].tolist()), "little")
    for i, code in enumerate(codes[0].tolist()):
        if bits == 3:
            third = row >> (8 * -(-head_size // 4) + i) & 1
            assert code == (row >> 2 * i & 3) + 4 * third
        else:
            assert code == row >> bits * i & (2**bits - 1)


@pytest.mark.parametrize("text", ["k4v2", "k2v3", "k16v4", "k8v16", "kv3", "k8v4:group=16,page=5", "k3v16:page=1"])
@pytest.mark.parametrize("head_size", [64, 48, 10])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_keys_and_values_apart_come_back_from_their_own_codes(text: str, head_size: int, dtype: torch.dtype) -> None:
    fmt, heads, random = KVFormat.parse(text), 3, torch.Generator().manual_seed(0)
    pages = KVPages.new(fmt, 4, heads, head_size, dtype, "cpu")
    assert pages.nbytes == 4 * fmt.page_bytes(heads, head_size, dtype.itemsize)
    x = torch.randn(2, 4 * fmt.page, heads, head_size, generator=random)
    which, place = torch.arange(4).repeat_interleave(fmt.page), torch.arange(fmt.page).repeat(4)
    for kind in (0, 1):
        pages.write(kind, which, place, x[kind])
    for copied in (pages, pages.grown(3)):
        found = copied.read(torch.arange(4)).transpose(1, 2)  # [2, T, Hkv, D]
        for kind in (0, 1):
            code = fmt.code(kind)
            if not code.coded:
                assert torch.equal(found[kind], x[kind].to(dtype).float())
                continue
            codes, words = quantize(x[kind], code.bits, code.groups(head_size))
            assert torch.equal(found[kind], dequantize(codes, words, code.bits, head_size=head_size))


def test_layers_have_formats_of_their_own() -> None:
    fmt = KVFormat.parse("4,layers.0=8,layers.2-3=k8v2")
    assert [str(own) for own in fmt.layers(5)] == ["kv8", "kv4", "k8v2", "k8v2", "kv4"]
    assert str(fmt) == "kv4,layers.0=8,layers.2-3=k8v2"
    assert not fmt.uniform
    with pytest.raises(SchemeError, match="names layer 3; the model has layers 0 to 2"):
        fmt.layers(3)
    assert KVFormat.parse("16,layers.1=4").coded
    assert not KVFormat.parse("16").coded


@settings(deadline=None)
@given(
    base=st.sampled_from(["16", "8", "4", "k4v2", "k16v4"]),
    group=st.sampled_from(["", "group=64", "group=16,rotate=false", "page=8,center=false"]),
    layers=st.dictionaries(st.integers(0, 9), st.sampled_from(["16", "8", "4", "3", "2", "k8v4"]), min_size=1),
)
def test_formats_by_layer_round_trip_with_their_string(base: str, group: str, layers: dict[int, str]) -> None:
    if base == "16" and not {"8", "4", "3", "2", "k8v4"} & set(layers.values()):
        group = ""
    text = ",".join([f"{base}:{group}" if group else base, *(f"layers.{i}={own}" for i, own in layers.items())])
    fmt = KVFormat.parse(text)
    assert KVFormat.parse(str(fmt)) == fmt
    assert KVFormat.parse(str(fmt)).layers(10) == fmt.layers(10)


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 40], x[3, 0] = torch.inf, torch.nan, -torch.inf
    back = dequantize(*quantize(x, 4, 2), 4)
    assert torch.equal(back[0], torch.zeros(64))
    for row, hurt, whole in [(1, slice(0, 32), slice(32, 64)), (2, slice(32, 64), slice(0, 32))]:
        assert not back[row, hurt].isfinite().any()
        assert torch.equal(back[row, whole], torch.zeros(32))
    assert not back[3, :32].isfinite().any()


@pytest.mark.parametrize("head_size", [*HEADS, 6, 7])
def test_rotation_is_its_own_inverse(head_size: int) -> None:
    fmt = KVFormat(4)
    h = hadamard(torch.eye(head_size), fmt)
    assert torch.equal(h, h.T)
    torch.testing.assert_close(h @ h, torch.eye(head_size))
    block = {48: 16, 64: 64, 80: 16, 96: 32, 128: 128, 6: 2, 7: 1}[head_size]
    assert torch.equal(h != 0, torch.block_diag(*[torch.ones(block, block)] * (head_size // block)) != 0)
    x = torch.randn(5, head_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(x, fmt), x @ h)
    assert hadamard(x, KVFormat(4, rotate=False)) is x


def test_more_bits_smaller_groups_and_rotation_lower_the_error() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=random)
    x[:, 5] *= 20  # one large channel, as keys have them

    def error(bits: int, groups: int, rotate: bool) -> float:
        fmt = KVFormat(bits, rotate=rotate)
        return (hadamard(dequantize(*quantize(hadamard(x, fmt), bits, groups), bits), fmt) - x).pow(2).mean().item()

    assert error(8, 2, True) < error(4, 2, True) / 100
    assert error(4, 2, True) < error(3, 2, True) / 3 < error(2, 2, True) / 9
    assert error(4, 2, True) < error(4, 1, True) < error(4, 1, False) / 2
