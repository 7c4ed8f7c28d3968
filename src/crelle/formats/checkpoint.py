"""A quantized model on disk: a directory that other tools can read too.

    config.json                    the model's own config, plus "quantization_config" (below)
    model-00001-of-000NN.safetensors   one shard a layer; a matrix `m` in format f is stored as m.<tensor of f>,
                                   e.g. model.layers.0.mlp.up_proj.planes, ….alpha, ….z
    model.safetensors.index.json   which tensor is in which shard (the convention of transformers)
    tokenizer.json, …              copied along

    quantization_config = {
      "quant_method": "crelle", "format_version": 1,
      "scheme": "bcq:bits=3,group=64",            the recipe for everything it applies to
      "overrides": {"*.down_proj": "rtn:bits=4,group=64"},   patterns that got another recipe
      "tensors": {"model.layers.0.mlp.up_proj": {"format": "bcq", "shape": [1536, 576], …}, …},
      "shards":  {"model-00001-of-00032.safetensors": {"sha256": "…", "bytes": 123}, …}
    }

A reader refuses versions and keys that it does not know, and checks every shard's SHA-256 before it believes a byte.
A writer works in `OUT.partial` and renames it to `OUT` when all is there; a journal in it lets a killed run go on.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import safetensors.torch
from torch import Tensor

from crelle.errors import CapacityError, FormatError
from crelle.formats.affine import AffineTensor, NestedTensor
from crelle.formats.base import QuantTensor, Spec, shape_of
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.files import ShardReader, read_json, sha256, sync_directory, to_json, write_whole, writing
from crelle.formats.permuted import PermutedTensor

FORMAT_VERSION = 1
CONFIG, INDEX, JOURNAL = "config.json", "model.safetensors.index.json", "progress.json"
FORMATS: dict[str, type[QuantTensor]] = {
    c.format: c for c in (BCQTensor, UniformTensor, AffineTensor, NestedTensor, PermutedTensor, DenseTensor)
}
_KEYS = {"quant_method": str, "format_version": int, "scheme": str, "overrides": dict, "tensors": dict, "shards": dict}


def is_checkpoint(config: Mapping[str, Any]) -> bool:
    """Tell whether a model's config says that Crelle quantized it."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "crelle"


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
                raise FormatError(f"{where}: '{key}' should be a {kind.__name__}, but is {q[key]!r}")
        for name, spec in q["tensors"].items():
            if not isinstance(spec, dict) or spec.get("format") not in FORMATS:
                known = ", ".join(sorted(FORMATS))
                raise FormatError(f"{where}: '{name}' has an unknown format in {spec!r} (known: {known})")
            try:
                shape_of(spec)
            except FormatError as e:
                raise FormatError(f"{where}: '{name}': {e}") from e
        for name, facts in q["shards"].items():
            if Path(name).name != name:
                raise FormatError(f"{where}: the shard '{name}' should be a plain file name, beside config.json")
            if not (isinstance(facts, dict) and type(facts.get("bytes")) is int and type(facts.get("sha256")) is str):
                raise FormatError(f"{where}: the shard '{name}' should have its bytes and sha256, but has {facts!r}")
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
            return cls.from_parts(spec, {t: self.read(f"{module}.{t}") for t in cls.parts(spec)})
        except FormatError as e:
            raise FormatError(f"{self.path}, '{module}': {e}") from e

    def read(self, name: str) -> Tensor:
        """Return a stored tensor, or the numbers of an encoded matrix under the name that they would have."""
        module = name.removesuffix(".weight")
        if name not in self._where and module in self.specs and module != name:
            return self.matrix(module).dequantize()
        if (shard := self._where.get(name)) is None:
            raise FormatError(f"{self.path} has no tensor '{name}'")
        return shard.read(name)

    def shape(self, name: str) -> tuple[int, ...]:
        spec = self.specs.get(name.removesuffix(".weight"))
        return tuple(spec["shape"]) if spec else self._where[name].shape(name)

    def copy_tokenizer(self, to: Path) -> None:
        copy_tokenizer_files(self.path, to)


def copy_tokenizer_files(source: Path, to: Path) -> None:
    """Copy what a tokenizer and generation need besides the weights."""
    wanted = ("token", "vocab", "merges", "special_", "added_", "chat_template", "generation_config")
    for f in sorted(source.iterdir()):
        if f.is_file() and f.name.startswith(wanted) and f.suffix in {".json", ".txt", ".jinja", ".model"}:
            with writing(to / f.name):
                shutil.copyfile(f, to / f.name)


