"""A quantization_config may hold anything: what cannot be understood is a sentence, never another error."""

from pathlib import Path
from typing import Any

import pytest
from foreign_packers import UP, awq_gemm, compressed, compressed_config, gptq, one, random_grid

from crelle.errors import CrelleError
from crelle.formats.storage.open import open_weights

ODD: list[Any] = [None, -3, 0, 2**40, 1.5, "text", "re:[", [], ["a"], {}, {"a": None}, True]
GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32, "sym": True, "meta": {}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
COMPRESSED = compressed_config(4, 32)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "awq": (awq_gemm, AWQ),
    "compressed": (compressed, COMPRESSED),
}


def understood_or_refused(path: Path) -> None:
    sentence = str(path)
    try:
        weights = open_weights(path)
        for name in weights.names():
            weights.shape(name)
            weights.read(name)
    except CrelleError as e:
        sentence = str(e)
    assert str(path) in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("case", MODELS)
def test_odd_values_at_the_top(tmp_path: Path, case: str) -> None:
    pack, said = MODELS[case]
    parts = pack(random_grid(32, 64, 4, 32, symmetric=True))
    parts.pop("g_idx", None)  # then GPTQ depends on what the config says
    for key in {*said, "is_marlin_format", "format", "kv_cache_scheme"}:
        for i, value in enumerate(ODD):
            understood_or_refused(one(tmp_path / f"{key}{i}", parts, {**said, key: value}))


@pytest.mark.parametrize("key", ["targets", "weights", "input_activations"])
def test_odd_values_in_a_scheme(tmp_path: Path, key: str) -> None:
    parts = compressed(random_grid(32, 64, 4, 32))
    scheme = COMPRESSED["config_groups"]["group_0"]
    for i, value in enumerate([*ODD, ["re:["], [None]]):
        groups = {"group_0": {**scheme, key: value}}
        understood_or_refused(one(tmp_path / str(i), parts, {**COMPRESSED, "config_groups": groups}))


@pytest.mark.parametrize("key", ["num_bits", "type", "symmetric", "strategy", "group_size"])
def test_odd_values_in_the_weights_of_a_scheme(tmp_path: Path, key: str) -> None:
    parts = compressed(random_grid(32, 64, 4, 32))
    for i, value in enumerate(ODD):
        understood_or_refused(one(tmp_path / str(i), parts, compressed_config(4, 32, **{key: value})))


def test_the_module_is_named(tmp_path: Path) -> None:
    path = one(tmp_path, compressed(random_grid(32, 64, 4, 32)), compressed_config(4, 32, num_bits="four"))
    with pytest.raises(CrelleError, match=f"'{UP}': its number of bits is 'four'"):
        open_weights(path).matrix(UP)
