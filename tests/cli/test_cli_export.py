"""crelle export: what is written is read back bit for bit, by our importer and by the documented layout."""

import json
from pathlib import Path
from typing import Any

import foreign_packers
import in_process
import pytest
import torch
from conftest import write_tiny_model
from exported import assert_same_weights, read_all

from crelle.errors import CrelleError, SchemeError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import UniformTensor
from crelle.formats.exporters.directory import Grid, export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.importers.gptq import GPTQDirectory
from crelle.formats.storage.checkpoint_writer import JOURNAL, CheckpointWriter
from crelle.formats.storage.open import open_weights
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.quantizers.pipeline import quantize

SIZES = {**foreign_packers.SMALL, "vocab_size": 288}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "m", **SIZES)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "scheme", ["rtn:bits={},group=32,symmetric=true", "rtn:bits={},group=24", "rtn:bits={},group=row"]
)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.sample(3)
def test_export_then_import_is_bit_equal(source: Path, tmp_path: Path, bits: int, scheme: str, version: int) -> None:
    made = open_weights(quantize(source, tmp_path / "q", scheme.format(bits)).out)
    if version == 1 and any(zero_is_zero(made.matrix(m)) for m in made.specs):  # type: ignore[attr-defined]
        with pytest.raises(CrelleError, match="GPTQ v1 cannot store a zero point of 0; use version 2"):
            export_directory(made, tmp_path / "g", GPTQLayout(1))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["q"]
        return
    export_directory(made, tmp_path / "g", GPTQLayout(version))
    again = open_weights(tmp_path / "g")
    assert isinstance(again, GPTQDirectory)
    assert again.notes == []
    assert_same_weights(made, again)


def zero_is_zero(w: Any) -> bool:
    return isinstance(w, UniformTensor) and bool((w.zeros() == 0).any())


