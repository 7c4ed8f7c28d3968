"""The files of a tokenizer that go from a model's directory into what we write: a fixed list, and no links.

A model's directory may come from anywhere, and what we write may be published. A link in it, tokenizer.json -> some
private file, must not carry that file along, so links are refused. The exception is the cache of Hugging Face, where
every file is a link to a blob of the same repository:

    models--A--B/snapshots/<revision>/tokenizer.json -> ../../blobs/<hash>
"""

import os
import re
import stat
from pathlib import Path

from crelle.errors import FormatError
from crelle.formats.storage.io import write_whole

TOKENIZER_FILES = (  # what Crelle, tokenizers and transformers look for beside a decoder's weights
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
MOST_BYTES = 512 << 20  # of one such file; the largest known have some 30 MB
_BLOB = re.compile(r"((?:\.\./){2,})blobs/([0-9a-f]{40}|[0-9a-f]{64})")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hold us up before we see what it is


def copy_tokenizer_files(source: Path, to: Path) -> None:
    """Copy what a tokenizer and generation need besides the weights."""
    for name in TOKENIZER_FILES:
        if os.path.lexists(source / name):
            write_whole(to / name, _read(source / name))


def check_copied_files(source: Path) -> None:
    """Refuse, before any long work, what `copy_tokenizer_files` would refuse after it; the config goes along too."""
    for name in ("config.json", *TOKENIZER_FILES):
        if os.path.lexists(source / name):
            os.close(_open(source / name))


def _read(path: Path) -> bytes:
    with open(_open(path), "rb") as f:
        data = f.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise _too_large(path)
    return data


def _open(path: Path) -> int:
    """Open a regular file of a sensible size, or say why it is not copied."""
    try:
        fd = _open_blob(path) if path.is_symlink() else os.open(path, _READ)
    except OSError as e:
        raise FormatError(f"cannot read {path}: {e.strerror or e}") from e
    facts = os.fstat(fd)
    if stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_BYTES:
        return fd
    os.close(fd)
    if stat.S_ISREG(facts.st_mode):
        raise _too_large(path)
    raise FormatError(f"{path} is not a regular file, so it cannot be copied")


def _too_large(path: Path) -> FormatError:
    return FormatError(f"{path} has more than {MOST_BYTES >> 20} MiB, the limit for a tokenizer file")


def _open_blob(link: Path) -> int:
    """Open what a link of Hugging Face's cache points to, without following any other link on the way."""
    target = os.readlink(link)
    found = _BLOB.fullmatch(target)
    here = link.parent.resolve()
    up = found[1].count("..") if found else 0
    if not found or up > len(here.parents) or here.parts[-up] != "snapshots":
        raise FormatError(
            f"{link} is a link to {target}: links are not copied into a checkpoint, because they can point anywhere; "
            "replace the link with the file"
        )
    blobs = os.open(here.parents[up - 1] / "blobs", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return os.open(found[2], _READ, dir_fd=blobs)
    finally:
        os.close(blobs)
