"""Numbers of a file are bounded by what the file holds: what is allocated for a matrix follows from its tensors."""

import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import crelle.formats.builtin  # noqa: F401  (registers the formats)
from crelle.errors import CrelleError, FormatError
from crelle.formats.activations import MAX_GROUP, ActivationSpec
from crelle.formats.base import FORMATS, nbytes
from crelle.formats.kv.format import KVFormat, kv_of_checkpoint

GROUPED = {"format": "grouped", "shape": [64, 32], "bits": 4, "group": 32, "outliers": 0, "outlier_bits": 8}
GROUPED |= {"permuted": False, "activation": None}
TWO_LEVEL = {k: v for k, v in GROUPED.items() if k != "outlier_bits"} | {"format": "two-level"}
MIXED = {"format": "mixed", "shape": [16, 32], "group": 16, "packing": "general", "block": 16, "four": 1, "outliers": 0}
HUGE = [pytest.param(n, id=name) for name, n in {"2^20": 2**20, "1e7": 10**7, "1e12": 10**12, "1e400": 10**400}.items()]


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes = max(
            self.bytes, *(t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor)), 0
        )
        return out


def stored(spec: dict[str, Any]) -> dict[str, Tensor]:
    return FORMATS[spec["format"]].random(spec, torch.Generator().manual_seed(0)).tensors()


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(("spec", "key"), [(GROUPED, "group"), (TWO_LEVEL, "group"), (MIXED, "block")])
def test_a_number_beyond_the_matrix_is_refused_before_anything_is_allocated(
    spec: dict[str, Any], key: str, number: int
) -> None:
    parts, form = stored(spec), FORMATS[spec["format"]]
    with LargestTensor() as largest, pytest.raises(FormatError) as said:
        form.from_parts({**spec, key: number}, parts).dequantize()
    assert largest.bytes == 0
    assert len(str(said.value)) < 400


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("spec", [GROUPED, TWO_LEVEL])
def test_a_group_of_activations_beyond_the_row_is_refused(spec: dict[str, Any], number: int) -> None:
    act = ActivationSpec(8, 32).to_json() | {"group": number}
    with pytest.raises(FormatError, match="too large for rows of 32"):
        FORMATS[spec["format"]].from_parts({**spec, "activation": act}, stored(spec))


@pytest.mark.parametrize("shape", [[10**4000, 10**4000], [2**31, 1], [1, 2**40]])
@pytest.mark.parametrize("spec", [GROUPED, TWO_LEVEL, MIXED])
def test_an_enormous_shape_is_a_short_sentence(spec: dict[str, Any], shape: list[int]) -> None:
    with pytest.raises(FormatError) as said:
        FORMATS[spec["format"]].from_parts({**spec, "shape": shape, "outliers": -1}, stored(spec))
    assert len(str(said.value)) < 400


@pytest.mark.parametrize("spec", [{**GROUPED, "group": MAX_GROUP}, {**TWO_LEVEL, "group": MAX_GROUP}])
def test_a_group_larger_than_a_short_row_costs_what_the_row_costs(spec: dict[str, Any]) -> None:
    spec = {**spec, "shape": [512, 8]}
    parts, form = stored(spec), FORMATS[spec["format"]]
    with LargestTensor() as largest:
        w = form.from_parts(spec, parts)
        found = w.dequantize()
    assert w.spec() == spec
    assert torch.equal(found, form.from_parts({**spec, "group": 8}, parts).dequantize())
    assert largest.bytes <= 8 * 4 * 512 * 8
    assert nbytes(w) <= 512 * 16


def test_a_block_larger_than_a_short_matrix_costs_what_the_matrix_costs() -> None:
    spec = {**MIXED, "shape": [1, 1 << 14], "four": 0}
    parts, form = stored(spec), FORMATS["mixed"]
    with LargestTensor() as largest:
        form.from_parts(spec, parts).dequantize()
    assert largest.bytes <= 8 * (1 << 14)
    whole = form.random({**MIXED, "shape": [64, 32], "block": 64}, torch.Generator().manual_seed(0))
    some = whole.rows(slice(0, 20))  # fewer than a block
    assert torch.equal(form.from_parts(some.spec(), some.tensors()).dequantize(), whole.dequantize()[:20])


@pytest.mark.parametrize(
    "kv",
    [
        "4:layers.0-99999999999=8",
        "4:layers.0-4096=8",
        "4:layers." + "9" * 5000 + "=8",
        "4:group=" + "9" * 5000,
        "4:page=" + "9" * 5000,
        "4:page=1000000",
        "4:" + "x" * (1 << 20),
        "9" * 5000,
    ],
)
def test_a_scheme_with_an_enormous_cache_is_one_short_sentence(kv: str) -> None:
    config = {"quantization_config": {"quant_method": "crelle", "scheme": f"atom:w=4,kv={kv}"}}
    tracemalloc.start()
    try:
        with pytest.raises(CrelleError) as said:
            kv_of_checkpoint(config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(said.value)) < 500
    assert peak < 8 << 20


def test_every_layer_that_a_model_may_have_can_be_named() -> None:
    text = "kv4,layers.0-4095=8"
    assert KVFormat.parse(text).layers(4096) == [KVFormat.parse("kv8")] * 4096
    assert str(KVFormat.parse(text)) == text