def test_the_tensors_are_those_of_the_documented_layout(source: Path, tmp_path: Path) -> None:
    made = open_weights(quantize(source, tmp_path / "q", "rtn:bits=3,group=32").out)
    export_directory(made, tmp_path / "g", GPTQLayout())
    stored = read_all(tmp_path / "g")
    module = "model.layers.1.mlp.down_proj"
    w = made.matrix(module)
    assert isinstance(w, UniformTensor)
    g = foreign_packers.Grid(w.codes().long(), 3, w.scale, w.zeros().long(), 32, torch.arange(96) // 32)
    for part, tensor in foreign_packers.gptq(g).items():
        assert stored[f"{module}.{part}"].dtype == tensor.dtype
        assert torch.equal(stored[f"{module}.{part}"], tensor), part
    assert f"{module}.weight" not in stored
    config = json.loads((tmp_path / "g" / "config.json").read_text())
    assert config["hidden_size"] == 64
    said = config["quantization_config"]
    assert said.pop("meta")["quantizer"][0].startswith("crelle:")
    assert said == {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": 3,
        "group_size": 32,
        "sym": False,
        "desc_act": False,
        "lm_head": False,
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"):
        assert (tmp_path / "g" / name).is_file()
    index = json.loads((tmp_path / "g" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(stored)


def test_an_act_order_model_goes_out_as_it_came_in(tmp_path: Path) -> None:
    said = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False, "desc_act": True}
    theirs, _ = foreign_packers.write_models(tmp_path, foreign_packers.gptq, said, bits=4, group=32, scattered=True)
    kept = quantize(theirs, tmp_path / "kept", "keep").out
    assert export_directory(open_weights(kept), tmp_path / "back", GPTQLayout())["desc_act"] is True
    before, after = read_all(theirs), read_all(tmp_path / "back")
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_matrices_that_differ_are_named_in_the_config(source: Path, tmp_path: Path) -> None:
    other = {"*.0.mlp.down_proj": "rtn:bits=8,group=32", "*.1.mlp.up_proj": "fp16", "lm_head": "rtn:bits=4,group=32"}
    made = open_weights(quantize(source, tmp_path / "q", "rtn:bits=4,group=32", overrides=other).out)
    said = export_directory(made, tmp_path / "g", GPTQLayout())
    assert (said["bits"], said["group_size"], said["lm_head"]) == (4, 32, True)
    assert said["dynamic"] == {
        r"+:^model\.layers\.0\.mlp\.down_proj$": {"bits": 8, "group_size": 32},
        r"-:^model\.layers\.1\.mlp\.up_proj$": {},
    }
    again = open_weights(tmp_path / "g")
    assert again.matrix("model.layers.0.mlp.down_proj").bits == 8
    assert again.matrix("model.layers.1.mlp.up_proj").format == "dense"


@pytest.mark.parametrize(
    ("scheme", "options", "sentence"),
    [
        ("bcq:bits=2,group=32", {}, "GPTQ stores uniform grids .*, but this is 'bcq'"),
        ("rtn:bits=5,group=32", {}, "GPTQ has 2, 3, 4 and 8 bits, but this has 5"),
        ("fp16", {}, "has no quantized matrix to export"),
        (
            "rtn:bits=4,group=32",
            {"head": "rtn:bits=4,group=32"},
            "'model.embed_tokens': GPTQ has no quantized embedding",
        ),
    ],
)
def test_what_gptq_has_no_place_for_is_refused(
    source: Path, tmp_path: Path, scheme: str, options: dict[str, Any], sentence: str
) -> None:
    made = quantize(source, tmp_path / "q", scheme, **options).out
    with pytest.raises(CrelleError, match=sentence) as refused:
        export_directory(open_weights(made), tmp_path / "g", GPTQLayout())
    assert str(made) in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q"]  # nothing is left behind


def pack(w: QuantTensor) -> tuple[dict[str, torch.Tensor], Grid]:
    return GPTQLayout(2).pack(w, "m")


def test_shapes_and_scales_without_a_place_are_refused() -> None:
    codes = torch.zeros(6, 32, dtype=torch.uint8)
    scale = torch.ones(6, 1)
    with pytest.raises(CrelleError, match="6 x 32 at 4 bits does not fill whole 32-bit words"):
        pack(UniformTensor.from_codes(codes, 4, scale, None, 32))
    odd = UniformTensor.from_codes(codes.expand(-1, -1)[:4].repeat(2, 1), 4, torch.full((8, 1), 0.1), None, 32)
    with pytest.raises(CrelleError, match="a scale is not representable in f16"):
        pack(odd)
    exact = UniformTensor.from_codes(torch.zeros(8, 32, dtype=torch.uint8), 4, torch.full((8, 1), 0.25), None, 32)
    packed, grid = pack(PermutedTensor(exact, torch.arange(31, -1, -1, dtype=torch.int32)))
    assert packed["scales"].dtype == torch.float16
    assert grid == Grid(4, -1, True, True)


def test_versions_that_do_not_exist_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="unknown GPTQ version 3; choose 1 or 2"):
        export_directory(open_weights(source), tmp_path / "g", GPTQLayout(3))


def test_nothing_looks_finished_before_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_weights(quantize(source, tmp_path / "q", "rtn:bits=4,group=32").out)
    seen = []
    publish = CheckpointWriter.publish

    def watch(self: CheckpointWriter, *rest: Any) -> None:
        seen.append(((tmp_path / "g").exists(), (self.partial / "config.json").exists()))
        publish(self, *rest)

    monkeypatch.setattr(CheckpointWriter, "publish", watch)
    export_directory(made, tmp_path / "g", GPTQLayout())
    assert seen == [(False, False)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "q"]


def test_a_killed_export_is_begun_anew_and_a_killed_quantizing_is_not_touched(source: Path, tmp_path: Path) -> None:
    made = open_weights(quantize(source, tmp_path / "q", "rtn:bits=4,group=32").out)
    partial = tmp_path / "g.partial"
    partial.mkdir()
    (partial / "model-00001-of-00005.safetensors").write_bytes(b"half")
    shards = {"model-00001-of-00005.safetensors": {}}
    (partial / JOURNAL).write_text(json.dumps({"crelle_journal": 2, "recipe": {"scheme": "rtn"}, "shards": shards}))
    with pytest.raises(CrelleError, match="contains an unfinished run"):
        export_directory(made, tmp_path / "g", GPTQLayout())
    assert (partial / "model-00001-of-00005.safetensors").read_bytes() == b"half"
    (partial / JOURNAL).write_text(json.dumps({"crelle_journal": 2, "recipe": {"export": "gptq"}, "shards": shards}))
    export_directory(made, tmp_path / "g", GPTQLayout())
    assert not partial.exists()
    assert isinstance(open_weights(tmp_path / "g"), GPTQDirectory)


def test_the_command(source: Path, tmp_path: Path) -> None:
    made = quantize(source, tmp_path / "q", "rtn:bits=4,group=32,symmetric=true").out
    said = in_process.succeed("export", made, tmp_path / "g", "--gptq-version", 1, "--json").json
    assert said["quantization_config"]["checkpoint_format"] == "gptq"
    assert in_process.run("export", made, tmp_path / "g").err.count("already exists") == 1
    assert "4 bits, group 32, gptq_v2" in in_process.succeed("export", made, tmp_path / "g", "--overwrite").out
    refused = in_process.run("export", made, tmp_path / "h", "--to", "onnx")
    assert (refused.code, "unknown export format 'onnx'; choose one of: gptq, awq, compr" in refused.err) == (2, True)
    refused = in_process.run("export", made, tmp_path / "h", "--to", "awq", "--gptq-version", 1)
    assert (refused.code, "--gptq-version applies to --to gptq, not to awq" in refused.err) == (2, True)
    one, two = (
        in_process.succeed("generate", p, "--prompt", "ab", "--max-tokens", 8, "--json").json["text"]
        for p in (made, tmp_path / "g")
    )
    assert one == two


def test_rounded_embedding_is_reported_for_people_and_in_json(source: Path, tmp_path: Path) -> None:
    in_process.succeed("quantize", source, tmp_path / "q", "--scheme", "rtn:bits=4,group=32")  # a head of 8 bits
    done = in_process.succeed("export", tmp_path / "q", tmp_path / "g", "--json")
    (sentence,) = (line for line in done.json["warnings"] if line.startswith("model.embed_tokens"))
    assert "GPTQ cannot store; it is written as fp16" in sentence
    assert "of its values by at most" in sentence
    assert f"warning: {sentence}" in done.err
