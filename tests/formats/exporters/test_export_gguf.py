"""Exports to GGUF: equal values by our importer and by the gguf package, the same tokens, refusals, ownership."""

import json
from pathlib import Path
from typing import Any

import gguf
import in_process
import numpy as np
import pytest
import torch
from conftest import write_tiny_model
from tiny_gguf import HEADS, KV_HEADS, gguf_name, permute, tiny_tensors, write_tiny_gguf

from crelle.engine.llm import LLM
from crelle.errors import CrelleError
from crelle.formats.affine import AffineTensor
from crelle.formats.bcq import UniformTensor
from crelle.formats.exporters import gguf_blocks
from crelle.formats.exporters.gguf import export_gguf
from crelle.formats.exporters.gguf_metadata import rope
from crelle.formats.importers.gguf import GGUFFile
from crelle.formats.storage.open import open_weights
from crelle.formats.trellis import TrellisTensor
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.models.loader import build
from crelle.quantizers.pipeline import quantize

EXACT = "rtn:bits=4,group=32,symmetric=true"
Type = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("source") / "m.gguf")


@pytest.mark.parametrize(
    ("arch", "scheme", "kind"),
    [
        ("llama", EXACT, "Q4_0"),
        ("llama", "rtn:bits=3,group=32", "Q4_0"),
        ("llama", "rtn:bits=4,group=32", "Q5_0"),
        ("llama", "rtn:bits=5,group=32", "Q8_0"),
        ("llama", "rtn:bits=8,group=32,symmetric=true", "Q8_0"),
        ("qwen2", "rtn:bits=4,group=row,symmetric=true", "Q4_0"),
        ("qwen3", EXACT, "Q4_0"),
    ],
)
def test_both_readers_find_the_same_values(tmp_path: Path, arch: str, scheme: str, kind: str) -> None:
    made = open_weights(quantize(write_tiny_gguf(tmp_path / "m.gguf", arch), tmp_path / "q", scheme).out)
    facts = export_gguf(made, tmp_path / "e.gguf")
    assert facts["architecture"] == arch
    assert facts["types"][kind] == 14
    again = GGUFFile(tmp_path / "e.gguf", encoded=True)
    assert sorted(again.names()) == sorted(made.names())
    theirs = {t.name: t for t in gguf.GGUFReader(tmp_path / "e.gguf").tensors}
    for name in made.names():
        before = made.read(name).float()
        assert torch.equal(again.read(name).float(), before), name
        if len(before.shape) == 2:
            assert torch.equal(again.matrix(name.removesuffix(".weight")).dequantize(), before), name
        t = theirs[gguf_name(name)]
        values = gguf.quants.dequantize(t.data, t.tensor_type).reshape(before.shape)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            before = torch.from_numpy(permute(before.numpy(), HEADS if "q_proj" in name else KV_HEADS))
        assert np.array_equal(values, before.numpy()), name


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    model = build(open_weights(path), torch.device("cpu"))
    return model(torch.tensor([ids]), model.new_cache(1))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_logits_tokens_and_config_survive(tmp_path: Path, arch: str) -> None:
    made = quantize(write_tiny_gguf(tmp_path / "m.gguf", arch), tmp_path / "q", EXACT).out
    export_gguf(open_weights(made), tmp_path / "e.gguf")
    kept = quantize(tmp_path / "e.gguf", tmp_path / "kept", "keep").out
    one, two = (LLM.load(p) for p in (made, kept))
    ids = one.tokenizer.encode("the three thieves <|start|>")
    assert two.tokenizer.encode("the three thieves <|start|>") == ids
    assert torch.equal(logits(made, ids), logits(kept, ids))
    before, after = open_weights(made).config, open_weights(kept).config
    assert {k: v for k, v in after.items() if k != "quantization_config"} == {
        k: v for k, v in before.items() if k != "quantization_config"
    }


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_a_file_goes_out_as_it_came_in(tmp_path: Path, kind: Type) -> None:
    theirs = write_tiny_gguf(tmp_path / "m.gguf", tensors=tiny_tensors("llama", tied=True), kind=kind)
    export_gguf(open_weights(quantize(theirs, tmp_path / "kept", "keep", head="keep").out), tmp_path / "e.gguf")
    before, after = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (theirs, tmp_path / "e.gguf"))
    assert sorted(before) == sorted(after)
    for name, t in before.items():
        assert after[name].tensor_type == t.tensor_type, name
        assert np.array_equal(after[name].data, t.data), name
    in_process.succeed("export", theirs, tmp_path / "direct.gguf", "--to", "gguf")
    assert (tmp_path / "direct.gguf").stat().st_size > 0


