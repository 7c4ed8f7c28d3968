"""Nothing of the user's is deleted, moved or written through: a writer touches only what Crelle wrote."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_model

from crelle.errors import FormatError
from crelle.formats.exporters.directory import export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.io import write_whole
from crelle.formats.storage.open import open_weights
from crelle.quantizers.pipeline import quantize

RECIPE = {"scheme": "some", "source": "here"}
FIRST, SECOND = "crelle-00001-of-00002.safetensors", "crelle-00002-of-00002.safetensors"
SCHEME = "rtn:bits=4,group=8"
EARLIER = Path(__file__).parents[1] / "earlier_checkpoint"


def write(out: Path, scheme: str = "fp16", **options: Any) -> Path:
    with CheckpointWriter(out, RECIPE, **options) as writer:
        writer.add(FIRST, {}, {"norm": torch.ones(3)})
        writer.finish({}, scheme, {})
    return out


def interrupted(out: Path) -> Path:
    with CheckpointWriter(out, RECIPE) as writer:
        writer.add(FIRST, {}, {"norm": torch.ones(3)})
    return writer.partial


def tree(top: Path) -> dict[str, bytes | str]:
    """Everything under a directory: files by content, links by target."""
    found: dict[str, bytes | str] = {}
    for root, dirs, files in os.walk(top):
        for name in (*dirs, *files):
            p = Path(root, name)
            found[str(p.relative_to(top))] = (
                os.readlink(p) if p.is_symlink() else "directory" if p.is_dir() else p.read_bytes()
            )
    return found


def refuses(top: Path, act: Callable[[], object], *words: object) -> str:
    """Check that an act ends in a sentence with these words, and that nothing under `top` has changed."""
    before = tree(top)
    with pytest.raises(FormatError) as refused:
        act()
    assert tree(top) == before
    for word in words:
        assert str(word) in str(refused.value)
    return str(refused.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m", num_hidden_layers=1, hidden_size=24, intermediate_size=16, head_dim=4)


# OUT.partial


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("name", ["thesis.txt", "sub/thesis.txt", FIRST, "config.json", "progress.json"])
def test_a_partial_directory_of_somebody_else_is_refused(tmp_path: Path, options: dict[str, bool], name: str) -> None:
    file = tmp_path / "out.partial" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"steps": 3}')
    refuses(tmp_path, lambda: write(tmp_path / "out", **options), tmp_path / "out.partial", "so it is not changed")


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("name", ["thesis.txt", "sub/thesis.txt", SECOND, "notes.tmp"])
def test_what_lies_in_an_unfinished_run_and_is_not_of_it_is_kept(
    tmp_path: Path, options: dict[str, bool], name: str
) -> None:
    file = interrupted(tmp_path / "out") / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    refuses(tmp_path, lambda: write(tmp_path / "out", **options), f"'{Path(name).parts[0]}'")


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("content", ["thesis.txt", "an unfinished run", "nothing"])
def test_a_linked_partial_is_refused(tmp_path: Path, options: dict[str, bool], content: str) -> None:
    if content == "an unfinished run":
        interrupted(tmp_path / "home").rename(tmp_path / "home")
    else:
        (tmp_path / "home").mkdir()
    if content == "thesis.txt":
        (tmp_path / "home" / content).write_text("mine")
    (tmp_path / "out.partial").symlink_to("home")
    refuses(tmp_path, lambda: write(tmp_path / "out", **options), tmp_path / "out.partial", "is a link")


def test_links_inside_an_unfinished_run_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    partial = interrupted(tmp_path / "out")
    (partial / "tokenizer.json").symlink_to(tmp_path / "mine")
    for options in ({"resume": True}, {"overwrite": True}):
        refuses(tmp_path, lambda options=options: write(tmp_path / "out", **options), "the link 'tokenizer.json'")


def test_an_empty_partial_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    assert Checkpoint(write(tmp_path / "out"))


def test_a_run_killed_in_its_first_moment_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "progress.json.0123456789abcdef.crelle-tmp").write_text('{"rec')
    assert Checkpoint(write(tmp_path / "out"))


def test_a_journal_that_lists_what_lies_elsewhere_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis.safetensors").write_text("mine")
    partial = interrupted(tmp_path / "out")
    journal = json.loads((partial / "progress.json").read_text())
    journal["shards"]["../thesis.safetensors"] = journal["shards"][FIRST]
    (partial / "progress.json").write_text(json.dumps(journal))
    for options in ({"resume": True}, {"overwrite": True}):
        refuses(tmp_path, lambda options=options: write(tmp_path / "out", **options))


def test_an_unfinished_run_of_an_earlier_version_is_begun_anew(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    shutil.copytree(EARLIER, partial)
    shards = {f.name: {"bytes": f.stat().st_size, "sha256": ""} for f in partial.glob("*.safetensors")}
    (partial / "config.json").unlink()
    journal = {"recipe": {"crelle": "0.1.0", "format_version": 1}, "shards": shards}
    (partial / "progress.json").write_text(json.dumps(journal))
    refuses(tmp_path, lambda: write(tmp_path / "out", resume=True), "earlier version of Crelle", "`overwrite=True`")
    write(tmp_path / "out", overwrite=True)
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"config.json", "crelle.safetensors.index.json", FIRST}


def test_a_partial_that_was_moved_away_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with CheckpointWriter(tmp_path / "out", RECIPE) as writer:
        writer.add(FIRST, {}, {"norm": torch.ones(3)})
        writer.partial.rename(tmp_path / "aside")
        (tmp_path / "mine").rename(writer.partial)
        with pytest.raises(FormatError, match="was moved or replaced"):
            writer.finish({}, "fp16", {})
    assert not (tmp_path / "out").exists()


# OUT


def test_a_directory_called_old_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out.old").mkdir()
    (tmp_path / "out.old" / "thesis.txt").write_text("mine")
    write(tmp_path / "out", "new", overwrite=True)
    assert Checkpoint(tmp_path / "out").scheme == "new"
    assert (tmp_path / "out.old" / "thesis.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.old"]


@pytest.mark.parametrize("name", ["thesis.txt", "sub/thesis.txt", SECOND, ".git/HEAD", "training.json.bak"])
def test_a_checkpoint_with_other_files_in_it_is_not_replaced(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "out") / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    act = lambda: write(tmp_path / "out", overwrite=True)  # noqa: E731
    refuses(tmp_path, act, tmp_path / "out", f"'{Path(name).parts[0]}'", "Move it")


def test_a_file_that_appears_while_a_run_writes_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", RECIPE, overwrite=True) as writer:
        writer.add(FIRST, {}, {"norm": torch.ones(3)})
        (tmp_path / "out" / "thesis.txt").write_text("mine")
        with pytest.raises(FormatError, match=r"contains the file 'thesis\.txt'"):
            writer.finish({}, "new", {})
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    (tmp_path / "out" / "thesis.txt").unlink()
    with CheckpointWriter(tmp_path / "out", RECIPE, resume=True, overwrite=True) as writer:
        assert writer.has(FIRST)  # no work is lost
        writer.finish({}, "new", {})
    assert Checkpoint(tmp_path / "out").scheme == "new"


@pytest.mark.parametrize("what", ["a folder", "a model", "a file", "config of something else", "GPTQ by others"])
def test_what_is_no_checkpoint_of_ours_is_not_replaced(tmp_path: Path, model: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "a model":
        shutil.copytree(model, out)
    elif what == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    if what == "config of something else":
        (out / "config.json").write_text('{"quantization_config": [1]}')
    if what == "GPTQ by others":
        said = {"quant_method": "gptq", "meta": {"quantizer": ["gptqmodel:2.0"]}}
        (out / "config.json").write_text(json.dumps({"quantization_config": said}))
    refuses(tmp_path, lambda: write(out, overwrite=True), out)


def test_an_empty_directory_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert Checkpoint(write(tmp_path / "out", overwrite=True))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_of_an_earlier_version_can_be_replaced(tmp_path: Path) -> None:
    shutil.copytree(EARLIER, tmp_path / "out")
    assert Checkpoint(write(tmp_path / "out", "new", overwrite=True)).scheme == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("target", ["home", "nowhere"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}])
def test_an_out_that_is_a_link_is_refused(tmp_path: Path, options: dict[str, bool], target: str) -> None:
    write(tmp_path / "home")
    (tmp_path / "out").symlink_to(target)
    refuses(tmp_path, lambda: write(tmp_path / "out", **options), tmp_path / "out")


@pytest.mark.parametrize("out", ["/", "x" * 250])
def test_names_that_leave_no_room_are_a_sentence(tmp_path: Path, out: str) -> None:
    refuses(tmp_path, lambda: write(tmp_path / out if out != "/" else Path(out)))


class KilledError(BaseException):
    """Stands for a kill that leaves no time to tidy up."""


def test_a_run_killed_between_the_renames_tells_where_the_old_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "old")
    before = tree(tmp_path / "out")
    rename = os.rename

    def killed(src: Path, dst: Path) -> None:
        if src != tmp_path / "out":
            raise KilledError
        rename(src, dst)

    monkeypatch.setattr(os, "rename", killed)  # also the one that would put the old one back
    with pytest.raises(KilledError):
        write(tmp_path / "out", "new", overwrite=True)
    monkeypatch.undo()
    [old] = tmp_path.glob("out.replaced-*")
    assert tree(old) == before
    sentence = refuses(tmp_path, lambda: write(tmp_path / "out", "new"), old, "unfinished run")
    assert "rename it back" in sentence
    with CheckpointWriter(tmp_path / "out", RECIPE, resume=True) as writer:
        writer.add(FIRST, {}, {"norm": torch.ones(3)})
        writer.finish({}, "new", {})
    assert str(old) in writer.all_warnings()[-1]
    assert tree(old) == before
    assert Checkpoint(tmp_path / "out").scheme == "new"
    with CheckpointWriter(tmp_path / "out", RECIPE, overwrite=True) as writer:
        writer.finish({}, "newer", {})
    assert f"{old} was left by a run" in writer.all_warnings()[-1]
    assert tree(old) == before


# What is read


def test_out_must_not_touch_the_source(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(model)
    (model / "deep").mkdir()
    monkeypatch.chdir(tmp_path)
    outs = [
        model,
        tmp_path / "link",
        model / "q",
        model / "deep" / "q",
        tmp_path,
        "m",
        "m/../m",
        "./m",
        "m/..",
        "link/q",
    ]
    for out in outs:
        for overwrite in (False, True):
            act = lambda out=out, overwrite=overwrite: quantize(model, out, SCHEME, overwrite=overwrite)  # noqa: E731
            refuses(tmp_path, act, "Choose another OUT")
            act = lambda out=out: quantize(tmp_path / "link", out, SCHEME, overwrite=True)  # noqa: E731
            refuses(tmp_path, act, "Choose another OUT")


def test_the_source_may_not_be_where_a_run_works(tmp_path: Path, model: Path) -> None:
    source = model.rename(tmp_path / "out.partial")
    refuses(tmp_path, lambda: quantize(source, tmp_path / "out", SCHEME, overwrite=True), "Choose another OUT")


def test_shards_of_the_source_that_lie_in_out_are_kept(tmp_path: Path, model: Path) -> None:
    out = write(tmp_path / "out")
    (model / "model.safetensors").rename(out / "model.safetensors")
    (model / "model.safetensors").symlink_to(out / "model.safetensors")
    refuses(tmp_path, lambda: quantize(model, out, SCHEME, overwrite=True), "Choose another OUT")


def test_a_sibling_of_the_source_is_fine(tmp_path: Path, model: Path) -> None:
    assert quantize(model, tmp_path / "m2", SCHEME).out == tmp_path / "m2"
    assert quantize(model, f"{model}/../m3", SCHEME).out.exists()


def test_an_export_does_not_touch_its_source(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "m", num_hidden_layers=1, hidden_size=64, intermediate_size=64, head_dim=8)
    made = quantize(source, tmp_path / "q", "rtn:bits=4,group=32").out
    for out in (made, made / "g", tmp_path):
        refuses(
            tmp_path,
            lambda out=out: export_directory(open_weights(made), out, GPTQLayout(), overwrite=True),
            "Choose another OUT",
        )
    (tmp_path / "g.partial").mkdir()
    (tmp_path / "g.partial" / "thesis.txt").write_text("mine")
    refuses(tmp_path, lambda: export_directory(open_weights(made), tmp_path / "g", GPTQLayout()), "thesis.txt")
    shutil.rmtree(tmp_path / "g.partial")
    export_directory(open_weights(made), tmp_path / "g", GPTQLayout())
    export_directory(open_weights(made), tmp_path / "g", GPTQLayout(), overwrite=True)
    (tmp_path / "g" / "thesis.txt").write_text("mine")
    refuses(
        tmp_path,
        lambda: export_directory(open_weights(made), tmp_path / "g", GPTQLayout(), overwrite=True),
        "thesis.txt",
    )


# Other files


def test_a_users_tmp_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "plan.json.tmp").write_text("mine")
    write_whole(tmp_path / "plan.json", b"new")
    assert tree(tmp_path) == {"plan.json.tmp": b"mine", "plan.json": b"new"}


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "plan.json").symlink_to("mine")
    write_whole(tmp_path / "plan.json", b"new")
    assert tree(tmp_path) == {"mine": b"mine", "plan.json": b"new"}
