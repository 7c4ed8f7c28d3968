"""Shares of matrices: inputs of one matrix, and several matrices as one, exactly."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crelle.errors import UnsupportedError
from crelle.formats import builtin  # noqa: F401  # registers the formats
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor, format_of
from crelle.formats.parallel import columns, stacked, why_not_split

GROUPED = {"outliers": 16, "permuted": True, "activation": ActivationSpec(8, 32, 16).to_json()}
IN_ORDER = {"outliers": 64, "permuted": False}  # the last 64 of 128 inputs
UNIFORM = {"format": "uniform", "bits": 4, "group": 32, "symmetric": False}
SPECS: dict[str, dict[str, Any]] = {
    "bcq": {"format": "bcq", "bits": 3, "group": 32, "bias": True},
    "bcq, symmetric": {"format": "bcq", "bits": 2, "group": 16, "bias": False},
    "uniform": {"format": "uniform", "bits": 3, "group": 32, "symmetric": False},
    "uniform, symmetric": {"format": "uniform", "bits": 4, "group": 64, "symmetric": True},
    "affine": {"format": "affine", "bits": 2, "group": 32},
    "nested": {"format": "nested", "bits": 4, "group": 32, "precisions": [2, 4]},
    "mixed": {"format": "mixed", "group": 16, "packing": "aligned", "block": 16, "four": 2, "outliers": 9},
    "mixed, general": {"format": "mixed", "group": 32, "packing": "general", "block": 16, "four": 1, "outliers": 0},
    "dense": {"format": "dense"},
    "mxfp4": {"format": "mxfp4", "bits": 4, "group": 32},
    "nvfp4": {"format": "nvfp4", "bits": 4, "group": 16, "divides": False},
    "grouped": {"format": "grouped", "bits": 4, "group": 32, "outlier_bits": 8, **GROUPED},
    "two-level": {"format": "two-level", "bits": 4, "group": 32, **GROUPED},
    "permuted": {"format": "permuted", "inner": UNIFORM},
    "grouped, in order": {"format": "grouped", "bits": 3, "group": 32, "outlier_bits": 8, **IN_ORDER},
    "two-level, in order": {"format": "two-level", "bits": 4, "group": 32, **IN_ORDER},
}
SCATTERED = ("grouped", "two-level", "permuted")
for case in ("grouped, in order", "two-level, in order"):
    SPECS[case]["activation"] = ActivationSpec(4, 32, 64, hadamard=True).to_json()


def random(case: str, N: int = 48, K: int = 128, seed: int = 0) -> QuantTensor:
    spec = {**SPECS[case], "shape": [N, K]}
    if "inner" in spec:
        spec["inner"] = {**spec["inner"], "shape": [N, K]}
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", [c for c in SPECS if c not in SCATTERED])
def test_columns_are_those_of_the_dequantized(case: str) -> None:
    w = random(case)
    for begin, end in ((0, 64), (64, 128), (0, 128)):
        part = columns(w, begin, end)
        assert part.shape == (48, end - begin)
        assert torch.equal(part.dequantize(), w.dequantize()[:, begin:end])
        again = type(part).from_parts(part.spec(), part.tensors())  # as a file of it would be read
        assert torch.equal(again.dequantize(), part.dequantize())


def test_columns_of_a_row_wide_group() -> None:
    spec = {"format": "uniform", "bits": 4, "group": 96, "symmetric": False, "shape": [8, 96]}
    w = format_of(spec).random(spec, torch.Generator().manual_seed(0))
    halves = [columns(w, 0, 48), columns(w, 48, 96)]
    assert torch.equal(torch.cat([h.dequantize() for h in halves], 1), w.dequantize())
    assert halves[0].group == 48


def test_a_cut_group_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"inputs 0 to 47 of 128 .* would split a group of 32"):
        columns(random("bcq"), 0, 48)


@pytest.mark.parametrize("case", SCATTERED)
def test_permuted_inputs_are_not_cut(case: str) -> None:
    with pytest.raises(UnsupportedError, match="groups contain inputs from the whole matrix"):
        columns(random(case), 0, 64)
    assert "groups contain inputs" in str(why_not_split(random(case), 2))


@given(
    bits=st.sampled_from((3, 4, 8)),
    group=st.sampled_from((8, 24, 32)),
    groups=st.integers(1, 4),
    outlier_groups=st.integers(0, 2),
    wide=st.sampled_from((8, 16)),
    act=st.sampled_from((None, 3, 4, 8)),
    hadamard=st.booleans(),
    data=st.data(),
)
def test_shares_of_integer_inputs_add_up(
    bits: int, group: int, groups: int, outlier_groups: int, wide: int, act: int | None, hadamard: bool, data: Any
) -> None:
    """Products of shares with their rounded inputs add up to the whole product: a share rounds x as the whole does."""
    n, K = group * outlier_groups, group * (groups + outlier_groups)
    activation = None if act is None else ActivationSpec(act, group, n, wide if n else 8, 0.9, hadamard).to_json()
    spec = {"format": "grouped", "bits": bits, "group": group, "outliers": n, "outlier_bits": wide if n else 8}
    spec |= {"permuted": False, "activation": activation, "shape": [5, K]}
    seeded = torch.Generator().manual_seed(bits * 64 + K)
    w: Any = format_of(spec).random(spec, seeded)
    k = group * data.draw(st.integers(1, groups + outlier_groups)) if groups + outlier_groups > 1 else K
    shares: list[Any] = [columns(w, 0, k), columns(w, k, K)] if k < K else [columns(w, 0, K)]
    shares = [type(s).from_parts(s.spec(), s.tensors()) for s in shares]
    x = torch.randn(3, K, generator=seeded)
    assert torch.equal(torch.cat([s.dequantize(torch.float64) for s in shares], 1), w.dequantize(torch.float64))
    seen = [s.round_input(part) for s, part in zip(shares, x.split([s.shape[1] for s in shares], 1), strict=True)]
    assert torch.equal(torch.cat(seen, 1), w.round_input(x))


@pytest.mark.parametrize(
    ("case", "ranks", "says"),
    [
        ("bcq", 2, None),
        ("bcq", 8, "would split a group of 32"),
        ("bcq", 3, "128 inputs are no multiple of 3"),
        ("grouped, in order", 4, None),
        ("grouped, in order", 8, "would split a group of 32"),
        ("dense", 8, None),
        ("mxfp4", 4, None),
        ("mxfp4", 8, "would split a group of 32"),
        ("nvfp4", 8, None),
    ],
)
def test_whether_inputs_can_be_split(case: str, ranks: int, says: str | None) -> None:
    reason = why_not_split(random(case), ranks)
    assert reason is None if says is None else says in str(reason)


def test_activations_with_one_scale_a_token_are_not_cut() -> None:
    spec = {**SPECS["grouped, in order"], "activation": ActivationSpec(8, 1 << 17, 64).to_json(), "shape": [8, 128]}
    w = format_of(spec).random(spec, torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedError, match="activations are quantized over all inputs together"):
        columns(w, 0, 64)


@pytest.mark.parametrize("case", SPECS)
def test_stacked_is_the_dequantized_side_by_side(case: str) -> None:
    parts = [random(case, N, seed=i) for i, N in enumerate((48, 16, 16))]
    if order := {name: t for name, t in parts[0].tensors().items() if name in ("perm", "order")}:
        parts = [type(p).from_parts(p.spec(), {**p.tensors(), **order}) for p in parts]
    whole = stacked(parts)
    if case.startswith("mixed") or case == "nvfp4":
        assert whole is None  # which inputs have 4 bits differs, or the scale of the whole matrix
        return
    assert whole is not None
    assert torch.equal(whole.dequantize(), torch.cat([p.dequantize() for p in parts]))


def test_what_differs_is_not_stacked() -> None:
    assert stacked([random("bcq"), random("bcq, symmetric")]) is None
    assert stacked([random("grouped"), random("grouped", seed=1)]) is None  # their inputs are in other orders
    one = random("bcq")
    assert stacked([one]) is one
