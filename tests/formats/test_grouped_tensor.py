"""Integer groups with outlier channels, of one level of scales and of two: packing is exact, damage is a sentence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor, format_of, nbytes
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor


def spec_of(N: int, K: int, form: str = "grouped", **changes: Any) -> dict[str, Any]:
    spec = {"format": form, "shape": [N, K], "bits": 4, "group": 16, "outliers": 0, "permuted": False}
    spec |= {"activation": None} | ({"outlier_bits": 8} if form == "grouped" else {})
    return spec | changes


def random(spec: dict[str, Any], seed: int = 0) -> QuantTensor:
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed))


def by_hand(w: GroupedTensor | TwoLevelTensor) -> Tensor:
    """The formula of the format, weight by weight, in f64."""
    s, codes = w.sizes, w.codes()
    out = torch.zeros(s.N, s.K, dtype=torch.float64)
    C = -(-(s.K - s.outliers) // s.group)
    for j in range(s.K):
        place = j if w.perm is None else int(w.perm[j])
        at = j - (s.K - s.outliers)
        for n in range(s.N):
            q = int(codes[n, j]) if at < 0 else float(w.outliers[n, at])  # type: ignore[index]
            if isinstance(w, TwoLevelTensor):
                g = j // s.group
                v = q if at >= 0 else int(w.group_scale[n, g]) * q - int(w.group_zero[n, g])
                out[n, place] = v * float(w.scale[n])
            elif at >= 0 and s.outlier_bits == 16:
                out[n, place] = q
            else:
                out[n, place] = q * float(w.scale[n, j // s.group if at < 0 else C + at // s.group])
    return out


@settings(deadline=None, max_examples=60)
@given(
    N=st.integers(1, 9),
    K=st.integers(1, 60),
    group=st.sampled_from([1, 5, 16, 128]),
    share=st.floats(0, 1),
    kind=st.sampled_from(["3", "4", "8", "4+f16", "two-level"]),
    permuted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_is_stored_and_read_exactly(
    N: int, K: int, group: int, share: float, kind: str, permuted: bool, seed: int
) -> None:
    form = kind if kind == "two-level" else "grouped"
    spec = spec_of(N, K, form, group=group, outliers=round(share * K), permuted=permuted)
    if form == "grouped":
        spec |= {"bits": int(kind[0]), "outlier_bits": 16 if "f" in kind and spec["outliers"] else 8}
    act = ActivationSpec(4, group, spec["outliers"], spec.get("outlier_bits", 8), 0.9) if seed % 2 else None
    spec["activation"] = None if act is None else act.to_json()
    w = random(spec, seed)
    assert isinstance(w, GroupedTensor | TwoLevelTensor)
    again = type(w).from_parts(w.spec(), w.tensors())
    assert w.spec() == spec == again.spec()
    assert w.activation == again.activation == act
    assert type(w).parts(spec) == list(w.tensors())
    torch.testing.assert_close(w.dequantize(torch.float64), by_hand(w), rtol=1e-12, atol=0)
    assert torch.equal(again.dequantize(), w.dequantize())
    assert torch.equal(w.rows(slice(0, N, 2)).dequantize(), w.dequantize()[::2])
    assert torch.equal(w.rows(torch.tensor([N - 1, 0])).dequantize(), w.dequantize()[[N - 1, 0]])
    assert N * type(w).row_bits(spec) == 8 * nbytes(w) - 32 * K * permuted


def test_codes_of_every_value_survive() -> None:
    for bits in (3, 4, 8):
        least = -127 if bits == 8 else -(2 ** (bits - 1))
        codes = torch.arange(least, 2 ** (bits - 1), dtype=torch.int8)[None]
        w = GroupedTensor.from_codes(codes, bits, torch.ones(1, 1).half(), 256)
        assert torch.equal(w.codes(), codes)
        assert torch.equal(w.dequantize(), codes.float())


def test_random_weights_have_the_usual_size() -> None:
    for form in ("grouped", "two-level"):
        w = random(spec_of(64, 512, form, outliers=32, group=64))
        assert 0.6 < float(w.dequantize().std()) * 512**0.5 < 1.6


GOOD = {"group": 16, "outliers": 8, "permuted": True, "activation": ActivationSpec(4, 16, 8).to_json()}


def act(*args: Any, **more: Any) -> dict[str, Any]:
    return {"activation": ActivationSpec(*args, **more).to_json()}


@pytest.mark.parametrize("form", ["grouped", "two-level"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 5}, "bits, got 5"),
        ({"group": 0}, "positive number"),
        ({"group": True}, "positive number"),
        ({"outliers": 41}, "from 0 to 40"),
        ({"outliers": 4}, "should be uint8"),
        ({"permuted": 1}, "true or false"),
        ({"shape": [4]}, "two positive integers"),
        ({"extra": 0}, "does not know the key 'extra'"),
        (act(4, 32, 8), "do not fit weights in groups of 16"),
        (act(4, 16, 0), "8 outlier channels, but its activations have 0"),
        (act(8, 16, 0), "do not fit weights in groups of 16"),
        (act(4, 16, 8, outlier_bits=16), "8 bits in the weight, but 16 in x"),
        ({"activation": {"bits": 4}}, "'activation' should have"),
    ],
)
def test_bad_specs_are_sentences(form: str, change: dict[str, Any], words: str) -> None:
    w = random(spec_of(4, 40, form, **GOOD))
    with pytest.raises(FormatError, match=words):
        type(w).from_parts(w.spec() | change, w.tensors())


def test_one_scale_for_a_token_fits_any_groups() -> None:
    for form, spec in (("two-level", act(8, 40)), ("grouped", act(8, 40)), ("grouped", act(4, 40, 8))):
        w = random(spec_of(4, 40, form, **GOOD) | spec)
        assert type(w).from_parts(w.spec(), w.tensors()).spec()["activation"] == spec["activation"]


def _set(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(t: dict[str, Tensor]) -> None:
        t[name] = t[name].clone()
        t[name].view(-1)[0] = value

    return change


def _replace(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(t: dict[str, Tensor]) -> None:
        t[name] = make(t[name])

    return change


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("grouped", _replace("codes", lambda t: t[:, :-1]), "'codes' should be uint8"),
        ("grouped", _replace("codes", lambda t: t.view(torch.int8)), "'codes' should be uint8"),
        ("grouped", _replace("scale", lambda t: t[:-1]), "'scale' should be"),
        ("grouped", _replace("scale", lambda t: t.double()), "'scale' should be"),
        ("grouped", _set("outliers", -128), "an outlier is -128"),
        ("grouped", _replace("outliers", lambda t: t.half()), "'outliers' should be int8"),
        ("grouped", _replace("perm", lambda t: t.fill_(3)), "each of the 40 inputs once"),
        ("grouped", _replace("perm", lambda t: t.long()), "'perm' should be int32"),
        ("grouped", lambda t: t.pop("perm"), "'perm' is missing"),
        ("two-level", _set("group_scale", 0), "'group_scale' must be 1 to 16"),
        ("two-level", _set("group_scale", 17), "'group_scale' must be 1 to 16"),
        ("two-level", _set("group_zero", 128), "'group_zero' 0 to 127"),
        ("two-level", _replace("group_zero", torch.zeros_like), "above 127"),
        ("two-level", _set("outliers", -128), "an outlier is -128"),
        ("two-level", _replace("scale", lambda t: t[None]), "'scale' should be"),
    ],
)
def test_damaged_parts_are_sentences(form: str, change: Callable[[dict[str, Tensor]], None], words: str) -> None:
    w = random(spec_of(4, 40, form, **GOOD))
    tensors = dict(w.tensors())
    change(tensors)
    with pytest.raises(FormatError, match=words):
        type(w).from_parts(w.spec(), tensors)


def test_a_code_of_8_bits_is_never_the_least() -> None:
    w = random(spec_of(4, 40, bits=8))
    with pytest.raises(FormatError, match="one is -128"):
        GroupedTensor.from_parts(w.spec(), {**w.tensors(), "codes": torch.full_like(w.tensors()["codes"], 0x80)})


@pytest.mark.parametrize("form", ["grouped", "two-level"])
def test_rotated_columns_multiply_rotated_inputs(form: str) -> None:
    act = ActivationSpec(4, 32, 6, hadamard=True)
    w: Any = random(spec_of(5, 86, form, outliers=6, group=32, permuted=True) | {"activation": act.to_json()})
    plain = replace(w, activation=None, perm=None).dequantize(torch.float64)  # columns as they are stored
    x = torch.randn(3, 86, dtype=torch.float64)
    torch.testing.assert_close(x @ w.dequantize(torch.float64).T, act.rotated(x[:, w.perm.long()]) @ plain.T)
