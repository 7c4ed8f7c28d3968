"""Exports to AWQ and compressed-tensors: read back bit for bit, and equal to what independent packers write."""

import json
from pathlib import Path
from typing import Any

import foreign_packers
import in_process
import pytest
import torch
from conftest import write_tiny_model
from exported import assert_same_weights, read_all

from crelle.errors import CrelleError
from crelle.formats.base import format_of
from crelle.formats.bcq import UniformTensor
from crelle.formats.exporters.awq import AWQLayout
from crelle.formats.exporters.compressed_tensors import CompressedTensorsLayout
from crelle.formats.exporters.directory import export_directory
from crelle.formats.storage.open import open_weights
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.quantizers.pipeline import quantize

UP = "model.layers.0.mlp.up_proj"
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True}
LAYOUTS = {"awq": AWQLayout, "compressed-tensors": CompressedTensorsLayout}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "m", **foreign_packers.SMALL, vocab_size=288)


def cases() -> list[tuple[str, str]]:
    grids = ("group=32,symmetric=true", "group=32", "group=16", "group=row")
    both = [(to, f"rtn:bits=4,{grid}") for to in LAYOUTS for grid in grids]
    return both + [("compressed-tensors", f"rtn:bits={b},{grid}") for b in (2, 3, 8) for grid in grids]


@pytest.mark.parametrize(("to", "scheme"), cases())
def test_export_then_import_is_bit_equal(source: Path, tmp_path: Path, to: str, scheme: str) -> None:
    made = open_weights(quantize(source, tmp_path / "q", scheme).out)
    export_directory(made, tmp_path / "e", LAYOUTS[to]())
    assert_same_weights(made, open_weights(tmp_path / "e"))


