"""An index file names files beside it, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import write_tiny_model

from crelle.errors import FormatError
from crelle.formats.storage.open import open_weights

SHARD, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "d" / "m", num_hidden_layers=1, hidden_size=24, intermediate_size=16, head_dim=4)


def name_in_index(model: Path, file: str) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "../../x.safetensors", "sub/x.safetensors", "", ".", "..", "a\0b"]
)
def test_an_index_that_leads_elsewhere_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    (model / "sub").mkdir()
    for place in (tmp_path, model.parent, model / "sub"):
        shutil.copyfile(model / SHARD, place / "x.safetensors")
    name_in_index(model, name)
    with pytest.raises(FormatError, match="should be a plain file name") as refused:
        open_weights(model)
    assert str(model / INDEX) in str(refused.value)


def test_an_absolute_name_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copyfile(model / SHARD, tmp_path / "x.safetensors")
    name_in_index(model, str(tmp_path / "x.safetensors"))
    with pytest.raises(FormatError, match="should be a plain file name"):
        open_weights(model)


def test_a_linked_shard_is_read(model: Path, tmp_path: Path) -> None:
    """Caches keep shards behind links."""
    (model / SHARD).rename(tmp_path / "blob")
    (model / SHARD).symlink_to(tmp_path / "blob")
    name_in_index(model, SHARD)
    assert open_weights(model).shape("model.norm.weight") == (24,)
