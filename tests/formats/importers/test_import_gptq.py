"""GPTQ directories: every weight is s (q - z) of what was packed, bit for bit."""

import json
import tempfile
from pathlib import Path
from typing import Any

import foreign_packers
import pytest
import torch
from foreign_packers import UP, Grid, gptq, one, random_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.bcq import UniformTensor
from crelle.formats.importers.gptq import GPTQDirectory
from crelle.formats.storage.open import open_weights
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels import ops
from crelle.kernels.reference import matmul_fp64
from crelle.kernels.registry import kernels

quick = settings(deadline=None, max_examples=50)
BITS = [2, 3, 4, 8]


def said(g: Grid, version: int = 2, **more: Any) -> dict[str, Any]:
    layout = {"quant_method": "gptq", "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}
    return {**layout, "bits": g.bits, "group_size": g.group, "sym": False, **more}


@st.composite
def grids(draw: st.DrawFn) -> dict[str, Any]:
    """Neither inputs nor outputs need fill whole words; groups need not divide K."""
    bits = draw(st.sampled_from(BITS))
    K = draw(st.integers(1, 100))
    sizes = {"N": draw(st.integers(1, 40)), "K": K, "bits": bits, "group": draw(st.sampled_from([-1, 7, 8, 32]))}
    sizes["group"] = min(sizes["group"], K)
    return {**sizes, "scattered": draw(st.booleans()), "seed": draw(st.integers(0, 2**31))}


@quick
@given(grids(), st.sampled_from([1, 2]), st.sampled_from([torch.float16, torch.bfloat16]), st.booleans())
def test_every_weight_is_exact(d: dict[str, Any], version: int, dtype: torch.dtype, symmetric: bool) -> None:
    # v1 stores zero - 1: its zero points are 1 ... 2^b, the last outside what a uniform grid of ours can say.
    span = {"lowest": 1, "highest": 2 ** d["bits"]} if version == 1 else {}
    g = random_grid(**d, **span, symmetric=symmetric, dtype=dtype)
    with tempfile.TemporaryDirectory() as to:
        weights = open_weights(one(Path(to), gptq(g, version), said(g, version, sym=symmetric)))
        w = weights.matrix(UP)
        assert weights.names() == [f"{UP}.weight"]
        assert weights.shape(f"{UP}.weight") == w.shape == tuple(g.codes.shape)
        assert torch.equal(w.dequantize(), g.numbers())
        assert torch.equal(weights.read(f"{UP}.weight"), g.numbers())
        assert (w.bits, w.group) == (g.bits, g.group)
        scattered = not torch.equal(g.g_idx, torch.arange(len(g.g_idx)) // g.group)
        assert isinstance(w, PermutedTensor) == scattered
        inner = w.inner if isinstance(w, PermutedTensor) else w
        assert isinstance(inner, AffineTensor if int(g.zero.max()) == 2**g.bits else UniformTensor)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_every_kernel_multiplies_what_was_read(tmp_path: Path, bits: int, scattered: bool, symmetric: bool) -> None:
    g = random_grid(48, 96, bits, 32, scattered=scattered, symmetric=symmetric)
    w = open_weights(one(tmp_path, gptq(g), said(g))).matrix(UP)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    wanted = matmul_fp64(x, w)
    assert torch.equal(wanted, x.double() @ g.numbers().double().T)
    ran = []
    for kernel in kernels():
        problem = ops.prepare(w, torch.float32).problem
        assert problem.permuted is scattered
        if kernel.supports(problem) is None:
            prepared = ops.prepare(w, torch.float32, kernel.name)
            assert prepared.kernel.name == kernel.name
            y = ops.matmul(x, prepared)
            tolerance = 2e-2 if "int8" in kernel.name else 1e-4
            assert float((y.double() - wanted).norm() / wanted.norm()) < tolerance, kernel.name
            assert torch.equal(y, ops.matmul(x, prepared))
            ran.append(kernel.name)
    assert {"dequantized", "reference"} <= set(ran)
    assert str(problem).count("inputs permuted") == scattered


@pytest.mark.parametrize(("says", "is_"), [(1, 2), (2, 1), (1, 1), (2, 2)])
@pytest.mark.parametrize("bits", BITS)
def test_symmetric_files_that_say_the_wrong_version_are_found_out(
    tmp_path: Path, bits: int, says: int, is_: int, caplog: pytest.LogCaptureFixture
) -> None:
    g = random_grid(32, 64, bits, 32, symmetric=True)
    weights = open_weights(one(tmp_path, gptq(g, is_), said(g, says, sym=True)))
    assert isinstance(weights, GPTQDirectory)
    assert torch.equal(weights.matrix(UP).dequantize(), g.numbers())
    assert len(weights.notes) == len(caplog.messages) == (says != is_)
    for note in weights.notes:
        assert f"declares zero points of GPTQ v{says}" in note
        assert f"those of v{is_}" in note


def test_an_asymmetric_file_is_believed(tmp_path: Path) -> None:
    g = random_grid(32, 64, 4, 32, symmetric=True)
    weights = open_weights(one(tmp_path, gptq(g, 2), said(g, 1, sym=False)))
    assert isinstance(weights, GPTQDirectory)
    assert weights.notes == []
    g.zero += 1
    assert torch.equal(weights.matrix(UP).dequantize(), g.numbers())


@pytest.mark.parametrize("bits", BITS)
def test_gptqmodels_borrow_across_a_word_is_undone(tmp_path: Path, bits: int) -> None:
    """It subtracts 0x1111… from a word of zero points; a zero of 0 takes from its neighbour."""
    g = random_grid(32, 64, bits, 32)
    g.zero[::3] = 0
    parts = gptq(g)
    if bits == 3:
        parts["qzeros"] = foreign_packers.stream(((g.zero - 1) % 8).T, 3)
    else:
        parts["qzeros"] = parts["qzeros"] - sum(1 << at for at in range(0, 32, bits))
    meta = {"quantizer": ["gptqmodel:4.0.0"]}
    weights = open_weights(one(tmp_path, parts, said(g, 1, meta=meta)))
    assert torch.equal(weights.matrix(UP).dequantize(), g.numbers())


def test_bits_and_groups_are_those_of_the_tensors(tmp_path: Path) -> None:
    a, b = random_grid(32, 64, 4, 32), random_grid(32, 64, 8, 16, seed=1)
    tensors = {f"a.{p}": t for p, t in gptq(a).items()} | {f"b.{p}": t for p, t in gptq(b).items()}
    weights = open_weights(foreign_packers.write(tmp_path, tensors, said(a)))
    assert torch.equal(weights.matrix("a").dequantize(), a.numbers())
    assert torch.equal(weights.matrix("b").dequantize(), b.numbers())


@pytest.mark.parametrize("group", [32, -1])
def test_without_g_idx_groups_are_in_order(tmp_path: Path, group: int) -> None:
    g = random_grid(32, 80, 4, group)
    parts = gptq(g)
    del parts["g_idx"]
    assert torch.equal(open_weights(one(tmp_path, parts, said(g))).matrix(UP).dequantize(), g.numbers())


def test_an_older_directory_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    g = random_grid(32, 64, 4, 32, lowest=1)
    one(tmp_path, gptq(g, 1), None)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "sym": False}))
    assert torch.equal(open_weights(tmp_path).matrix(UP).dequantize(), g.numbers())


