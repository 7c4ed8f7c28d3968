"""What is copied along: a fixed list, regular files, links only inside a repository of Hugging Face's cache."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import write_tiny_model

from crelle.errors import FormatError
from crelle.formats.storage.checkpoint import copy_tokenizer_files
from crelle.quantizers.pipeline import quantize

SCHEME = "rtn:bits=4,group=8"
BLOB = "0123456789abcdef" * 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m", num_hidden_layers=1, hidden_size=24, intermediate_size=16, head_dim=4)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("a secret")
    return tmp_path / "secret"


def cached(model: Path, repository: Path) -> Path:
    """Lay a model out as Hugging Face's cache does; return its snapshot."""
    snapshot, blobs = repository / "snapshots" / "a1b2c3", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, f in enumerate(sorted(model.iterdir())):
        blob = f"{i:064x}" if f.suffix == ".safetensors" else f"{i:040x}"
        shutil.copyfile(f, blobs / blob)
        (snapshot / f.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "generation_config.json", "config.json"])
def test_a_link_is_not_copied_and_is_refused_before_any_work(
    model: Path, secret: Path, tmp_path: Path, name: str
) -> None:
    if (model / name).exists():
        secret.write_bytes((model / name).read_bytes())
        (model / name).unlink()
    (model / name).symlink_to(secret)
    seen: list[str] = []
    with pytest.raises(FormatError, match=f"{name} is a link to .*secret") as refused:
        quantize(model, tmp_path / "out", SCHEME, progress=lambda *now: seen.append(now[2]))
    assert "replace the link with the file" in str(refused.value)
    assert not seen
    assert not list(tmp_path.glob("out*"))


def test_the_cache_of_hugging_face_can_be_quantized(model: Path, tmp_path: Path) -> None:
    snapshot = cached(model, tmp_path / "models--a--b")
    plain = quantize(model, tmp_path / "plain", SCHEME).out
    made = quantize(snapshot, tmp_path / "out", SCHEME).out
    assert {f.name: f.read_bytes() for f in plain.iterdir()} == {f.name: f.read_bytes() for f in made.iterdir()}
    assert not any(f.is_symlink() for f in made.iterdir())


def test_a_subfolder_of_a_snapshot_is_as_good(model: Path, tmp_path: Path) -> None:
    snapshot = cached(model, tmp_path / "models--a--b") / "sub"
    snapshot.mkdir()
    blob = os.readlink(snapshot.parent / "tokenizer.json")
    (snapshot / "tokenizer.json").symlink_to(f"../{blob}")
    (tmp_path / "to").mkdir()
    copy_tokenizer_files(snapshot, tmp_path / "to")
    assert (tmp_path / "to" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "how", ["blobs is a link", "the blob is a link", "another repository", "no snapshot", "a name"]
)
def test_what_only_looks_like_the_cache_is_refused(model: Path, secret: Path, tmp_path: Path, how: str) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = cached(model, repository)
    target = f"../../blobs/{BLOB}"
    if how == "blobs is a link":
        (repository / "blobs").rename(tmp_path / "elsewhere")
        (repository / "blobs").symlink_to(tmp_path / "elsewhere")
        shutil.copyfile(secret, tmp_path / "elsewhere" / BLOB)
    elif how == "the blob is a link":
        (repository / "blobs" / BLOB).symlink_to(secret)
    elif how == "another repository":
        (tmp_path / "other" / "blobs").mkdir(parents=True)
        shutil.copyfile(secret, tmp_path / "other" / "blobs" / BLOB)
        target = f"../../../other/blobs/{BLOB}"
    elif how == "no snapshot":
        snapshot = snapshot.parent.rename(repository / "other") / "a1b2c3"
        shutil.copyfile(secret, repository / "blobs" / BLOB)
    else:
        shutil.copyfile(secret, repository / "blobs" / "secret")
        target = "../../blobs/secret"
    (snapshot / "vocab.txt").symlink_to(target)
    for f in snapshot.iterdir():
        if f.name != "vocab.txt":
            f.unlink()
    (tmp_path / "to").mkdir()
    with pytest.raises(FormatError, match=r"vocab\.txt"):
        copy_tokenizer_files(snapshot, tmp_path / "to")
    assert not (tmp_path / "to" / "vocab.txt").exists()


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_what_is_no_regular_file_is_refused_at_once(model: Path, tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(model / "vocab.txt")
    else:
        (model / "vocab.txt").mkdir()
    with pytest.raises(FormatError, match=r"vocab\.txt is not a regular file"):
        quantize(model, tmp_path / "out", SCHEME)


def test_files_of_no_tokenizers_size_are_refused(model: Path, tmp_path: Path) -> None:
    with open(model / "vocab.txt", "wb") as f:
        f.truncate((512 << 20) + 1)  # a hole, no bytes
    with pytest.raises(FormatError, match=r"vocab\.txt has more than 512 MiB"):
        quantize(model, tmp_path / "out", SCHEME)


def test_names_outside_the_list_are_not_copied(model: Path, tmp_path: Path) -> None:
    for name in ("token", "tokens.json", "vocab_secrets.txt", "added_notes.json", "special_letter.txt", "tokenizer.py"):
        (model / name).write_text("private")
    made = quantize(model, tmp_path / "out", SCHEME).out
    assert {f.name for f in made.iterdir() if "token" in f.name} == {"tokenizer.json", "tokenizer_config.json"}
    assert not any(b"private" in f.read_bytes() for f in made.iterdir())


def test_a_link_in_the_way_of_a_copy_is_replaced(model: Path, secret: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    (to / "tokenizer.json").symlink_to(secret)
    copy_tokenizer_files(model, to)
    assert secret.read_text() == "a secret"
    assert (to / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
