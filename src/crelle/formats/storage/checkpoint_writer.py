"""Writes a checkpoint (formats/storage/checkpoint.py) shard by shard, to be resumable and never half there.

A writer works in `OUT.partial` and renames it to `OUT` when all is there; a journal in it lets a killed run go on, and
marks it as ours. What a writer may delete is in crelle.formats.storage.ownership, where it may write in .destination.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from torch import Tensor

from crelle.errors import CapacityError, CrelleError, FormatError
from crelle.formats.base import FORMATS, QuantTensor
from crelle.formats.storage.checkpoint import FORMAT_VERSION, is_spec
from crelle.formats.storage.destination import (
    destination,
    of_replaced,
    partial_of,
    refuse_finished,
    refuse_unfinished,
    replaced_copies,
    replaced_name,
)
from crelle.formats.storage.io import (
    TEMPORARY,
    ShardReader,
    sha256,
    sync_directory,
    to_json,
    whole_file,
    write_whole,
    writing,
)
from crelle.formats.storage.ownership import (
    CONFIG,
    GUIDANCE,
    INDEX,
    JOURNAL,
    JOURNAL_VERSION,
    STATE,
    is_checkpoint,
    look,
    open_directory,
    remove_directory,
    remove_files,
    same_directory,
)


def shard_name(index: int, count: int) -> str:
    """Return the name of a shard, counted from 1."""
    return f"crelle-{index:05d}-of-{count:05d}.safetensors"


def transformers_notice() -> dict[str, str]:
    """Return the entry of config.json by which transformers fails with a sentence of ours where crelle is missing.

    It takes the entry for the name of a file, refuses whatever does not end as one, and prints it.
    """
    return {"transformers_weights": "this is a Crelle checkpoint: install crelle and `import crelle` before loading it"}


class CheckpointWriter:
    """Writes a checkpoint shard by shard; `finish` makes it appear under its name, whole.

    Use it in a `with` block: it holds a lock on `OUT.partial`, so that two runs never write the same checkpoint.
    `resume` goes on with an unfinished run, `overwrite` replaces OUT and begins an unfinished run anew, `restart` only
    the latter and only if its recipe is the same (for work that is not worth a resume).
    """

    def __init__(
        self,
        out: Path,
        recipe: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        restart: bool = False,
    ) -> None:
        self.out = destination(out)
        self.partial = partial_of(self.out)
        self.recipe = dict(recipe)
        self.warnings: list[str] = []
        self._replaced = of_replaced(self.out)
        self._overwrite, self._restart = overwrite, restart
        self._shards: dict[str, dict[str, Any]] = {}
        refuse_finished(self.out, overwrite)
        self._lock = _lock_directory(self.partial, self.out)
        try:
            refuse_finished(self.out, overwrite)  # after the lock: another run may have finished in between
            self._begin(resume)
        except BaseException:
            self.close()
            raise

    def _begin(self, resume: bool) -> None:
        held = look(self.partial, self._lock)
        again = self._restart and held.journal is not None and held.journal["recipe"] == self.recipe
        refuse_unfinished(held, self.out, resume or self._overwrite or again)
        if held.journal is not None and resume:
            self._take_up(held.journal)
            return
        with writing(self.partial):
            remove_files(held, self._lock, keep=frozenset({JOURNAL}))  # the mark goes when the new one replaces it
        self._journal()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()
        if isinstance(error, CapacityError):
            remedy = f"Finished shards are kept in {self.partial}: free some space and run again with `resume=True`"
            raise CapacityError(f"{error} {'Free some space and run again' if self._restart else remedy}") from error

    def close(self) -> None:
        """Let go of the lock; what is written stays."""
        os.close(self._lock)

    def discard(self) -> None:
        """Delete what was written, after an error that a resumed run would only meet again."""
        if same_directory(self.partial, self._lock):
            remove_directory(self.partial)

    def _take_up(self, journal: Mapping[str, Any]) -> None:
        """Believe the journal of a killed run as far as its files bear it out."""
        old = journal["recipe"]
        if journal.get("crelle_journal") != JOURNAL_VERSION:
            raise FormatError(
                f"cannot resume: {self.partial} was started by an earlier version of Crelle with other file names; "
                "`overwrite=True` starts over"
            )
        if changed := sorted(k for k in self.recipe | old if self.recipe.get(k) != old.get(k)):
            k = changed[0]
            raise FormatError(
                f"cannot resume: {self.partial} was started with {k} = {old.get(k)!r}, now it is "
                f"{self.recipe.get(k)!r}; "
                "use the same value, or `overwrite=True` to start over"
            )
        for name, facts in journal["shards"].items():
            path = self.partial / name
            if not _are_facts(facts):  # not what a run of ours wrote: the shard is made again
                continue
            if path.is_file() and path.stat().st_size == facts["bytes"] and sha256(path) == facts["sha256"]:
                self._shards[name] = facts

    def _journal(self) -> None:
        journal = {"crelle_journal": JOURNAL_VERSION, "recipe": self.recipe, "shards": self._shards}
        write_whole(self.partial / JOURNAL, to_json(journal, compact=True))

    def has(self, shard: str) -> bool:
        """Tell whether a shard is already safely on the disk."""
        return shard in self._shards

    def contents(self, shard: str) -> tuple[dict[str, QuantTensor], dict[str, Tensor]]:
        """Return a finished shard's matrices by module name, and its other tensors by their full name."""
        stored = ShardReader(self.partial / shard)
        matrices: dict[str, QuantTensor] = {}
        for module, spec in self._shards[shard]["specs"].items():
            cls = FORMATS[spec["format"]]
            matrices[module] = cls.from_parts(spec, {t: stored.read(f"{module}.{t}") for t in cls.parts(spec)})
        parts = {f"{m}.{t}" for m, w in matrices.items() for t in w.tensors()}
        return matrices, {n: stored.read(n) for n in stored.names() if n not in parts}

    def add(
        self,
        shard: str,
        matrices: Mapping[str, QuantTensor],
        others: Mapping[str, Tensor],
        warnings: Sequence[str] = (),
    ) -> None:
        """Write one shard: encoded matrices by module name, other tensors by their full name.

        The journal keeps the warnings, so that a resumed run repeats them. It lists the shard before the shard gets
        its name: every shard in `OUT.partial` is one that the journal knows to be ours.
        """
        _require_finite(matrices)
        flat = {f"{m}.{t}": v.contiguous() for m, w in matrices.items() for t, v in w.tensors().items()}
        flat |= {name: v.contiguous() for name, v in others.items()}
        data = safetensors.torch.save(flat, metadata={"format": "pt"})
        facts = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "specs": {m: w.spec() for m, w in matrices.items()},
            "names": sorted(flat),
            **({"warnings": list(warnings)} if warnings else {}),
        }
        before = self._shards
        try:
            with whole_file(self.partial / shard) as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())  # a full disk shows here, before the journal speaks of the shard
                self._shards = {**before, shard: facts}
                self._journal()
        except BaseException:
            self._shards = before
            raise

    def all_warnings(self) -> tuple[str, ...]:
        """Return what the user should be told, in the order of the shards."""
        told = [w for _, facts in sorted(self._shards.items()) for w in facts.get("warnings", ())]
        now = replaced_copies(self.out)  # what was there at the start and has gone was another run's, just finished
        return (*told, *self.warnings, *(w for p, w in self._replaced.items() if p in now))

    def finish(
        self,
        config: Mapping[str, Any],
        scheme: str,
        overrides: Mapping[str, str],
        about: Mapping[str, str] | None = None,
    ) -> None:
        """Write the config of a Crelle checkpoint and publish it; `about`: more for the metadata of its index."""
        shards = dict(sorted(self._shards.items()))
        quantization = {
            "quant_method": "crelle",
            "format_version": FORMAT_VERSION,
            "scheme": scheme,
            "overrides": dict(overrides),
            "tensors": {m: spec for facts in shards.values() for m, spec in facts["specs"].items()},
            "shards": {name: {"sha256": f["sha256"], "bytes": f["bytes"]} for name, f in shards.items()},
        }
        self.publish({**config, "quantization_config": quantization}, about=about)

    def publish(self, config: Mapping[str, Any], index: str = INDEX, about: Mapping[str, str] | None = None) -> None:
        """Write the index, `about` in its metadata, and, last, the config; then rename the directory to its name."""
        shards = dict(sorted(self._shards.items()))
        where = {
            "metadata": {"total_size": sum(f["bytes"] for f in shards.values()), **(about or {})},
            "weight_map": {tensor: name for name, f in shards.items() for tensor in f["names"]},
        }
        write_whole(self.partial / index, to_json(where))
        # The source may name an index of its own for transformers; here it would name a file that is not there.
        kept = {k: v for k, v in config.items() if k != "transformers_weights"}
        write_whole(self.partial / CONFIG, to_json(kept | (transformers_notice() if is_checkpoint(config) else {})))
        with writing(self.out):
            for name in os.listdir(self._lock):
                if name in (STATE, GUIDANCE) or TEMPORARY.fullmatch(name):
                    os.unlink(name, dir_fd=self._lock)
            sync_directory(self.partial)
            self._rename()

    def _rename(self) -> None:
        """Give the directory its name; an old checkpoint of that name goes only after the new one stands.

        Until then the old one has a name that nothing else uses. A run that is killed in between leaves it there, and
        the next one says so.
        """
        refuse_finished(self.out, self._overwrite)  # again: hours may have passed
        if not same_directory(self.partial, self._lock):
            raise FormatError(f"{self.partial} was moved or replaced during the run; no checkpoint was written")
        old = replaced_name(self.out) if os.path.lexists(self.out) else None
        if old is not None:
            os.mkdir(old)  # fails if the name is taken; an empty directory can be renamed over
            try:
                os.rename(self.out, old)
            except BaseException:
                os.rmdir(old)
                raise
        try:
            os.unlink(JOURNAL, dir_fd=self._lock)
            os.rename(self.partial, self.out)
        except BaseException:
            if old is not None and not os.path.lexists(self.out):
                os.rename(old, self.out)
            with suppress(CrelleError):
                self._journal()  # so that --resume finds what is finished
            raise
        sync_directory(self.out.parent)
        if old is not None and (why := remove_directory(old)):
            self.warnings.append(f"the replaced checkpoint was not deleted: {why}")


