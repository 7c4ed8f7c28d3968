"""What Crelle may delete: the files that a writer of ours put into a directory of ours, and nothing else.

A directory is ours if it carries a mark that only we write:

    an unfinished run      progress.json, the journal: {"crelle_journal": 2, "recipe": …, "shards": {name: facts}}
    a finished one         config.json with quant_method "crelle"; beside any other config.json an index whose metadata
                           has an "exporter" of "crelle:…", or, in earlier GPTQ exports, such a quantizer in the config

In it, ours are the shards that the mark lists (a shard is listed before it gets its name), a fixed list of other
names, and temporary files by their pattern; regular files only. One entry more, and the directory is refused with a
sentence that names it, before anything in it is touched. Nothing here follows a link.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crelle.errors import FormatError
from crelle.formats.storage.io import TEMPORARY, is_plain_name, read_json
from crelle.formats.storage.tokenizer_files import TOKENIZER_FILES

CONFIG, JOURNAL = "config.json", "progress.json"
INDEX = "crelle.safetensors.index.json"  # of our checkpoints: transformers must not find it, see checkpoint.py
HF_INDEX = "model.safetensors.index.json"  # of plain models and exports; also of checkpoints before INDEX had its name
EXPORTER = "exporter"  # in the metadata of an export's index: some projects take no key of ours in their own config
STAGE = "stage.json"  # in a checkpoint that is the first stage of a longer run, with that run's recipe
STATE = "training.state"  # of an unfinished training
TRAINING = "training.json"  # its losses
GUIDANCE = "guidance.state"  # of an unfinished calibration: the tokens' weights
JOURNAL_VERSION = 2
_FIXED = {CONFIG, JOURNAL, INDEX, HF_INDEX, STAGE, STATE, TRAINING, GUIDANCE, "training.png", "training.tmp"}
_FIXED |= set(TOKENIZER_FILES)


def is_checkpoint(config: Mapping[str, Any]) -> bool:
    """Tell whether a model's config says that Crelle quantized it."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "crelle"


def _is_export(config: Mapping[str, Any], index: Mapping[str, Any]) -> bool:
    """Tell whether a model's config and index say that `crelle export` wrote it."""
    quantization, about = config.get("quantization_config"), index.get("metadata")
    if not isinstance(quantization, dict):
        return False
    meta = quantization.get("meta")
    quantizers = meta.get("quantizer") if isinstance(meta, dict) else None
    marks = [
        about.get(EXPORTER) if isinstance(about, dict) else None,
        *(quantizers if isinstance(quantizers, list) else ()),
    ]
    return any(isinstance(m, str) and m.startswith("crelle:") for m in marks)


@dataclass(frozen=True, slots=True)
class Holding:
    """What lies in a directory, judged by its mark; from `look`."""

    path: Path
    names: tuple[str, ...]
    journal: dict[str, Any] | None  # of an unfinished run of ours
    finished: bool  # whether the mark is that of a finished directory
    stranger: str | None  # the first entry that is not ours, in words

    @property
    def empty(self) -> bool:
        """Nothing lies here, or nothing but files that a run killed in its first moment was still writing."""
        return all(TEMPORARY.fullmatch(n) for n in self.names) and self.stranger is None

    @property
    def ours(self) -> bool:
        return self.stranger is None and (self.empty or self.journal is not None or self.finished)


def look(path: Path, fd: int) -> Holding:
    """Judge the entries of an open directory; `path` is its name, to read the marks by."""
    with os.scandir(fd) as entries:
        kinds = {e.name: e.stat(follow_symlinks=False).st_mode for e in entries}
    odd = next((n for n in sorted(kinds) if not stat.S_ISREG(kinds[n])), None)
    journal = _journal(path / JOURNAL) if _regular(kinds, JOURNAL) else None
    config = read_mark(path / CONFIG) if _regular(kinds, CONFIG) else {}
    index = read_mark(path / HF_INDEX) if _regular(kinds, HF_INDEX) else {}
    finished = is_checkpoint(config) or _is_export(config, index)
    known = set(_FIXED)
    if journal is not None:
        known |= set(journal["shards"])
    if finished:
        known |= listed_shards(config, index)
    others = [n for n in sorted(kinds) if n not in known and not TEMPORARY.fullmatch(n)]
    first = odd or (others[0] if others else None)
    stranger = f"{_kind(kinds[first])} '{first}'" if first else None
    return Holding(path, tuple(sorted(kinds)), journal, finished, stranger)


def _kind(mode: int) -> str:
    names = ((stat.S_ISREG, "the file"), (stat.S_ISDIR, "the directory"), (stat.S_ISLNK, "the link"))
    return next((name for is_kind, name in names if is_kind(mode)), "the special file")


def _regular(kinds: Mapping[str, int], name: str) -> bool:
    return name in kinds and stat.S_ISREG(kinds[name])


def read_mark(path: Path) -> dict[str, Any]:
    """Return a JSON object; what cannot be read is no mark."""
    try:
        return read_json(path)
    except FormatError:
        return {}


def _journal(path: Path) -> dict[str, Any] | None:
    """Return the journal of a run of ours, None for any other file of that name."""
    found = read_mark(path)
    recipe, shards = found.get("recipe"), found.get("shards")
    if not isinstance(recipe, dict) or not isinstance(shards, dict):
        return None
    earlier = set(found) == {"recipe", "shards"} and ("crelle" in recipe or "export" in recipe)
    if found.get("crelle_journal") != JOURNAL_VERSION and not earlier:
        return None
    return found if all(is_plain_name(n) and n.endswith(".safetensors") for n in shards) else None


def listed_shards(config: Mapping[str, Any], index: Mapping[str, Any]) -> set[str]:
    """Return the shards that a finished directory of ours lists: plain names only, whatever the lists say."""
    listed = config["quantization_config"].get("shards")
    where = index.get("weight_map")
    names = [*(listed if isinstance(listed, dict) else ()), *(where.values() if isinstance(where, dict) else ())]
    return {n for n in names if isinstance(n, str) and is_plain_name(n) and n.endswith(".safetensors")}


def open_directory(path: Path) -> int:
    """Open a directory itself, never what a link points to."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as e:
        if path.is_symlink():
            raise FormatError(
                f"{path} is a link, and Crelle does not write or delete through links; remove it or choose another name"
            ) from e
        if os.path.lexists(path) and not path.is_dir():
            raise FormatError(f"{path} is not a directory; move it or choose another name") from e
        raise


def same_directory(path: Path, fd: int) -> bool:
    """Tell whether a name still means the directory that was opened."""
    try:
        here, held = os.lstat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino)


def remove_files(held: Holding, fd: int, keep: frozenset[str] = frozenset()) -> None:
    """Delete the files of a directory of ours, the mark last."""
    assert held.ours
    for name in sorted(held.names, key=lambda n: (n in (JOURNAL, CONFIG, HF_INDEX), n)):
        if name not in keep:
            os.unlink(name, dir_fd=fd)


def remove_directory(path: Path) -> str | None:
    """Delete a directory of ours, files and all; return why not where it is not (any more) ours alone."""
    try:
        fd = open_directory(path)
    except FormatError as e:
        return str(e)
    try:
        held = look(path, fd)
        if not held.ours:
            return f"{path} contains {held.stranger or 'files'} that Crelle did not write"
        remove_files(held, fd)
        if same_directory(path, fd):
            os.rmdir(path)
        return None
    except OSError as e:
        return f"cannot delete {path}: {e.strerror or e}"
    finally:
        os.close(fd)