@pytest.mark.parametrize("to", LAYOUTS)
def test_an_embedding_of_8_bits_is_exported_in_16(source: Path, tmp_path: Path, to: str) -> None:
    head = "rtn:bits=8,group=32,symmetric=true"
    made = open_weights(quantize(source, tmp_path / "q", "rtn:bits=4,group=32", head=head).out)
    told: list[str] = []
    export_directory(made, tmp_path / "e", LAYOUTS[to](), warn=told.append)
    again, name = open_weights(tmp_path / "e"), "model.embed_tokens"
    assert torch.equal(again.read(f"{name}.weight"), made.matrix(name).dequantize(torch.float16))
    exact = made.matrix(name).dequantize()
    error = (again.read(f"{name}.weight").float() - exact).abs()
    share = error.count_nonzero().item() / error.numel()
    assert share > 0.5
    (line,) = (line for line in told if line.startswith(name))
    assert line.endswith(f"written as fp16, which rounds {share:.0%} of its values by at most {error.max().item():.1g}")
    assert torch.equal(
        again.matrix("lm_head").dequantize(torch.float16), made.matrix("lm_head").dequantize(torch.float16)
    )


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_go_out_as_they_came_in(tmp_path: Path, bits: int, symmetric: bool, scattered: bool) -> None:
    def pack(g: foreign_packers.Grid) -> dict[str, torch.Tensor]:
        return foreign_packers.compressed(g, symmetric=symmetric, g_idx=scattered)

    said = foreign_packers.compressed_config(bits, 32, symmetric=symmetric)
    grid = {"bits": bits, "group": 32, "symmetric": symmetric, "scattered": scattered}
    theirs, _ = foreign_packers.write_models(tmp_path, pack, said, **grid)
    kept = quantize(theirs, tmp_path / "kept", "keep").out
    declared = export_directory(open_weights(kept), tmp_path / "back", CompressedTensorsLayout())
    weights = declared["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["symmetric"], weights["group_size"]) == (bits, symmetric, 32)
    assert weights["actorder"] == ("group" if scattered else None)
    assert declared["ignore"] == ["lm_head"]
    same(theirs, tmp_path / "back")


def test_an_awq_model_goes_out_as_it_came_in(tmp_path: Path) -> None:
    theirs, _ = foreign_packers.write_models(tmp_path, foreign_packers.awq_gemm, AWQ, bits=4, group=32)
    kept = quantize(theirs, tmp_path / "kept", "keep").out
    assert export_directory(open_weights(kept), tmp_path / "back", AWQLayout()) == {
        **AWQ,
        "modules_to_not_convert": None,
    }
    same(theirs, tmp_path / "back")


def same(one: Path, other: Path) -> None:
    before, after = read_all(one), read_all(other)
    assert sorted(before) == sorted(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


def test_matrices_that_differ_are_declared_by_name(source: Path, tmp_path: Path) -> None:
    other = {"*.0.mlp.down_proj": "rtn:bits=8,group=32", "*.1.mlp.up_proj": "fp16", "lm_head": "rtn:bits=4,group=32"}
    made = open_weights(quantize(source, tmp_path / "q", "rtn:bits=4,group=32", overrides=other).out)
    said = export_directory(made, tmp_path / "e", CompressedTensorsLayout())
    assert [g["targets"] for g in said["config_groups"].values()] == [["Linear"], ["model.layers.0.mlp.down_proj"]]
    assert said["ignore"] == ["model.layers.1.mlp.up_proj"]
    again = open_weights(tmp_path / "e")
    assert [again.matrix(m).bits for m in ("model.layers.0.mlp.down_proj", "lm_head")] == [8, 4]
    plain = open_weights(quantize(source, tmp_path / "p", "rtn:bits=4,group=32", overrides={"*.1.*": "fp16"}).out)
    kept = export_directory(plain, tmp_path / "a", AWQLayout())["modules_to_not_convert"]
    assert len(kept) == 7
    assert all(".1." in m for m in kept)


TRELLIS = {"format": "trellis", "shape": [32, 64], "bits": 2.0, "code": "pair"}
ROTATED = {"format": "rotated", "shape": [32, 64], "block": 64, "inner": TRELLIS}


@pytest.mark.parametrize(
    ("to", "scheme", "options", "sentence"),
    [
        ("awq", "bcq:bits=2,group=32", {}, "'model.*proj': AWQ stores uniform grids .*, but this is 'bcq'"),
        ("awq", "rtn:bits=3,group=32", {}, "'model.*proj': AWQ has 4 bits, but this has 3"),
        ("awq", "rtn:bits=4,group=24", {}, "its group size 24 does not divide the 64 inputs, which AWQ requires"),
        (
            "awq",
            "rtn:bits=4,group=32",
            {"overrides": {"*.1.mlp.up_proj": "rtn:bits=4,group=16"}},
            "'model.layers.1.mlp.up_proj': its group size is 16, but others have 32; AWQ has one",
        ),
        (
            "awq",
            "rtn:bits=4,group=32",
            {"overrides": {"*.1.mlp.up_proj": "rtn:bits=4,group=row"}},
            "this model has groups of 32 and of a whole row .'model.layers.1.mlp.up_proj': 64",
        ),
        ("awq", "rtn:bits=4,group=32", {"overrides": {"lm_head": "rtn:bits=4,group=32"}}, "AWQ has no quantized head"),
        (
            "compressed-tensors",
            "rtn:bits=4,group=32",
            {"head": "rtn:bits=4,group=32"},
            "'model.embed_tokens': compressed-tensors has no quantized embedding",
        ),
        ("awq", "fp16", {}, "has no quantized matrix to export"),
        ("compressed-tensors", "bcq:bits=2,group=32", {}, "but this is 'bcq'"),
        ("compressed-tensors", "rtn:bits=5,group=32", {}, "compressed-tensors has 2, 3, 4 and 8 bits, but this has 5"),
        ("compressed-tensors", "rtn:bits=4,group=24", {}, "its group size 24 does not divide the 64 inputs"),
    ],
)
def test_what_has_no_place_is_refused(
    source: Path, tmp_path: Path, to: str, scheme: str, options: dict[str, Any], sentence: str
) -> None:
    made = quantize(source, tmp_path / "q", scheme, **options).out
    with pytest.raises(CrelleError, match=sentence) as refused:
        export_directory(open_weights(made), tmp_path / "e", LAYOUTS[to]())
    assert str(made) in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q"]  # nothing is left behind


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("spec", [TRELLIS, ROTATED, {**ROTATED, "out_block": 8}], ids=["bare", "inputs", "both"])
def test_trellis_codes_are_refused(to: str, spec: dict[str, Any]) -> None:
    w = format_of(spec).random(spec, torch.Generator().manual_seed(0))
    with pytest.raises(CrelleError, match=rf"stores uniform grids .*, but this is '{spec['format']}'"):
        LAYOUTS[to]().pack(w, "model.layers.0.mlp.up_proj")


def test_shapes_scales_and_orders_without_a_place_are_refused() -> None:
    codes, half = torch.zeros(8, 32, dtype=torch.uint8), torch.full((8, 1), 0.5)
    exact = UniformTensor.from_codes(codes, 4, half, None, 32)
    with pytest.raises(CrelleError, match=r"its input channels are permuted \(act-order\), which AWQ cannot represent"):
        AWQLayout().pack(PermutedTensor(exact, torch.arange(31, -1, -1, dtype=torch.int32)), UP)
    with pytest.raises(CrelleError, match="its 6 outputs do not fill whole 32-bit words"):
        AWQLayout().pack(exact.rows(slice(6)), UP)
    with pytest.raises(CrelleError, match="a scale is not representable in f16, which AWQ stores"):
        AWQLayout().pack(UniformTensor.from_codes(codes, 4, torch.full((8, 1), 0.1), None, 32), UP)
    alike = UniformTensor.from_codes(torch.tensor([[1] * 10 + [4] * 10], dtype=torch.uint8), 3, half[:1], None, 20)
    with pytest.raises(CrelleError, match="rows of 20 codes of 3 bits cannot be distinguished from the older packing"):
        CompressedTensorsLayout().pack(alike, UP)


@pytest.mark.parametrize("to", LAYOUTS)
def test_the_command(source: Path, tmp_path: Path, to: str) -> None:
    made = quantize(source, tmp_path / "q", "rtn:bits=4,group=32").out
    said = in_process.succeed("export", made, tmp_path / "e", "--to", to, "--json").json
    assert said["quantization_config"]["quant_method"] == to
    assert in_process.run("export", made, tmp_path / "e", "--to", to).err.count("already exists") == 1
    assert "4 bits, group 32" in in_process.succeed("export", made, tmp_path / "e", "--to", to, "--overwrite").out
    one, two = (
        in_process.succeed("generate", p, "--prompt", "ab", "--max-tokens", 8, "--json").json["text"]
        for p in (made, tmp_path / "e")
    )
    assert one == two


def test_only_an_export_of_ours_is_replaced(source: Path, tmp_path: Path) -> None:
    made = open_weights(quantize(source, tmp_path / "q", "rtn:bits=4,group=32").out)
    export_directory(made, tmp_path / "e", AWQLayout())
    index = tmp_path / "e" / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    assert found["metadata"].pop("exporter").startswith("crelle:")
    index.write_text(json.dumps(found))
    with pytest.raises(CrelleError, match="is not a Crelle checkpoint, so it is not replaced"):
        export_directory(made, tmp_path / "e", AWQLayout(), overwrite=True)
    assert index.exists()
