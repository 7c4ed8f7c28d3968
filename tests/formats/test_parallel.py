"""Shares of matrices: inputs of one matrix, and several matrices as one, exactly."""

from typing import Any

import pytest
import torch

from crelle.errors import UnsupportedError
from crelle.formats import builtin  # noqa: F401  # registers the formats
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor, format_of
from crelle.formats.parallel import columns, stacked

GROUPED = {"outliers": 16, "permuted": True, "activation": ActivationSpec(8, 32, 16).to_json()}
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
    "grouped": {"format": "grouped", "bits": 4, "group": 32, "outlier_bits": 8, **GROUPED},
    "two-level": {"format": "two-level", "bits": 4, "group": 32, **GROUPED},
}


def random(case: str, N: int = 48, K: int = 128, seed: int = 0) -> QuantTensor:
    spec = {**SPECS[case], "shape": [N, K]}
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", [c for c in SPECS if c not in ("grouped", "two-level")])
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


@pytest.mark.parametrize("case", ["grouped", "two-level"])
def test_permuted_inputs_are_not_cut(case: str) -> None:
    with pytest.raises(UnsupportedError, match="groups contain inputs from the whole matrix"):
        columns(random(case), 0, 64)


@pytest.mark.parametrize("case", SPECS)
def test_stacked_is_the_dequantized_side_by_side(case: str) -> None:
    parts = [random(case, N, seed=i) for i, N in enumerate((48, 16, 16))]
    if (perm := getattr(parts[0], "perm", None)) is not None:
        parts = [type(p).from_parts(p.spec(), {**p.tensors(), "perm": perm}) for p in parts]
    whole = stacked(parts)
    if case.startswith("mixed"):
        assert whole is None  # which inputs have 4 bits differs
        return
    assert whole is not None
    assert torch.equal(whole.dequantize(), torch.cat([p.dequantize() for p in parts]))


def test_what_differs_is_not_stacked() -> None:
    assert stacked([random("bcq"), random("bcq, symmetric")]) is None
    assert stacked([random("grouped"), random("grouped", seed=1)]) is None  # their inputs are in other orders
    one = random("bcq")
    assert stacked([one]) is one