def uniform(bits: int, group: int, zero: int | None, scale: float = 0.5, K: int = 64) -> UniformTensor:
    codes = torch.randint(0, 2**bits, (4, K), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    per_group = torch.full((4, -(-K // group)), scale)
    zeros = None if zero is None else torch.full(per_group.shape, zero, dtype=torch.uint8)
    return UniformTensor.from_codes(codes, bits, per_group, zeros, group)


@pytest.mark.parametrize(
    ("w", "kind"),
    [
        (uniform(4, 64, None), "Q4_0"),
        (uniform(2, 32, 3), "Q4_0"),
        (uniform(4, 32, 3), "Q4_1"),  # -0.5 * 3 is exact in f16
        (uniform(4, 32, 13, 0.33325195), "Q5_0"),  # 11 bits of scale times 13 are not
        (uniform(7, 32, 127), "Q8_0"),
        (uniform(4, 64, None, K=96), "Q4_0"),  # a shorter last group, of whole blocks
    ],
)
def test_the_smallest_type_that_is_exact(w: UniformTensor, kind: str) -> None:
    assert gguf_blocks.plan(w).kind == kind
    values = gguf.quants.dequantize(gguf_blocks.stored(w), Type[kind])
    assert np.array_equal(values, w.dequantize().numpy())


def affine(bits: int, low: float) -> AffineTensor:
    g = uniform(bits, 32, None)
    return AffineTensor.from_codes(g.codes(), bits, g.scale, torch.full(g.scale.shape, low), 32)


def trellis() -> TrellisTensor:
    return TrellisTensor.random({"shape": [32, 64], "bits": 2.0, "code": "pair"}, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("w", "sentence"),
    [
        (uniform(4, 24, None), "its groups of 24 in rows of 64 are not whole blocks of 32, which GGUF requires"),
        (uniform(4, 32, None, K=72), "its groups of 32 in rows of 72 are not whole blocks"),
        (uniform(4, 32, None, 0.1), "a scale is not representable in f16, which GGUF stores"),
        (uniform(8, 32, 100), "its zero points put 8-bit codes at levels -100 to 155, but Q8_0 has -128"),
        (uniform(4, 32, None).to_bcq(), "GGUF stores uniform grids .*, but this is 'bcq'"),
        (trellis(), "GGUF stores uniform grids .*, but this is 'trellis'"),
        (RotatedTensor(trellis(), Rotation.of_inputs(64)), "GGUF stores uniform grids .*, but this is 'rotated'"),
        (affine(4, 0.1), "a scale is not representable in f16"),
        (affine(6, 0.5), "GGUF has affine grids of up to 5 bits, but this has 6"),
        (
            PermutedTensor(uniform(4, 32, None), torch.arange(63, -1, -1, dtype=torch.int32)),
            "its input channels are permuted",
        ),
    ],
)
def test_what_gguf_cannot_hold_exactly_is_refused(w: Any, sentence: str) -> None:
    with pytest.raises(CrelleError, match=sentence):
        gguf_blocks.plan(w)


def test_a_refusal_names_the_matrix_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    made = quantize(source, tmp_path / "q", EXACT, overrides={"*.1.mlp.up_proj": "bcq:bits=2,group=32"}).out
    with pytest.raises(CrelleError, match=r"q, 'model.layers.1.mlp.up_proj': GGUF stores uniform grids"):
        export_gguf(open_weights(made), tmp_path / "e.gguf")
    with pytest.raises(CrelleError, match="has no quantized matrix to export"):
        export_gguf(open_weights(source), tmp_path / "e.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "opt"}, "GGUF export supports llama, mistral, qwen2, qwen3, but this is a 'opt' model"),
        ({"hidden_act": "gelu"}, "llama.cpp runs this family with silu, but the model has 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling, not 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "its config is invalid"),
        ({"rms_norm_eps": None}, "its config needs the number 'rms_norm_eps'"),
    ],
)
def test_configs_that_gguf_cannot_say_are_refused(
    source: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    made = open_weights(quantize(source, tmp_path / "q", EXACT).out)
    made.config |= changes
    with pytest.raises(CrelleError, match=sentence):
        export_gguf(made, tmp_path / "e.gguf")


def test_rope_scaling_survives(source: Path, tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    for i, said in enumerate((llama3, linear)):
        made = open_weights(quantize(source, tmp_path / f"q{i}", EXACT).out)
        made.config["rope_parameters"] = said
        export_gguf(made, tmp_path / f"{i}.gguf")
        assert GGUFFile(tmp_path / f"{i}.gguf").config["rope_parameters"] == said
    old = {"head_dim": 32, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}
    assert rope(old)[:2] == (1e6, 2.0)


def test_a_mistral_is_a_llama_within_its_window(source: Path, tmp_path: Path) -> None:
    made = open_weights(quantize(source, tmp_path / "q", EXACT).out)
    made.config |= {"model_type": "mistral", "sliding_window": 40}
    assert export_gguf(made, tmp_path / "e.gguf")["architecture"] == "llama"
    assert GGUFFile(tmp_path / "e.gguf").config["max_position_embeddings"] == 40


def test_only_a_file_of_ours_is_replaced(source: Path, tmp_path: Path) -> None:
    made = quantize(source, tmp_path / "q", EXACT).out
    out = tmp_path / "e.gguf"
    said = in_process.succeed("export", made, out, "--to", "gguf", "--json").json
    assert said["types"]["Q4_0"] == 14
    first = out.read_bytes()
    assert "already exists" in in_process.run("export", made, out, "--to", "gguf").err
    assert "14 Q4_0 tensors" in in_process.succeed("export", made, out, "--to", "gguf", "--overwrite").out
    assert out.read_bytes() == first
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(source.read_bytes())
    (tmp_path / "link.gguf").symlink_to(out)
    for other in (foreign, tmp_path / "link.gguf", tmp_path / "q"):
        refused = in_process.run("export", made, other, "--to", "gguf", "--overwrite")
        assert refused.code == 2, refused
    assert foreign.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.gguf", "foreign.gguf", "link.gguf", "q"]


def test_no_gguf_package_is_a_sentence(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_weights(source)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CrelleError, match="GGUF export needs the package gguf: pip install gguf"):
        export_gguf(made, tmp_path / "e.gguf")


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "vocab_size": 264}
    made = quantize(write_tiny_model(tmp_path / "m", **sizes), tmp_path / "q", EXACT).out
    with pytest.raises(CrelleError, match="its tokenizer has no merges"):
        export_gguf(open_weights(made), tmp_path / "e.gguf")
    merge(made, 264)
    with pytest.raises(CrelleError, match="its tokenizer has 265 tokens, but its embedding has 264 rows"):
        export_gguf(open_weights(made), tmp_path / "e.gguf")
    merge(made, 258)
    with pytest.raises(CrelleError, match="its tokenizer has two tokens with the same id: 258"):
        export_gguf(open_weights(made), tmp_path / "e.gguf")
    merge(made, 259)
    with pytest.raises(CrelleError, match="splits text by a rule that GGUF does not have; known rules: gpt-2, smollm"):
        export_gguf(open_weights(made), tmp_path / "e.gguf")
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(made / "tokenizer.json"))
    export_gguf(open_weights(made), tmp_path / "e.gguf")
    kept = quantize(tmp_path / "e.gguf", tmp_path / "kept", "keep").out
    ids = LLM.load(made).tokenizer.encode("the path")
    assert LLM.load(kept).tokenizer.encode("the path") == ids
    assert torch.equal(logits(made, ids), logits(kept, ids))
    file = GGUFFile(tmp_path / "e.gguf")
    said = json.loads((made / "tokenizer_config.json").read_text())["chat_template"]
    assert file.get("tokenizer.chat_template") == said
    assert file.get("tokenizer.ggml.tokens")[-1] == "[PAD263]"  # one token for each row


def merge(made: Path, i: int) -> None:
    """Give a tokenizer the token "th" and its merge."""
    saved = json.loads((made / "tokenizer.json").read_text())
    saved["model"]["vocab"] |= {a["content"]: a["id"] for a in saved["added_tokens"]} | {"th": i}
    saved["model"]["merges"] = [["t", "h"]]
    (made / "tokenizer.json").write_text(json.dumps(saved))


def test_sentencepiece_survives(data: Path, tmp_path: Path) -> None:
    made = quantize(data / "stories15M", tmp_path / "q", EXACT).out
    export_gguf(open_weights(made), tmp_path / "e.gguf")
    file = GGUFFile(tmp_path / "e.gguf")
    assert (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.add_bos_token")) == ("llama", True)
    kept = quantize(tmp_path / "e.gguf", tmp_path / "kept", "keep").out
    one, two = (LLM.load(p).tokenizer for p in (made, kept))
    text = "Once upon a time, Lily's cat ate 12 ööö → 猫\n\n  and   slept."
    ids = one.encode(text)
    assert two.encode(text) == ids
    assert torch.equal(logits(made, ids), logits(kept, ids))
