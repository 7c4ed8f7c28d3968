"""Directories of compressed-tensors: every weight is s (q - z) of what was packed, bit for bit."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import foreign_packers
import pytest
import torch
from foreign_packers import UP, compressed, compressed_config, one, random_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.errors import CrelleError
from crelle.formats.storage.open import open_weights
from crelle.formats.wrappers.composite import PermutedTensor

quick = settings(deadline=None, max_examples=60)


@st.composite
def grids(draw: st.DrawFn) -> dict[str, Any]:
    K = draw(st.integers(1, 130))
    sizes = {"N": draw(st.integers(1, 12)), "K": K, "bits": draw(st.integers(1, 8))}
    return {**sizes, "group": min(draw(st.sampled_from([-1, 5, 32])), K), "seed": draw(st.integers(0, 2**31))}


@quick
@given(grids(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_every_weight_is_exact(
    d: dict[str, Any], symmetric: bool, scattered: bool, dense: bool, dtype: torch.dtype
) -> None:
    g = random_grid(**d, symmetric=symmetric, scattered=scattered, dtype=dtype)
    # Where both packings take as many words, a dense one whose top bits happen to be 0 reads as the older: rare in
    # matrices of use, where words differ in number; here one such bit is set.
    if 32 % g.bits and -(-g.codes.shape[1] * g.bits // 32) == -(-g.codes.shape[1] // (32 // g.bits)) and dense:
        g.codes[0] = 2**g.bits - 1
    if 32 % g.bits and -(-len(g.zero) * g.bits // 32) == -(-len(g.zero) // (32 // g.bits)) and dense and not symmetric:
        g.zero[:, 0] = 2**g.bits - 1
    parts = compressed(g, symmetric=symmetric, dense=dense, g_idx=scattered)
    with tempfile.TemporaryDirectory() as to:
        how = compressed_config(d["bits"], d["group"], symmetric=symmetric, actorder="group" if scattered else None)
        weights = open_weights(one(Path(to), parts, how))
        w = weights.matrix(UP)
        assert weights.names() == [f"{UP}.weight"]
        assert weights.shape(f"{UP}.weight") == w.shape == tuple(g.codes.shape)
        assert torch.equal(w.dequantize(), g.numbers())


def test_older_zero_points_are_plain_int8(tmp_path: Path) -> None:
    g = random_grid(16, 64, 4, 32)
    parts = {**compressed(g), "weight_zero_point": (g.zero - 8).to(torch.int8)}
    w = open_weights(one(tmp_path, parts, compressed_config(4, 32))).matrix(UP)
    assert torch.equal(w.dequantize(), g.numbers())


def test_a_g_idx_that_was_never_filled_in_means_nothing(tmp_path: Path) -> None:
    g = random_grid(16, 64, 4, 32)
    parts = {**compressed(g), "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    w = open_weights(one(tmp_path, parts, compressed_config(4, 32))).matrix(UP)
    assert not isinstance(w, PermutedTensor)
    assert torch.equal(w.dequantize(), g.numbers())


def test_a_target_that_names_a_module_goes_before_its_class(tmp_path: Path) -> None:
    a, b, c = (random_grid(16, 64, bits, 32, symmetric=True, seed=bits) for bits in (4, 8, 2))
    modules = {"model.layers.0.mlp.up_proj": a, "model.layers.0.mlp.down_proj": b, "model.layers.1.mlp.down_proj": c}
    tensors = {f"{m}.{p}": t for m, g in modules.items() for p, t in compressed(g, symmetric=True).items()}
    how = compressed_config(4, 32, symmetric=True)
    for i, (bits, target) in enumerate([(8, r"re:.*\.0\.mlp\.down_proj"), (2, "model.layers.1.mlp.down_proj")], 1):
        scheme = compressed_config(bits, 32, symmetric=True)["config_groups"]["group_0"]
        how["config_groups"][f"group_{i}"] = {**scheme, "targets": [target]}
    weights = open_weights(foreign_packers.write(tmp_path, tensors, how))
    for module, g in modules.items():
        assert torch.equal(weights.matrix(module).dequantize(), g.numbers())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "float-quantized"}, "in the format 'float-quantized'; Crelle reads pack-quantized"),
        ({"format": None}, "in the format 'None'"),
        ({"sparsity_config": {"format": "sparse-24"}}, "has a 'sparsity_config'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "has a 'kv_cache_scheme'"),
        ({"config_groups": None}, "has no 'config_groups'"),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, "should have 'weights' and 'targets'"),
    ],
)
def test_settings_that_are_not_read_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    g = random_grid(16, 64, 4, 32)
    with pytest.raises(CrelleError, match=sentence) as refused:
        open_weights(one(tmp_path, compressed(g), {**compressed_config(4, 32), **change}))
    assert str(tmp_path) in str(refused.value)


def test_rounded_activations_are_refused(tmp_path: Path) -> None:
    g, how = random_grid(16, 64, 4, 32), compressed_config(4, 32)
    how["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(CrelleError, match="'group_0' also quantizes activations"):
        open_weights(one(tmp_path, compressed(g), how))


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"num_bits": 9}, "its number of bits is 9; Crelle reads 1, 2"),
        ({"num_bits": None}, "its number of bits is None"),
        ({"num_bits": 3}, "'weight_packed' has 8 words for 64 codes of 3 bits, which need 6"),
        ({"strategy": "block"}, "its strategy is 'block'; Crelle reads 'group' and 'channel'"),
        ({"group_size": None}, "'group_size' should be a positive number, but is None"),
        ({"group_size": 16}, r"'weight_scale' should be .*\[16, 4\], but is float16 \[16, 2\]"),
        ({"type": "float"}, "has weights of type 'float'; Crelle reads int"),
    ],
)
def test_a_scheme_that_does_not_fit_is_a_sentence(tmp_path: Path, weights: dict[str, Any], sentence: str) -> None:
    g = random_grid(16, 64, 4, 32)
    with pytest.raises(CrelleError, match=sentence) as refused:
        open_weights(one(tmp_path, compressed(g), compressed_config(4, 32, **weights))).matrix(UP)
    assert str(refused.value).startswith(str(tmp_path))


@pytest.mark.parametrize("part", ["weight_scale", "weight_zero_point", "weight_shape"])
def test_missing_tensors_are_a_sentence(tmp_path: Path, part: str) -> None:
    g = random_grid(16, 64, 4, 32)
    parts = {k: v for k, v in compressed(g).items() if k != part}
    with pytest.raises(CrelleError, match=f"'{UP}': the tensor '{part}' is missing"):
        open_weights(one(tmp_path, parts, compressed_config(4, 32))).matrix(UP)


def test_a_module_that_no_target_names_is_a_sentence(tmp_path: Path) -> None:
    g, how = random_grid(16, 64, 4, 32), compressed_config(4, 32)
    how["config_groups"]["group_0"]["targets"] = ["re:.*down_proj"]
    with pytest.raises(CrelleError, match="no target in config_groups matches it"):
        open_weights(one(tmp_path, compressed(g), how)).matrix(UP)


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="the package compressed-tensors is not installed, so its own packer cannot be asked",
)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("K", [64, 75, 100])
def test_what_the_package_itself_packs_is_read(tmp_path: Path, bits: int, K: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    g = random_grid(37, K, bits, 25)
    half = 2 ** (bits - 1)
    parts = compressed(g)
    parts["weight_packed"] = pack_to_int32((g.codes - half).to(torch.int8), bits)
    parts["weight_zero_point"] = pack_to_int32((g.zero - half).to(torch.int8), bits, packed_dim=0).contiguous()
    w = open_weights(one(tmp_path, parts, compressed_config(bits, 25))).matrix(UP)
    assert torch.equal(w.dequantize(), g.numbers())
