"""Our directories in the hands of other libraries, and those that an earlier Crelle wrote in ours."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model

from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.formats.exporters.directory import export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.open import open_weights
from crelle.quantizers.pipeline import quantize

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once on CPUs without bf16 products
EARLIER = Path(__file__).with_name("earlier_checkpoint")  # rtn:bits=4,group=8 of a random Llama with one layer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("readers")
    source = write_tiny_model(at / "m", num_hidden_layers=1, hidden_size=24, intermediate_size=16, head_dim=4)
    return quantize(source, at / "q", "rtn:bits=4,group=8").out


def test_transformers_reads_our_config_and_tokenizer(made: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(made, local_files_only=True).hidden_size == 24
    tokenizer = AutoTokenizer.from_pretrained(made, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"


def test_no_name_is_one_that_transformers_looks_for(made: Path) -> None:
    names = {f.name for f in made.iterdir()}
    assert not {n for n in names if n.startswith(("model", "pytorch_model"))}
    assert {n for n in names if n.endswith(".safetensors")} == set(Checkpoint(made).quantization["shards"])
    index = json.loads((made / "crelle.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) <= names


def test_an_export_keeps_the_names_of_others(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "m", num_hidden_layers=1, hidden_size=64, intermediate_size=64, head_dim=8)
    made = quantize(source, tmp_path / "q", "rtn:bits=4,group=32").out
    export_directory(open_weights(made), tmp_path / "g", GPTQLayout())
    names = {f.name for f in (tmp_path / "g").iterdir()}
    assert "model.safetensors.index.json" in names
    assert not {n for n in names if n.startswith("crelle")}


def test_an_earlier_checkpoint_is_read_as_before(tmp_path: Path) -> None:
    old = Checkpoint(EARLIER)
    assert {f.name for f in EARLIER.glob("*.safetensors")} == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    with CheckpointWriter(tmp_path / "new", {}) as writer:
        matrices = {m: old.matrix(m) for m in old.specs}
        writer.add("crelle-00001-of-00001.safetensors", matrices, {n: old.read(n) for n in old.names() if "norm" in n})
        old.copy_tokenizer(writer.partial)
        writer.finish(old.config, old.scheme, {})
    new = Checkpoint(tmp_path / "new")
    assert sorted(old.names()) == sorted(new.names())
    for name in old.names():
        assert torch.equal(old.read(name), new.read(name))
    told = [LLM.load(p).generate("ab", Sampling(max_tokens=8)).text for p in (EARLIER, new.path)]
    assert told[0] == told[1]


def test_an_earlier_checkpoint_can_go_on(tmp_path: Path) -> None:
    """Tuning and exporting take the shards' names from the config, not from a pattern."""
    from crelle.quantize_job.tune import tune_checkpoint
    from crelle.quantizers.training.blockwise import Training

    old = shutil.copytree(EARLIER, tmp_path / "old")
    text = "a small text to train on, " * 40
    tuned = tune_checkpoint(old, None, tmp_path / "new", Training(steps=1, batch=1), text=text, length=16, device="cpu")
    assert {f.name for f in tuned.out.glob("*.safetensors")} == {
        f"crelle-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    assert Checkpoint(tuned.out).names() == Checkpoint(old).names()
