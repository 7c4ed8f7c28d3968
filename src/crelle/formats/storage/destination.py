"""Where a checkpoint may be written: what is asked of OUT before any long work, and again when it is published.

OUT must not be, hold or lie in what is read. It is new, or `--overwrite` was given and it is a directory that Crelle
wrote and that holds nothing else (crelle.formats.storage.ownership). Neither OUT nor OUT.partial is a link.
"""

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from crelle.errors import FormatError
from crelle.formats.storage.io import read_json, writing
from crelle.formats.storage.ownership import Holding, look, open_directory

PARTIAL = ".partial"
_REPLACED = re.compile(r"\.replaced-[0-9a-f]{16}")


def destination(out: str | Path) -> Path:
    """Return OUT as an absolute path that ends in a name."""
    path = Path(out).absolute()
    if path.name in ("", ".."):
        path = Path(os.path.realpath(path))
    if not path.name or "\0" in str(path):
        raise FormatError(f"'{out}' is not a valid directory name")
    if len(os.fsencode(path.name)) > 200:
        raise FormatError(f"the name of {path} is too long; use at most 200 bytes (a run adds suffixes to it)")
    return path


def partial_of(out: Path) -> Path:
    """Return where a run works before it is finished."""
    return out.with_name(out.name + PARTIAL)


def replaced_name(out: Path) -> Path:
    """Return a new name beside OUT for the checkpoint that it replaces, for as long as both exist."""
    return out.with_name(f"{out.name}.replaced-{secrets.token_hex(8)}")


def replaced_copies(out: Path) -> list[Path]:
    """Return checkpoints that killed runs were replacing; an empty one is a name that a run had only reserved."""
    try:
        names = sorted(os.listdir(out.parent))
        ours = [n for n in names if n.startswith(out.name) and _REPLACED.fullmatch(n[len(out.name) :])]
        return [out.with_name(n) for n in ours if os.listdir(out.with_name(n))]
    except OSError:
        return []


def of_replaced(out: Path) -> dict[Path, str]:
    """Return a sentence about each of them."""
    if os.path.lexists(out):
        kind = "was left by a run that was killed just after it replaced {out}, and may be incomplete; delete it"
    else:
        kind = "is the previous {out}, left by a run that was killed while replacing it; rename it back or delete it"
    return {p: f"{p} {kind.format(out=out)}; Crelle does not touch it" for p in replaced_copies(out)}


def refuse_existing(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Say what stands in the way of writing `out`; a writer asks again."""
    refuse_finished(out, overwrite)
    partial = partial_of(out)
    try:
        fd = open_directory(partial)
    except FileNotFoundError:
        return
    except OSError as e:
        raise FormatError(f"cannot write {partial}: {e.strerror or e}") from e
    try:
        refuse_unfinished(look(partial, fd), out, resume or overwrite)
    finally:
        os.close(fd)


def refuse_other_files(folder: Path, names: tuple[str, ...], mark: str, key: str) -> None:
    """Refuse to replace files of a folder unless they are results of ours: then the JSON file `mark` has `key`."""
    found = next((n for n in names if os.path.lexists(folder / n)), None)
    if found is None:
        return
    try:
        ours = (folder / mark).is_file() and key in read_json(folder / mark)
    except FormatError:
        ours = False
    if not ours:
        raise FormatError(
            f"{folder / found} exists and is not a result of this command, so it is not replaced; choose another `out`"
        )


def refuse_finished(out: Path, overwrite: bool) -> None:
    """Refuse an OUT that must not be replaced."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise FormatError(f"{out} already exists; choose another name, or replace it with `overwrite=True`")
    with writing(out):
        fd = open_directory(out)
    try:
        held = look(out, fd)
    finally:
        os.close(fd)
    if held.ours and held.journal is None:
        return
    what = f"contains {held.stranger}" if held.stranger and held.finished else "is not a Crelle checkpoint"
    raise FormatError(
        f"{out} {what}, so it is not replaced: `overwrite=True` deletes only what Crelle wrote. "
        "Move it or choose another name"
    )


def refuse_unfinished(held: Holding, out: Path, decided: bool) -> None:
    """Refuse an OUT.partial that is not ours, and one that is unless the caller decided what to do with it."""
    if not held.ours:
        why = f"contains {held.stranger}, which" if held.stranger else "contains files that"
        raise FormatError(
            f"{held.path} {why} the progress.json of an unfinished run does not list, so it is not changed; "
            "move it or choose another name"
        )
    if not held.empty and not decided:
        sentences = (
            f"{held.path} contains an unfinished run: `resume=True` continues it, `overwrite=True` starts over",
            *of_replaced(out).values(),
        )
        raise FormatError(". ".join(sentences))


def refuse_overlap(out: Path, *inputs: str | Path | None, beside: tuple[str, ...] = (PARTIAL,)) -> None:
    """Refuse an OUT that is, holds or lies in something that is read: what is read must be there afterwards.

    `beside` are endings of other names next to OUT that the run works under.
    """
    for given in inputs:
        if given is None or not os.path.lexists(given):
            continue  # whoever reads it says so
        source = Path(given)
        for place in (out, *(out.with_name(out.name + b) for b in beside)):
            if how := _overlap(place, source):
                raise FormatError(
                    f"{place} {how} {source}, which is an input; writing there could destroy it. Choose another OUT"
                )


def _overlap(place: Path, source: Path) -> str | None:
    here = _identity(place)
    if here is not None:
        if here == _identity(source):
            return "is the same as"
        if here in {*_above(source), *_above(source.absolute().parent), *_linked(source)}:
            return "holds"
    if source.is_dir() and _identity(source) in set(_above(place.parent)):
        return "lies inside"
    return None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _above(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the identities of a path and of all directories above it, links resolved."""
    real = Path(os.path.realpath(path))
    for p in (real, *real.parents):
        if found := _identity(p):
            yield found


def _linked(source: Path) -> Iterator[tuple[int, int]]:
    """Yield the same for what links in a directory lead to, e.g. shards that lie elsewhere."""
    try:
        entries = [e.path for e in os.scandir(source) if e.is_symlink()]
    except OSError:  # a file, or a directory that cannot be read: whoever reads it says so
        return
    for entry in entries:
        yield from _above(Path(entry))