def refuse_existing(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Say what stands in the way of writing `out`: to be asked before long work; a writer asks again."""
    _refuse_finished(out, overwrite)
    _refuse_unfinished(out.with_name(out.name + ".partial"), resume or overwrite)


def _refuse_finished(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise FormatError(f"{out} exists already; choose another name, or pass --overwrite to replace it")


def _refuse_unfinished(partial: Path, decided: bool) -> None:
    if (partial / JOURNAL).exists() and not decided:
        raise FormatError(
            f"{partial} holds an unfinished run: pass --resume to go on with it, or --overwrite to start anew"
        )


class CheckpointWriter:
    """Writes a checkpoint shard by shard; `finish` makes it appear under its name, whole.

    Use it in a `with` block: it holds a lock on `OUT.partial`, so that two runs never write the same checkpoint.
    """

    def __init__(self, out: Path, recipe: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False) -> None:
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        self.recipe = dict(recipe)
        self._shards: dict[str, dict[str, Any]] = {}
        _refuse_finished(out, overwrite)
        with writing(self.partial, "Is the place writable?"):
            self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_directory(self.partial, out)
        try:
            _refuse_unfinished(self.partial, resume or overwrite)  # after the lock: it may be a run that is under way
            self._begin(resume)
        except BaseException:
            self.close()
            raise

    def _begin(self, resume: bool) -> None:
        begun = (self.partial / JOURNAL).exists()
        if begun and resume:
            self._take_up()
            return
        with writing(self.partial):
            for f in self.partial.iterdir():
                f.unlink()
        self._journal()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()
        if isinstance(error, CapacityError):
            remedy = f"What is finished stays in {self.partial}: make room and run again with --resume"
            raise CapacityError(f"{error} {remedy}") from error

    def close(self) -> None:
        """Let go of the lock; what is written stays."""
        os.close(self._lock)

    def _take_up(self) -> None:
        """Believe the journal of a killed run as far as its files bear it out."""
        journal = read_json(self.partial / JOURNAL)
        old, shards = journal.get("recipe"), journal.get("shards")
        if not (isinstance(old, dict) and isinstance(shards, dict)):
            raise FormatError(f"{self.partial / JOURNAL} is not the journal of a run; pass --overwrite to start anew")
        if changed := sorted(k for k in self.recipe | old if self.recipe.get(k) != old.get(k)):
            k = changed[0]
            raise FormatError(
                f"cannot resume: {self.partial} was begun with {k} = {old.get(k)!r}, now it is {self.recipe.get(k)!r}; "
                "use the same again, or --overwrite to start anew"
            )
        for name, facts in shards.items():
            path = self.partial / name
            if path.is_file() and path.stat().st_size == facts["bytes"] and sha256(path) == facts["sha256"]:
                self._shards[name] = facts

    def _journal(self) -> None:
        write_whole(self.partial / JOURNAL, to_json({"recipe": self.recipe, "shards": self._shards}))

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

    def add(self, shard: str, matrices: Mapping[str, QuantTensor], others: Mapping[str, Tensor]) -> None:
        """Write one shard: encoded matrices by module name, other tensors by their full name."""
        flat = {f"{m}.{t}": v.contiguous() for m, w in matrices.items() for t, v in w.tensors().items()}
        flat |= {name: v.contiguous() for name, v in others.items()}
        path = self.partial / shard
        write_whole(path, safetensors.torch.save(flat, metadata={"format": "pt"}))
        self._shards[shard] = {
            "sha256": sha256(path),
            "bytes": path.stat().st_size,
            "specs": {m: w.spec() for m, w in matrices.items()},
            "names": sorted(flat),
        }
        self._journal()

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

    def publish(self, config: Mapping[str, Any]) -> None:
        """Write the index and, last, the config; then rename the directory to its name."""
        shards = dict(sorted(self._shards.items()))
        index = {
            "metadata": {"total_size": sum(f["bytes"] for f in shards.values())},
            "weight_map": {tensor: name for name, f in shards.items() for tensor in f["names"]},
        }
        write_whole(self.partial / INDEX, to_json(index))
        write_whole(self.partial / CONFIG, to_json(dict(config)))
        with writing(self.out):
            for f in self.partial.iterdir():
                if f.suffix == ".tmp" or f.name == JOURNAL:
                    f.unlink()
            sync_directory(self.partial)
            self._rename()

    def _rename(self) -> None:
        """Give the directory its name; an old checkpoint of that name goes only after the new one stands."""
        old = self.out.with_name(self.out.name + ".old")
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.out, old)
        os.rename(self.partial, self.out)
        sync_directory(self.out.parent)
        shutil.rmtree(old, ignore_errors=True)


def _lock_directory(directory: Path, out: Path) -> int:
    """Return a descriptor that holds an exclusive lock on a directory for as long as it is open."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if e.errno in (errno.EAGAIN, errno.EACCES):
            raise FormatError(f"another run is writing {out} right now; wait for it or choose another name") from e
        raise
    return fd
