"""A checkpoint that was written before: read as it was, to the last bit, and written the same today."""

import json
from pathlib import Path

import pytest
import torch
from write_checkpoint_v1 import HASHES, hashes, write

from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.formats.affine import NestedTensor
from crelle.formats.storage.checkpoint import FORMATS, Checkpoint

AT = Path(__file__).parents[1] / "checkpoint_v1"
SAID = json.loads((AT / HASHES).read_text())


def test_its_values_are_those_that_were_written() -> None:
    found = Checkpoint(AT)
    held = {spec["format"] for spec in found.specs.values()}
    assert held == {"bcq", "uniform", "affine", "nested", "permuted", "dense"}
    assert held <= set(FORMATS)
    assert hashes(found) == SAID


def test_its_parts_go_through_the_formats_unchanged() -> None:
    found = Checkpoint(AT)
    for module, spec in found.specs.items():
        w = found.matrix(module)
        assert w.spec() == spec
        assert all(torch.equal(t, found._stored(f"{module}.{name}")) for name, t in w.tensors().items())


def test_each_precision_of_its_nested_matrices_is_offered() -> None:
    w = Checkpoint(AT).matrix("model.layers.0.mlp.gate_proj")
    assert isinstance(w, NestedTensor)
    assert w.precisions == (2, 3, 4)
    assert [w.at(b).dequantize().shape for b in w.precisions] == [w.shape] * 3


def test_the_same_is_written_today(tmp_path: Path) -> None:
    write(tmp_path / "new")
    assert hashes(Checkpoint(tmp_path / "new")) == SAID
    old, new = (json.loads((p / "config.json").read_text()) for p in (AT, tmp_path / "new"))
    for config in (old, new):
        del config["quantization_config"]["shards"]  # safetensors may order a shard's bytes otherwise one day
    assert "Crelle" in new.pop("transformers_weights")  # later than this file; no reader of ours looks at it
    assert old == new


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once on CPUs without bf16 products
def test_it_runs() -> None:
    made = LLM.load(AT).generate([[1, 2, 3]], Sampling(max_tokens=4))
    assert len(made[0].tokens) == 4
