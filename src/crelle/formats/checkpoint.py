"""A quantized model on disk: a directory of plain files.

    config.json                          the model's own config, plus "quantization_config" (below)
    crelle-00001-of-000NN.safetensors    one shard a layer; a matrix `m` in format f is stored as m.<tensor of f>,
                                         e.g. model.layers.0.mlp.up_proj.planes, ….alpha, ….z
    crelle.safetensors.index.json        which tensor is in which shard (laid out as transformers' index is)
    tokenizer.json, …                    copied along

    quantization_config = {
      "quant_method": "crelle", "format_version": 1,
      "scheme": "bcq:bits=3,group=64",            the recipe for everything it applies to
      "overrides": {"*.down_proj": "rtn:bits=4,group=64"},   patterns that got another recipe
      "tensors": {"model.layers.0.mlp.up_proj": {"format": "bcq", "shape": [1536, 576], …}, …},
      "shards":  {"crelle-00001-of-00032.safetensors": {"sha256": "…", "bytes": 123}, …}
    }

A reader refuses versions and keys that it does not know, and checks every shard's SHA-256 before it believes a byte.
It takes the shards' names from the config: earlier checkpoints, with model-*.safetensors, are read as before.

Names. transformers looks for model.safetensors and model.safetensors.index.json. Finding an index, it skips a
quant_method that it does not know and fills every missing `….weight` with random values, under a warning. Finding none,
it fails, which is right as long as it cannot read our matrices; AutoConfig and AutoTokenizer work. An integration
registers a quantizer for "crelle" and sets "transformers_weights": "crelle.safetensors.index.json" in the config, the
key by which transformers 5 takes the name of an index; vLLM finds *.safetensors by itself.

A writer works in `OUT.partial` and renames it to `OUT` when all is there; a journal in it lets a killed run go on, and
marks it as ours. What a writer may delete is in crelle.formats.ownership, where it may write in .destination.
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
from crelle.formats.affine import AffineTensor, NestedTensor
from crelle.formats.base import QuantTensor, Spec, shape_of
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.destination import (
    destination,
    of_replaced,
    partial_of,
    refuse_finished,
    refuse_unfinished,
    replaced_copies,
    replaced_name,
)
from crelle.formats.hf_layout import is_conv1d
from crelle.formats.io import (
    TEMPORARY,
    ShardReader,
    is_plain_name,
    read_json,
    sha256,
    shown,
    sync_directory,
    to_json,
    whole_file,
    write_whole,
    writing,
)
from crelle.formats.ownership import (
    CONFIG,
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
from crelle.formats.permuted import PermutedTensor
from crelle.formats.tokenizer_files import copy_tokenizer_files

FORMAT_VERSION = 1
FORMATS: dict[str, type[QuantTensor]] = {
    c.format: c for c in (BCQTensor, UniformTensor, AffineTensor, NestedTensor, PermutedTensor, DenseTensor)
}
_KEYS = {"quant_method": str, "format_version": int, "scheme": str, "overrides": dict, "tensors": dict, "shards": dict}


class Checkpoint:
    """A finished quantized model, opened for reading; weights are read when asked for."""

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        self.config = read_json(path / CONFIG)
        if not is_checkpoint(self.config):
            raise FormatError(f"{path} is not a Crelle checkpoint: its config.json has no crelle quantization_config")
        self.quantization = self._understood(self.config["quantization_config"])
        self.specs: dict[str, Spec] = self.quantization["tensors"]
        self.scheme: str = self.quantization["scheme"]
        self._shards: dict[str, ShardReader] = {}
        for name, facts in self.quantization["shards"].items():
            self._check_shard(path / name, facts, verify)
            self._shards[name] = ShardReader(path / name)
        self._where = {tensor: shard for shard in self._shards.values() for tensor in shard.names()}

    def _understood(self, q: dict[str, Any]) -> dict[str, Any]:
        where = self.path / CONFIG
        if q.get("format_version") != FORMAT_VERSION:
            raise FormatError(
                f"{where} has format version {q.get('format_version')!r}; this Crelle reads version {FORMAT_VERSION}. "
                "A newer Crelle may read it"
            )
        if unknown := sorted(set(q) - set(_KEYS)):
            raise FormatError(f"{where}: quantization_config has the unknown key '{unknown[0]}'")
        for key, kind in _KEYS.items():
            if key not in q:
                raise FormatError(f"{where}: quantization_config lacks the key '{key}'")
            if not isinstance(q[key], kind):
                raise FormatError(f"{where}: '{key}' should be a {kind.__name__}, but is {shown(q[key])}")
        for name, spec in q["tensors"].items():
            if not isinstance(spec, dict) or str(spec.get("format")) not in FORMATS:
                known = ", ".join(sorted(FORMATS))
                raise FormatError(f"{where}: '{name}' has an unknown format in {shown(spec)} (known: {known})")
            try:
                shape_of(spec)
            except FormatError as e:
                raise FormatError(f"{where}: '{name}': {e}") from e
        for name, facts in q["shards"].items():
            if not is_plain_name(name):
                raise FormatError(f"{where}: the shard {shown(name)} should be a plain file name, beside config.json")
            if not (isinstance(facts, dict) and type(facts.get("bytes")) is int and type(facts.get("sha256")) is str):
                raise FormatError(
                    f"{where}: the shard '{name}' should have its bytes and sha256, but has {shown(facts)}"
                )
        return q

    @staticmethod
    def _check_shard(path: Path, facts: Mapping[str, Any], verify: bool) -> None:
        if not path.is_file():
            raise FormatError(f"{path} is missing: the checkpoint is incomplete, copy it again")
        if (size := path.stat().st_size) != facts["bytes"]:
            raise FormatError(
                f"{path} has {size} bytes, its config says {facts['bytes']}: the file is truncated, copy it again"
            )
        if verify and sha256(path) != facts["sha256"]:
            raise FormatError(f"{path} was altered: its SHA-256 is not the one in config.json, copy it again")

    def names(self) -> list[str]:
        """Names as an unquantized model would have them: `module.weight` for every matrix, others as stored."""
        parts = {f"{m}.{t}" for m, spec in self.specs.items() for t in FORMATS[spec["format"]].parts(spec)}
        return [f"{m}.weight" for m in self.specs] + [n for n in self._where if n not in parts]

    def matrix(self, module: str) -> QuantTensor:
        """Return the weight matrix of a module, still encoded."""
        if (spec := self.specs.get(module)) is None:
            raise FormatError(f"{self.path} has no matrix '{module}'")
        cls = FORMATS[spec["format"]]
        try:
            return cls.from_parts(spec, {t: self._stored(f"{module}.{t}") for t in cls.parts(spec)})
        except FormatError as e:
            raise FormatError(f"{self.path}, '{module}': {e}") from e

    def read(self, name: str) -> Tensor:
        """Return a stored tensor, or the numbers of an encoded matrix under the name that they would have."""
        module = name.removesuffix(".weight")
        if name not in self._where and module in self.specs and module != name:
            return self.matrix(module).dequantize()
        return self._stored(name)

    def _stored(self, name: str) -> Tensor:
        if (shard := self._where.get(name)) is None:
            raise FormatError(f"{self.path} has no tensor '{name}'")
        return shard.read(name)

    def shape(self, name: str) -> tuple[int, ...]:
        spec = self.specs.get(name.removesuffix(".weight"))
        return tuple(spec["shape"]) if spec else self._where[name].shape(name)

    def transposed(self, name: str) -> bool:
        """Encoded matrices are always [outputs, inputs]; other tensors are stored as the source had them."""
        return name.removesuffix(".weight") in self.specs and is_conv1d(self.config, name)

    def copy_tokenizer(self, to: Path) -> None:
        copy_tokenizer_files(self.path, to)


def shard_name(number: int, count: int) -> str:
    """Return the name of a shard, counted from 1."""
    return f"crelle-{number:05d}-of-{count:05d}.safetensors"


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
            remedy = f"What is finished stays in {self.partial}: make room and run again with --resume"
            raise CapacityError(f"{error} {'Make room and run again' if self._restart else remedy}") from error

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
                f"cannot resume: {self.partial} was begun by an earlier Crelle, which named its files otherwise; "
                "pass --overwrite to start anew"
            )
        if changed := sorted(k for k in self.recipe | old if self.recipe.get(k) != old.get(k)):
            k = changed[0]
            raise FormatError(
                f"cannot resume: {self.partial} was begun with {k} = {old.get(k)!r}, now it is {self.recipe.get(k)!r}; "
                "use the same again, or --overwrite to start anew"
            )
        for name, facts in journal["shards"].items():
            path = self.partial / name
            if path.is_file() and path.stat().st_size == facts["bytes"] and sha256(path) == facts["sha256"]:
                self._shards[name] = facts

    def _journal(self) -> None:
        journal = {"crelle_journal": JOURNAL_VERSION, "recipe": self.recipe, "shards": self._shards}
        write_whole(self.partial / JOURNAL, to_json(journal))

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

    def finish(self, config: Mapping[str, Any], scheme: str, overrides: Mapping[str, str]) -> None:
        """Write the config of a Crelle checkpoint and publish it."""
        shards = dict(sorted(self._shards.items()))
        quantization = {
            "quant_method": "crelle",
            "format_version": FORMAT_VERSION,
            "scheme": scheme,
            "overrides": dict(overrides),
            "tensors": {m: spec for facts in shards.values() for m, spec in facts["specs"].items()},
            "shards": {name: {"sha256": f["sha256"], "bytes": f["bytes"]} for name, f in shards.items()},
        }
        self.publish({**config, "quantization_config": quantization})

    def publish(self, config: Mapping[str, Any], index: str = INDEX) -> None:
        """Write the index and, last, the config; then rename the directory to its name."""
        shards = dict(sorted(self._shards.items()))
        where = {
            "metadata": {"total_size": sum(f["bytes"] for f in shards.values())},
            "weight_map": {tensor: name for name, f in shards.items() for tensor in f["names"]},
        }
        write_whole(self.partial / index, to_json(where))
        # The source may name an index of its own for transformers; here it would name a file that is not there.
        write_whole(self.partial / CONFIG, to_json({k: v for k, v in config.items() if k != "transformers_weights"}))
        with writing(self.out):
            for name in os.listdir(self._lock):
                if name == STATE or TEMPORARY.fullmatch(name):
                    os.unlink(name, dir_fd=self._lock)
            sync_directory(self.partial)
            self._rename()

    def _rename(self) -> None:
        """Give the directory its name; an old checkpoint of that name goes only after the new one stands.

        Until then the old one has a name that nobody else uses. A run that is killed in between leaves it there, and
        the next one says so.
        """
        refuse_finished(self.out, self._overwrite)  # again: hours may have passed
        if not same_directory(self.partial, self._lock):
            raise FormatError(f"{self.partial} was moved or replaced while a run was writing it; nothing is published")
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
            self.warnings.append(f"the replaced checkpoint is still there: {why}")


def _require_finite(matrices: Mapping[str, QuantTensor]) -> None:
    """Refuse to store a matrix with NaN or infinity, e.g. a scale that training drove out of f16."""
    for module, w in matrices.items():
        for name, t in w.tensors().items():
            if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                raise FormatError(f"'{module}': '{name}' would hold NaN or infinity, so nothing is written")


def _lock_directory(directory: Path, out: Path) -> int:
    """Make a directory and return a descriptor that holds an exclusive lock on it for as long as it is open."""
    busy = FormatError(f"another run is writing {out} right now; wait for it or choose another name")
    for _ in range(10):
        with writing(directory, "Is the place writable?"):
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
