"""Whatever lies at a path: opened under one interface, or refused with a sentence that names the path."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import TINY

from crelle.errors import FormatError
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.hf import HFDirectory
from crelle.formats.storage.open import open_weights

INDEX = "model.safetensors.index.json"


def refusal(path: Path) -> str:
    with pytest.raises(FormatError) as refused:
        open_weights(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def single(tiny_model: Path, tmp_path: Path) -> Path:
    """A model in one safetensors file, ours to change."""
    return shutil.copytree(tiny_model, tmp_path / "single")


@pytest.fixture
def sharded(tiny_model: Path, tmp_path: Path) -> Path:
    """The same model in three shards with an index, as transformers saves a large one."""
    to = tmp_path / "sharded"
    shutil.copytree(tiny_model, to, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = safetensors.torch.load_file(tiny_model / "model.safetensors")
    where = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(where.values()):
        safetensors.torch.save_file({n: t for n, t in tensors.items() if where[n] == shard}, to / shard)
    (to / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return to


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_of_a_directory_is_read(kind: str, tiny_model: Path, request: pytest.FixtureRequest) -> None:
    weights = open_weights(request.getfixturevalue(kind))
    want = safetensors.torch.load_file(tiny_model / "model.safetensors")
    assert isinstance(weights, HFDirectory)
    assert sorted(weights.names()) == sorted(want)
    for name, tensor in want.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.read(name), tensor)
    assert weights.config == TINY
    head = weights.matrix("lm_head")
    assert isinstance(head, DenseTensor)
    assert torch.equal(head.weight, want["lm_head.weight"])


def test_files_beside_the_index_are_not_read(sharded: Path) -> None:
    safetensors.torch.save_file({"stranger": torch.zeros(1)}, sharded / "consolidated.safetensors")
    assert "stranger" not in open_weights(sharded).names()


def test_a_string_is_a_path_too(single: Path) -> None:
    assert open_weights(str(single)).path == single


def test_the_tokenizer_is_copied(single: Path, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    to.mkdir()
    open_weights(single).copy_tokenizer(to)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (to / name).read_bytes() == (single / name).read_bytes()


def test_a_tensor_that_is_not_there_is_a_sentence(single: Path) -> None:
    with pytest.raises(FormatError, match=r"has no tensor 'nothing\.weight'"):
        open_weights(single).read("nothing.weight")


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert refusal(path).startswith(f"{path} does not exist")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} has no config.json, so it is not a model directory"


def test_a_directory_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert refusal(single) == f"{single} contains no *.safetensors file"


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert refusal(sharded) == f"{shard} is missing"


def test_a_truncated_shard_is_refused(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refusal(sharded).startswith(f"{shard} is truncated")


@pytest.mark.parametrize("index", ['{"metadata": {}}', '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{"])
def test_a_broken_index_is_refused(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    assert str(sharded / INDEX) in refusal(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "model.pkl"])
def test_a_directory_with_a_pickle_is_refused(single: Path, name: str) -> None:
    (single / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(3)}, single / name)
    assert refusal(single).startswith(f"{single / name} is a pickle")


def test_a_pickle_beside_safetensors_is_left_alone(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert "lm_head.weight" in open_weights(single).names()


@pytest.mark.parametrize("how", ["pickle", "torch"])
@pytest.mark.parametrize("where", ["inside", "path"])
def test_a_pickle_renamed_to_safetensors_is_refused(single: Path, how: str, where: str) -> None:
    file = single / "model.safetensors"
    if how == "torch":
        torch.save({"w": torch.zeros(3)}, file)
    else:
        file.write_bytes(pickle.dumps({"w": 1}))
    assert refusal(single if where == "inside" else file).startswith(f"{file} is a pickle")


@pytest.mark.parametrize("content", [b"", b"G", b"hello, I am no model", b"\x00" * 100])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert refusal(file).startswith(f"{file} is neither a GGUF file nor a directory")


@pytest.mark.parametrize(("method", "shown"), [({"quant_method": "quip", "bits": 2}, "quip"), ("odd", "odd")])
def test_models_quantized_in_an_unknown_way_are_refused(single: Path, method: object, shown: str) -> None:
    (single / "config.json").write_text(json.dumps({**TINY, "quantization_config": method}))
    assert refusal(single).startswith(f"{single} is quantized by '{shown}', which Crelle cannot read")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_plain_model_that_says_it_is_quantized_is_refused(single: Path, method: str) -> None:
    (single / "config.json").write_text(json.dumps({**TINY, "quantization_config": {"quant_method": method}}))
    assert refusal(single) == f"{single} declares {method} quantization, but no tensor name ends in '.qweight'"


def test_a_config_that_is_no_json_is_refused(single: Path) -> None:
    (single / "config.json").write_text("{")
    assert refusal(single).startswith(f"{single / 'config.json'} is not valid JSON")
