"""Where save_pretrained of a quantized model may write: never over another model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tokenizer
from hf_models import logits, write_model
from transformers import AutoModelForCausalLM

from crelle.errors import FormatError
from crelle.formats.storage.io import read_json, to_json
from crelle.integrations.transformers import quantize


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = load(write_model("llama", tmp_path_factory.mktemp("models") / "llama"))
    quantize(made, "rtn:bits=4,group=32")
    return made


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


FOREIGN = {
    "a config alone": {"config.json": b'{"model_type": "llama"}'},
    "a config that cannot be read": {"config.json": b"{"},
    "a GPTQ model": {"config.json": json.dumps({"quantization_config": {"quant_method": "gptq"}}).encode()},
    "weights alone": {"model-00001-of-00002.safetensors": b"x"},
    "pickled weights": {"pytorch_model.bin": b"x"},
    "a GGUF file": {"m.gguf": b"x"},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_model_is_not_replaced(kind: str, model: Any, tmp_path: Path) -> None:
    for name, content in FOREIGN[kind].items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match="of a model that Crelle did not write; choose another directory"):
        model.save_pretrained(tmp_path)
    assert contents(tmp_path) == FOREIGN[kind]


def test_a_linked_config_is_not_ours(model: Any, tmp_path: Path) -> None:
    """As in the cache of Hugging Face, even where the link leads to a checkpoint of ours."""
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "config.json").symlink_to(tmp_path / "ours" / "config.json")
    with pytest.raises(FormatError, match=r"holds config\.json of a model"):
        model.save_pretrained(tmp_path / "linked")


def test_a_checkpoint_of_ours_is_replaced_and_other_files_stay(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "q"
    out.mkdir()
    (out / "README.md").write_text("mine")
    write_tokenizer(out)
    model.save_pretrained(out, max_shard_size="20KB")
    many = set(out.glob("crelle-*.safetensors"))
    model.save_pretrained(out)
    assert len(many) > 1
    assert len(set(out.glob("crelle-*.safetensors"))) == 1
    assert torch.equal(logits(load(out)), logits(model))
    assert (out / "README.md").read_text() == "mine"
    assert (out / "tokenizer.json").is_file()


def test_shards_outside_of_the_directory_are_not_deleted(model: Any, tmp_path: Path) -> None:
    """A config.json may come from anywhere: its list of shards is not believed."""
    out, other = tmp_path / "q", tmp_path / "other.safetensors"
    model.save_pretrained(out)
    other.write_bytes(b"x")
    config = read_json(out / "config.json")
    config["quantization_config"]["shards"] |= {"../other.safetensors": {}, str(other): {}, "notes.txt": {}}
    (out / "config.json").write_bytes(to_json(config))
    (out / "notes.txt").write_text("mine")
    model.save_pretrained(out)
    assert other.exists()
    assert (out / "notes.txt").exists()
