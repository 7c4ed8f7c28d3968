"""AWQ directories: every weight is s (q - z) of what was packed, bit for bit."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_packers import UP, Grid, awq_gemm, awq_gemv, one, random_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.errors import CrelleError, UnsupportedError
from crelle.formats.bcq import UniformTensor
from crelle.formats.storage.open import open_weights

quick = settings(deadline=None, max_examples=40)


def said(g: Grid, version: str = "gemm", **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": g.group, "zero_point": True, "version": version, **more}


@quick
@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from([-1, 5, 8, 32]), st.integers(0, 2**31))
def test_gemm_is_exact(K: int, words: int, group: int, seed: int) -> None:
    g = random_grid(8 * words, K, 4, min(group, K), seed=seed)
    with tempfile.TemporaryDirectory() as to:
        weights = open_weights(one(Path(to), awq_gemm(g), said(g)))
        w = weights.matrix(UP)
        assert isinstance(w, UniformTensor)
        assert weights.shape(f"{UP}.weight") == w.shape == (8 * words, K)
        assert torch.equal(w.dequantize(), g.numbers())
        assert torch.equal(weights.read(f"{UP}.weight"), g.numbers())


@quick
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([-1, 8, 32]), st.sampled_from([8, 16, 32]))
def test_gemv_is_exact(N: int, words: int, group: int, padding: int) -> None:
    g = random_grid(N, 8 * words, 4, min(group, 8 * words), seed=N)
    with tempfile.TemporaryDirectory() as to:
        weights = open_weights(one(Path(to), awq_gemv(g, padding), said(g, "GEMV")))
        assert weights.shape(f"{UP}.weight") == (N, 8 * words)
        assert torch.equal(weights.matrix(UP).dequantize(), g.numbers())


def test_an_older_directory_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    g = random_grid(16, 64, 4, 32)
    one(tmp_path, awq_gemm(g), None)
    said = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(said))
    assert torch.equal(open_weights(tmp_path).matrix(UP).dequantize(), g.numbers())


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"version": "gemv_fast"}, "in the layout 'gemv_fast'; Crelle reads 'gemm' and 'gemv'"),
        ({"bits": 8}, "the number of bits of .* is 8; Crelle reads 4"),
        ({"bits": "4"}, "is '4'; Crelle reads 4"),
        ({"group_size": 0}, "'group_size' should be a positive number or -1, but is 0"),
    ],
)
def test_settings_that_are_not_read_are_refused(tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    g = random_grid(16, 64, 4, 32)
    with pytest.raises(CrelleError, match=sentence) as refused:
        open_weights(one(tmp_path, awq_gemm(g), said(g, **more)))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "change", "sentence"),
    [
        ("gemm", {"qzeros": None}, "the tensor 'qzeros' is missing"),
        ("gemm", {"scales": None}, "the tensor 'scales' is missing"),
        ("gemm", {"scales": torch.ones(3, 16).half()}, r"'scales' should be .*\[2, 16\], but is float16 \[3, 16\]"),
        ("gemm", {"qzeros": torch.ones(2, 2)}, r"'qzeros' should be int32 \[2, 2\], but is float32"),
        ("gemm", {"qweight": torch.ones(64, dtype=torch.int32)}, "'qweight' should be a matrix"),
        ("gemv", {"scales": torch.ones(16, 1).half()}, "must have at least 2 groups per row"),
        ("gemv", {"qzeros": None}, "the tensor 'qzeros' is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_a_sentence(
    tmp_path: Path, layout: str, change: dict[str, Any], sentence: str
) -> None:
    g = random_grid(16, 64, 4, 32)
    good = awq_gemm(g) if layout == "gemm" else awq_gemv(g)
    parts = {k: v for k, v in {**good, **change}.items() if v is not None}
    with pytest.raises(CrelleError, match=sentence) as refused:
        open_weights(one(tmp_path, parts, said(g, layout))).matrix(UP)
    assert str(refused.value).startswith(f"{tmp_path}, '{UP}'")


def test_a_setting_of_the_wrong_kind_is_a_sentence(tmp_path: Path) -> None:
    g = random_grid(16, 64, 4, 32)
    with pytest.raises(UnsupportedError, match="in the layout '"):
        open_weights(one(tmp_path, awq_gemm(g), said(g, version=["gemm"])))