def test_modules_without_qweight_stay_plain(tmp_path: Path) -> None:
    g = random_grid(32, 64, 4, 32)
    tensors = {f"{UP}.{p}": t for p, t in gptq(g).items()}
    tensors |= {"lm_head.weight": torch.randn(8, 64).half(), f"{UP}.bias": torch.randn(32)}
    weights = open_weights(foreign_packers.write(tmp_path, tensors, said(g)))
    assert sorted(weights.names()) == sorted(["lm_head.weight", f"{UP}.weight", f"{UP}.bias"])
    assert weights.matrix("lm_head").format == "dense"
    assert torch.equal(weights.read("lm_head.weight"), tensors["lm_head.weight"])
    assert torch.equal(weights.read(f"{UP}.bias"), tensors[f"{UP}.bias"])
    assert "quantization_config" not in weights.config


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"qzeros": None}, "the tensor 'qzeros' is missing"),
        ({"scales": None}, "the tensor 'scales' is missing"),
        ({"qzeros": ones(2, 5)}, r"'qzeros' should be int32 \[2, 4\], but is int32 \[2, 5\]"),
        ({"qzeros": torch.ones(2, 4)}, r"'qzeros' should be int32 \[2, 4\], but is float32 \[2, 4\]"),
        ({"scales": torch.ones(2, 31).half()}, r"'scales' should be .*\[any, 32\], but is float16 \[2, 31\]"),
        ({"scales": ones(2, 32)}, "'scales' should be"),
        ({"qweight": torch.ones(8, 32)}, "'qweight' should be int32"),
        ({"qweight": ones(7, 32)}, "'qweight' has 7 words for 64 inputs, which is not 2, 3, 4 or 8 bits each"),
        ({"qweight": ones(8)}, "'qweight' should be a matrix"),
        ({"g_idx": ones(64) * 2}, r"'g_idx' names groups outside 0 to 1"),
        ({"g_idx": ones(64) * -1}, "'g_idx' names groups outside"),
        ({"g_idx": (torch.arange(64) > 8).int()}, "the groups in 'g_idx' differ in size"),
        ({"g_idx": torch.zeros(64)}, "'g_idx' should be int32 or int64"),
    ],
)
def test_tensors_that_do_not_fit_are_a_sentence(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    g = random_grid(32, 64, 4, 32)
    parts = {k: v for k, v in {**gptq(g), **change}.items() if v is not None}
    with pytest.raises(CrelleError, match=sentence) as refused:
        open_weights(one(tmp_path, parts, said(g))).matrix(UP)
    assert str(refused.value).startswith(f"{tmp_path}, '{UP}'")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("more", [{"checkpoint_format": "marlin"}, {"is_marlin_format": True}])
def test_other_layouts_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    g = random_grid(32, 64, 4, 32)
    with pytest.raises(UnsupportedError, match="in the layout 'marlin'; Crelle reads 'gptq' and 'gptq_v2'"):
        open_weights(one(tmp_path, gptq(g), said(g, **more)))


def test_a_zero_point_that_cannot_be_kept_exactly_is_refused(tmp_path: Path) -> None:
    g = random_grid(32, 64, 4, 32, lowest=1, highest=16, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="cannot be represented exactly"):
        open_weights(one(tmp_path, gptq(g, 1), said(g, 1))).matrix(UP)


def test_unknown_names_are_a_sentence(tmp_path: Path) -> None:
    g = random_grid(32, 64, 4, 32)
    weights = open_weights(one(tmp_path, gptq(g), said(g)))
    with pytest.raises(FormatError, match=r"has no tensor 'nothing\.weight'"):
        weights.matrix("nothing")
