"""Models with as many matrices as DeepSeek-V3: what a writer writes, the readers read."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from sampled_cases import share_of

from crelle.errors import CapacityError, FormatError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import FORMATS, QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.storage import io
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name
from crelle.formats.storage.io import parse_json, read_json, to_json
from crelle.formats.storage.ownership import INDEX, JOURNAL

SPEC = {"format": "grouped", "shape": [4, 32], "bits": 4, "group": 16, "outliers": 16, "outlier_bits": 8}
SPEC |= {"permuted": True, "activation": ActivationSpec(4, 16, 16, 8, 0.9).to_json()}
MATRICES = share_of(
    25_000
)  # of 4 tensors each: 100,000 names in two shards, or a third of it; one spec in JSON, indented, has 450 bytes
RECIPE = {"scheme": "atom"}


@pytest.fixture(scope="module")
def matrices() -> list[dict[str, QuantTensor]]:
    w = FORMATS["grouped"].random(SPEC, torch.Generator().manual_seed(0))
    assert isinstance(w, GroupedTensor)

    def copy() -> GroupedTensor:  # safetensors stores no memory twice
        fresh = {name: t.clone() for name, t in w.tensors().items()}
        return replace(w, packed=fresh.pop("codes"), **fresh)  # type: ignore[arg-type]

    return [
        {
            f"model.layers.{layer}.mlp.experts.{expert}.gate_projection_{layer}": copy()
            for expert in range(MATRICES // 2)
        }
        for layer in (10, 11)
    ]


def test_a_run_with_100_000_names_is_resumed_overwritten_and_read(
    tmp_path: Path, matrices: list[dict[str, QuantTensor]]
) -> None:
    with CheckpointWriter(tmp_path / "q", RECIPE) as writer:
        writer.add(shard_name(1, 2), matrices[0], {})
        writer.add(shard_name(2, 2), matrices[1], {})
    facts = read_json(writer.partial / JOURNAL)["shards"]
    assert sum(len(f["names"]) for f in facts.values()) == 4 * MATRICES
    shutil.copytree(writer.partial, tmp_path / "other.partial")
    with CheckpointWriter(tmp_path / "other", RECIPE, overwrite=True) as again:
        assert not again.has(shard_name(1, 2))
    with CheckpointWriter(tmp_path / "q", RECIPE, resume=True) as resumed:
        assert resumed.has(shard_name(1, 2))
        assert resumed.has(shard_name(2, 2))
        resumed.finish({"model_type": "llama"}, "atom", {})
    assert len(read_json(tmp_path / "q" / INDEX)["weight_map"]) == 4 * MATRICES
    assert len(Checkpoint(tmp_path / "q", verify=False).specs) == MATRICES


def test_a_journal_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with patch.object(io, "MAX_JSON_BYTES", 20_000), CheckpointWriter(tmp_path / "q", RECIPE) as writer:
        writer.add(shard_name(1, 2), {}, {"a": torch.ones(1)})
        before = (writer.partial / JOURNAL).read_bytes()
        with pytest.raises(CapacityError, match="too large to read"):
            writer.add(shard_name(2, 2), {}, {"b" * 20_000: torch.ones(1)})
        assert (writer.partial / JOURNAL).read_bytes() == before
        assert not (writer.partial / shard_name(2, 2)).exists()
    with CheckpointWriter(tmp_path / "q", RECIPE, resume=True) as resumed:
        assert resumed.has(shard_name(1, 2))


@pytest.mark.parametrize("data", [b'{"a":[' + b"[]," * 6_000_000 + b"0]}", b'{"a":[' + b"0," * 6_000_001 + b"0]}"])
def test_many_small_values_are_refused_before_they_are_made(data: bytes) -> None:
    with patch.object(io.json, "loads", side_effect=AssertionError), pytest.raises(FormatError, match="6,000,000 val"):
        parse_json(data, "config.json")


def test_compact_json_means_the_same() -> None:
    value = {"a": [1, {"b": "é"}], "c": None}
    assert parse_json(to_json(value, compact=True), "x") == parse_json(to_json(value), "x") == value
