"""Schemes: a string that round-trips, and a sentence for every string that makes no sense."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crelle.errors import SchemeError
from crelle.formats.dense import DenseTensor
from crelle.quantizers.base import Cast, _read
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.bcq import BCQ
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.hbcq import HBCQ
from crelle.quantizers.schemes.rtn import RTN

bits = st.integers(1, 8)
group = st.one_of(st.just("row"), st.integers(1, 4096))
rtn = st.builds(RTN, bits=bits, group=group, symmetric=st.just(False)) | st.builds(
    RTN, bits=st.integers(2, 8), group=group, symmetric=st.just(True)
)
bcq = st.builds(BCQ, bits=bits, group=group, rounds=st.integers(0, 99), bias=st.booleans())
calibrated = {
    "bits": st.integers(2, 8),
    "group": group,
    "damp": st.floats(0, 1),
    "refine": st.integers(0, 9),
    "target": st.booleans(),
}
gptq = st.builds(GPTQ, **calibrated, act_order=st.just(False), static=st.booleans(), free=st.booleans()) | st.builds(
    GPTQ, **calibrated, act_order=st.booleans(), symmetric=st.booleans()
)
hbcq = st.builds(
    HBCQ, **calibrated, rounds=st.integers(0, 99), feedback=st.booleans(), solve=st.booleans(), bias=st.booleans()
)
store = st.builds(Cast, st.sampled_from(["fp16", "bf16", "fp32"]))


@given(rtn | bcq | gptq | hbcq | store)
def test_scheme_strings_round_trip(quantizer: RTN | BCQ | GPTQ | HBCQ | Cast) -> None:
    assert parse(str(quantizer)) == quantizer
    assert str(parse(str(quantizer))) == str(quantizer)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("rtn", "rtn:bits=4,group=128"),
        ("bcq", "bcq:bits=3,group=128"),
        ("rtn:bits=4", "rtn:bits=4,group=128"),
        (" bcq: group = 64 , bits=2 ", "bcq:bits=2,group=64"),
        ("rtn:group=row,bits=3", "rtn:bits=3,group=row"),
        ("rtn:bits=4,group=64,symmetric=false", "rtn:bits=4,group=64"),
        ("rtn:symmetric=true", "rtn:bits=4,group=128,symmetric=true"),
        ("bcq:rounds=20,bias=true", "bcq:bits=3,group=128"),
        ("bcq:rounds=0,bias=false", "bcq:bits=3,group=128,rounds=0,bias=false"),
        ("gptq:damp=2e-1,free=true,static=true", "gptq:bits=3,group=128,free=true"),
        ("gptq:damp=.05,act_order=false", "gptq:bits=3,group=128,act_order=false,damp=0.05"),
        ("hbcq:bits=2,feedback=true,solve=false", "hbcq:bits=2,group=128,solve=false"),
        ("fp16", "fp16"),
    ],
)
def test_defaults_are_filled_in_and_left_out(given: str, written: str) -> None:
    assert str(parse(given)) == written


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        ("", "unknown scheme ''"),
        ("gptr:bits=4", "unknown scheme 'gptr'; known schemes: fp16, bf16, fp32, rtn, bcq, gptq, hbcq"),
        ("RTN:bits=4", "unknown scheme 'RTN'"),
        ("rtn:bits=4,colour=red", "scheme 'rtn' has no setting 'colour'; it has: bits, group, symmetric"),
        ("bcq:symmetric=true", "scheme 'bcq' has no setting 'symmetric'"),
        ("rtn:bits=0", "bits must be 1 to 8, got 0"),
        ("rtn:bits=9", "bits must be 1 to 8, got 9"),
        ("bcq:bits=-3", "bits must be 1 to 8, got -3"),
        ("rtn:group=0", "group must be at least 1, or 'row' for a whole row, got 0"),
        ("bcq:group=-1", "group must be at least 1"),
        ("rtn:group=1" + "0" * 400, "group must be an integer or 'row', got '1000"),
        ("rtn:group=1" + "0" * 5000, "group must be an integer or 'row', got '1000"),
        ("rtn:bits=3.5", "bits must be an integer, got '3.5'"),
        ("rtn:bits=four", "bits must be an integer, got 'four'"),
        ("rtn:bits=row", "bits must be an integer, got 'row'"),
        ("rtn:group=column", "group must be an integer or 'row', got 'column'"),
        ("rtn:symmetric=yes", "symmetric must be true or false, got 'yes'"),
        ("bcq:rounds=-1", "rounds must be at least 0 (greedy), got -1"),
        ("rtn:bits", "'bits' must have the form key=value"),
        ("rtn:bits=", "'bits=' must have the form key=value"),
        ("rtn:=4", "has no setting ''"),
        ("rtn:bits=4,bits=3", "bits is given twice"),
        ("rtn:bits=1,symmetric=true", "a symmetric grid of 1 bit has no level above zero"),
        ("gptq:damp=much", "damp must be a number, got 'much'"),
        ("gptq:damp=nan", "damp must be a number, got 'nan'"),
        ("gptq:damp=-0.1", "damp must be 0 to 1, got -0.1"),
        ("gptq:refine=-1", "refine must be at least 0, got -1"),
        ("gptq:static=false", "static=false needs act_order=false"),
        ("gptq:symmetric=true,free=true", "a symmetric grid has no free lowest level"),
        ("gptq:bits=1,symmetric=true", "a symmetric grid of 1 bit has no level above zero"),
        ("hbcq:rounds=-1", "rounds must be at least 0 (greedy), got -1"),
        ("hbcq:damp=2", "damp must be 0 to 1, got 2.0"),
        ("hbcq:refine=-1", "refine must be at least 0, got -1"),
        ("fp16:bits=4", "scheme 'fp16' takes no settings, got 'bits=4'"),
    ],
)
def test_schemes_that_make_no_sense_are_a_sentence(scheme: str, sentence: str) -> None:
    with pytest.raises(SchemeError) as refused:
        parse(scheme)
    assert sentence in str(refused.value)


@given(st.text(max_size=30) | st.text("rtnbcq:its=,0123 group", max_size=30))
def test_garbage_is_parsed_or_refused_but_never_breaks(scheme: str) -> None:
    try:
        quantizer = parse(scheme)
    except SchemeError:
        return
    assert parse(str(quantizer)) == quantizer


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_store_keeps_the_numbers_at_its_width(name: str, dtype: torch.dtype) -> None:
    w = torch.randn(3, 5)
    stored = Cast(name).fit(w)
    assert isinstance(stored, DenseTensor)
    assert torch.equal(stored.weight, w.to(dtype))


def test_a_weight_beyond_f16_is_refused() -> None:
    with pytest.raises(SchemeError, match="is outside the range of fp16"):
        Cast("fp16").fit(torch.tensor([[1e6]]))


def test_named_choices_are_read_as_their_names() -> None:
    assert _read("some", "shape", Literal["round", "square"], "square") == "square"
    with pytest.raises(SchemeError, match="shape must be 'round' or 'square', got 'flat'"):
        _read("some", "shape", Literal["round", "square"], "flat")
