"""A checkpoint is whole or it is not there, and every way in which it can be broken is a sentence."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from crelle.errors import CapacityError, FormatError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.storage import io
from crelle.formats.storage.checkpoint import FORMAT_VERSION, FORMATS, Checkpoint, copy_tokenizer_files
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.open import open_weights

RECIPE = {"scheme": "some", "source": "here"}
FIRST, SECOND = "crelle-00001-of-00002.safetensors", "crelle-00002-of-00002.safetensors"


def matrices() -> dict[str, QuantTensor]:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (5, 13), generator=random, dtype=torch.uint8)
    scale, zero = torch.rand(5, 2, generator=random).half(), torch.randint(0, 8, (5, 2), generator=random)
    alpha = torch.rand(3, 5, 2, generator=random).half()
    return {
        "layers.0.a": BCQTensor.from_codes(codes, alpha, scale, 8),
        "layers.0.b": BCQTensor.from_codes(codes, alpha + 1, None, 8),
        "layers.1.c": UniformTensor.from_codes(codes, 3, scale, zero, 8),
        "layers.1.d": UniformTensor.from_codes(codes, 3, scale + 1, None, 8),
        "head": DenseTensor(torch.randn(4, 13, generator=random).bfloat16()),
    }


NORM = torch.arange(13.0)


def write(out: Path, **options: Any) -> Path:
    """Write a checkpoint of two shards."""
    m = matrices()
    with CheckpointWriter(out, RECIPE, **options) as writer:
        writer.add(FIRST, {k: m[k] for k in ("layers.0.a", "layers.0.b")}, {"layers.0.norm.weight": NORM})
        writer.add(SECOND, {k: m[k] for k in ("layers.1.c", "layers.1.d", "head")}, {})
        writer.finish({"model_type": "llama"}, "bcq:bits=3,group=8", {"head": "bf16"})
    return out


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write(tmp_path / "made")


def change_config(made: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = made / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def contents(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


def test_write_read_round_trip(made: Path) -> None:
    checkpoint = Checkpoint(made)
    for name, w in matrices().items():
        again = checkpoint.matrix(name)
        assert type(again) is type(w)
        assert again.spec() == w.spec()
        assert all(torch.equal(t, again.tensors()[k]) for k, t in w.tensors().items())
        assert checkpoint.shape(f"{name}.weight") == w.shape
    assert torch.equal(checkpoint.read("layers.0.norm.weight"), NORM)
    assert checkpoint.shape("layers.0.norm.weight") == (13,)
    assert sorted(checkpoint.names()) == sorted([*(f"{m}.weight" for m in matrices()), "layers.0.norm.weight"])
    assert checkpoint.scheme == "bcq:bits=3,group=8"
    assert checkpoint.quantization["overrides"] == {"head": "bf16"}
    assert checkpoint.config["model_type"] == "llama"
    assert isinstance(open_weights(made), Checkpoint)


def test_a_finished_checkpoint_holds_nothing_but_its_files(made: Path) -> None:
    assert set(contents(made)) == {"config.json", "crelle.safetensors.index.json", FIRST, SECOND}
    assert not made.with_name("made.partial").exists()


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "a")) == contents(write(tmp_path / "b"))


def test_index_names_the_shard_of_every_tensor(made: Path) -> None:
    index = json.loads((made / "crelle.safetensors.index.json").read_text())
    stored = {
        name: shard for shard in (FIRST, SECOND) for name in safetensors.torch.load_file(made / shard)
    }  # fmt: skip
    assert index["weight_map"] == stored


def test_unknown_names_are_a_sentence(made: Path) -> None:
    checkpoint = Checkpoint(made)
    with pytest.raises(FormatError, match=r"has no matrix 'layers\.9\.a'"):
        checkpoint.matrix("layers.9.a")
    with pytest.raises(FormatError, match=r"has no tensor 'layers\.9\.norm\.weight'"):
        checkpoint.read("layers.9.norm.weight")


@pytest.mark.parametrize("where", [0, 8, 100, -1])
@pytest.mark.parametrize("shard", [FIRST, SECOND])
def test_a_flipped_bit_is_found(made: Path, shard: str, where: int) -> None:
    data = bytearray((made / shard).read_bytes())
    data[where] ^= 1
    (made / shard).write_bytes(data)
    with pytest.raises(FormatError, match="was altered: its SHA-256") as refused:
        Checkpoint(made)
    assert str(made / shard) in str(refused.value)


def test_without_verify_the_sum_is_not_checked(made: Path) -> None:
    data = bytearray((made / SECOND).read_bytes())
    data[-1] ^= 1
    (made / SECOND).write_bytes(data)
    assert Checkpoint(made, verify=False).matrix("head").shape == (4, 13)


@pytest.mark.parametrize("length", [0, 1, 8, 100, -1])
def test_a_truncated_shard_is_found(made: Path, length: int) -> None:
    data = (made / FIRST).read_bytes()
    (made / FIRST).write_bytes(data[:length])
    for verify in (True, False):
        with pytest.raises(FormatError, match="truncated") as refused:
            Checkpoint(made, verify)
        assert str(made / FIRST) in str(refused.value)


def test_a_missing_shard_is_found(made: Path) -> None:
    (made / SECOND).unlink()
    with pytest.raises(FormatError, match="is missing") as refused:
        Checkpoint(made)
    assert str(made / SECOND) in str(refused.value)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, "1", None])
def test_unknown_versions_are_refused(made: Path, version: object) -> None:
    change_config(made, lambda q: q.update(format_version=version))
    with pytest.raises(FormatError, match=f"has format version {version!r}") as refused:
        open_weights(made)
    assert str(made / "config.json") in str(refused.value)


def test_unknown_keys_are_refused(made: Path) -> None:
    change_config(made, lambda q: q.update(rotation="hadamard"))
    with pytest.raises(FormatError, match="unknown key 'rotation'"):
        Checkpoint(made)


@pytest.mark.parametrize("key", ["scheme", "overrides", "tensors", "shards"])
def test_missing_keys_are_refused(made: Path, key: str) -> None:
    change_config(made, lambda q: q.pop(key))
    with pytest.raises(FormatError, match=f"has no key '{key}'"):
        Checkpoint(made)


@pytest.mark.parametrize("spec", [{"format": "no such format", "shape": [5, 13]}, {}, None, "bcq", ["bcq"]])
def test_unknown_formats_are_refused(made: Path, spec: object) -> None:
    change_config(made, lambda q: q["tensors"].update({"layers.0.a": spec}))
    with pytest.raises(FormatError, match=r"'layers\.0\.a' has an unknown format") as refused:
        Checkpoint(made)
    assert f"known: {', '.join(sorted(FORMATS))}" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 4}, "'planes' should be"),
        ({"bits": 9}, "bits must be 1 to 8"),
        ({"group": 0}, "group must be 1 to"),
        ({"shape": [13, 13]}, "should be"),
        ({"bias": False, "salt": 1}, "does not know the key 'salt'"),
    ],
)
def test_a_spec_that_does_not_fit_its_tensors_is_refused(made: Path, change: dict[str, Any], sentence: str) -> None:
    change_config(made, lambda q: q["tensors"]["layers.0.a"].update(change))
    with pytest.raises(FormatError, match=sentence) as refused:
        Checkpoint(made).matrix("layers.0.a")
    assert "layers.0.a" in str(refused.value)


@pytest.mark.parametrize("value", [None, 7, "text", [1]])
@pytest.mark.parametrize("key", ["tensors", "shards", "overrides", "scheme"])
def test_values_of_the_wrong_type_are_a_sentence(made: Path, key: str, value: object) -> None:
    if key == "scheme" and isinstance(value, str):
        value = {}
    change_config(made, lambda q: q.update({key: value}))
    with pytest.raises(FormatError, match=f"'{key}'"):
        Checkpoint(made)


@pytest.mark.parametrize(
    "facts", [None, 7, {}, {"bytes": 1}, {"sha256": "0"}, {"bytes": "1", "sha256": "0"}, {"bytes": 1, "sha256": 2}]
)
def test_facts_of_a_shard_that_make_no_sense_are_a_sentence(made: Path, facts: object) -> None:
    change_config(made, lambda q: q["shards"].update({FIRST: facts}))
    with pytest.raises(FormatError, match=FIRST):
        Checkpoint(made)


@pytest.mark.parametrize("shape", [None, [5], [5, 0], "5x13"])
def test_a_shape_that_makes_no_sense_is_a_sentence(made: Path, shape: object) -> None:
    change_config(made, lambda q: q["tensors"]["head"].update(shape=shape))
    with pytest.raises(FormatError, match="two positive integers"):
        Checkpoint(made)


def test_a_shard_elsewhere_is_refused(made: Path) -> None:
    outside = made.with_name(FIRST)
    shutil.move(made / FIRST, outside)
    facts = json.loads((made / "config.json").read_text())["quantization_config"]["shards"][FIRST]
    change_config(made, lambda q: q["shards"].update({f"../{FIRST}": facts}) or q["shards"].pop(FIRST))
    with pytest.raises(FormatError, match="a plain file name"):
        Checkpoint(made)


def test_a_plain_model_is_no_checkpoint(tiny_model: Path) -> None:
    with pytest.raises(FormatError, match="is not a Crelle checkpoint"):
        Checkpoint(tiny_model)


# Writing


def test_what_is_unfinished_never_looks_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with CheckpointWriter(out, RECIPE) as writer:
        for shard in (FIRST, SECOND):
            assert not out.exists()
            with pytest.raises(FormatError, match=r"has no config\.json"):
                open_weights(writer.partial)
            writer.add(shard, {}, {f"{shard}.norm": NORM})
        with pytest.raises(FormatError, match=r"has no config\.json"):
            open_weights(writer.partial)
        writer.finish({}, "fp16", {})
    assert Checkpoint(out)


def test_an_existing_checkpoint_is_not_replaced_unasked(made: Path) -> None:
    before = contents(made)
    with pytest.raises(FormatError, match="already exists") as refused:
        CheckpointWriter(made, RECIPE)
    assert str(made) in str(refused.value)
    assert contents(made) == before


def test_overwrite_keeps_the_old_until_the_new_stands(made: Path) -> None:
    before = contents(made)
    with CheckpointWriter(made, RECIPE, overwrite=True) as writer:
        writer.add(FIRST, {}, {"norm": NORM})
        assert contents(made) == before
        Checkpoint(made)
        writer.finish({}, "new", {})
    assert Checkpoint(made).scheme == "new"
    assert [f.name for f in made.parent.iterdir()] == ["made"]


def test_a_failed_overwrite_leaves_the_old_one(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(made)
    with CheckpointWriter(made, RECIPE, overwrite=True) as writer:
        writer.add(FIRST, {}, {"norm": NORM})
        rename = os.rename

        def fail_on_publish(src: Path, dst: Path) -> None:
            if src == writer.partial:
                raise OSError(5, "Input/output error")
            rename(src, dst)

        monkeypatch.setattr(os, "rename", fail_on_publish)
        with pytest.raises(FormatError, match="cannot write"):
            writer.finish({}, "new", {})
    assert contents(made) == before
    assert sorted(d.name for d in made.parent.iterdir()) == ["made", "made.partial"]
    monkeypatch.undo()
    with CheckpointWriter(made, RECIPE, resume=True, overwrite=True) as writer:
        assert writer.has(FIRST)


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with CheckpointWriter(out, RECIPE) as first:
        first.add(FIRST, {}, {"norm": NORM})
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(FormatError, match="another run is writing") as refused:
                CheckpointWriter(out, RECIPE, **options)
            assert str(out) in str(refused.value)
        first.finish({}, "first", {})
    assert Checkpoint(out).scheme == "first"
    assert torch.equal(Checkpoint(out).read("norm"), NORM)


def interrupted(out: Path, recipe: dict[str, Any] = RECIPE) -> Path:
    """Leave a run that stopped after its first shard."""
    with CheckpointWriter(out, recipe) as writer:
        m = matrices()
        writer.add(FIRST, {k: m[k] for k in ("layers.0.a", "layers.0.b")}, {"layers.0.norm.weight": NORM})
    return writer.partial


def test_an_unfinished_run_asks_what_to_do(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "out")
    before = contents(partial)
    with pytest.raises(FormatError, match=r"`resume=True`.*`overwrite=True`") as refused:
        CheckpointWriter(tmp_path / "out", RECIPE)
    assert str(partial) in str(refused.value)
    assert contents(partial) == before


def test_resume_believes_only_shards_that_are_as_the_journal_says(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", RECIPE, resume=True) as writer:
        assert writer.has(FIRST)
        assert not writer.has(SECOND)
    data = bytearray((partial / FIRST).read_bytes())
    data[-1] ^= 1
    (partial / FIRST).write_bytes(data)
    with CheckpointWriter(tmp_path / "out", RECIPE, resume=True) as writer:
        assert not writer.has(FIRST)


def test_resumed_and_undisturbed_runs_give_the_same_bytes(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "a")
    (partial / f"{SECOND}.0123456789abcdef.crelle-tmp").write_bytes(b"half a shard")  # killed while it was written
    m = matrices()
    with CheckpointWriter(tmp_path / "a", RECIPE, resume=True) as writer:
        writer.add(SECOND, {k: m[k] for k in ("layers.1.c", "layers.1.d", "head")}, {})
        writer.finish({"model_type": "llama"}, "bcq:bits=3,group=8", {"head": "bf16"})
    assert contents(tmp_path / "a") == contents(write(tmp_path / "b"))


@pytest.mark.parametrize("key", ["scheme", "source"])
def test_resume_with_another_recipe_is_refused(tmp_path: Path, key: str) -> None:
    partial = interrupted(tmp_path / "out")
    before = contents(partial)
    with pytest.raises(FormatError, match=f"was started with {key} = '{RECIPE[key]}', now it is 'other'"):
        CheckpointWriter(tmp_path / "out", {**RECIPE, key: "other"}, resume=True)
    assert contents(partial) == before


@pytest.mark.parametrize(
    "journal", ["{", "[]", '{"recipe": 3}', '{"recipe": {"scheme": "some", "source": "here"}, "shards": 7}']
)
def test_a_broken_journal_is_a_sentence(tmp_path: Path, journal: str) -> None:
    partial = interrupted(tmp_path / "out")
    (partial / "progress.json").write_text(journal)
    with pytest.raises(FormatError, match=r"progress\.json"):
        CheckpointWriter(tmp_path / "out", RECIPE, resume=True)


def test_overwrite_starts_an_unfinished_run_anew(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", {**RECIPE, "scheme": "other"})
    assert contents(write(tmp_path / "out", overwrite=True)) == contents(write(tmp_path / "b"))


def test_a_full_disk_tells_to_make_room_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = interrupted(tmp_path / "out")
    before = contents(partial)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io.os, "fsync", full)
    with (
        pytest.raises(CapacityError, match="no space left") as refused,
        CheckpointWriter(tmp_path / "out", RECIPE, resume=True) as writer,
    ):
        writer.add(SECOND, {}, {"norm": NORM})
    assert not writer.has(SECOND)
    for word in (str(partial / SECOND), "free some space", "`resume=True`"):
        assert word in str(refused.value)
    assert contents(partial) == before


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(FormatError, match="cannot write"):
        CheckpointWriter(tmp_path / "file" / "out", RECIPE)


def test_tokenizer_files_and_nothing_else_are_copied(tmp_path: Path) -> None:
    source, to = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    to.mkdir()
    wanted = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"}
    wanted |= {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "generation_config.json"}
    for name in wanted | {"config.json", "model.safetensors", "README.md", "tokenizer.pkl", "modeling.py"}:
        (source / name).write_text(name)
    copy_tokenizer_files(source, to)
    assert contents(to) == {name: name.encode() for name in wanted}


def test_the_config_that_is_given_is_not_changed(tmp_path: Path) -> None:
    config = {"model_type": "llama", "nested": {"a": 1}}
    before = copy.deepcopy(config)
    with CheckpointWriter(tmp_path / "out", RECIPE) as writer:
        writer.finish(config, "fp16", {})
    assert config == before