def _are_facts(facts: Any) -> bool:
    """Tell whether a journal's entry says of a shard what `add` does, in form."""
    if not isinstance(facts, dict) or type(facts.get("bytes")) is not int or type(facts.get("sha256")) is not str:
        return False
    specs, lists = facts.get("specs"), (facts.get("names"), facts.get("warnings", []))
    if not isinstance(specs, dict) or not all(isinstance(n, list) and all(type(s) is str for s in n) for n in lists):
        return False
    return all(is_spec(spec) for spec in specs.values())


def _require_finite(matrices: Mapping[str, QuantTensor]) -> None:
    """Refuse to store a matrix with NaN or infinity, e.g. a scale that training drove out of f16."""
    for module, w in matrices.items():
        for name, t in w.tensors().items():
            if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                raise FormatError(f"'{module}': '{name}' would contain NaN or infinity, so nothing is written")


def _lock_directory(directory: Path, out: Path) -> int:
    """Make a directory and return a descriptor that holds an exclusive lock on it for as long as it is open."""
    busy = FormatError(f"another run is writing {out}; wait for it or choose another name")
    for _ in range(10):
        with writing(directory, "Is the directory writable?"):
            directory.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                directory.mkdir()
            try:
                fd = open_directory(directory)
            except FileNotFoundError:
                continue  # another run published it just now
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            if e.errno in (errno.EAGAIN, errno.EACCES):
                raise busy from e
            raise
        if same_directory(directory, fd):
            return fd
        os.close(fd)  # what we locked was published in between
    raise busy
