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
quant_method that it does not know and fills every missing `….weight` with random values, under a warning. So our files
have other names, and config.json has "transformers_weights", the key by which transformers 5 takes the name of an
index, with a sentence instead of a name: without crelle, from_pretrained fails and prints it (AutoConfig and
AutoTokenizer work). With crelle imported, its quantizer (crelle.integrations.transformers) puts the real name there.
vLLM finds *.safetensors by itself.

This file reads them; checkpoint_writer.py writes them.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from crelle.errors import FormatError
from crelle.formats import builtin  # noqa: F401  # registers the formats
from crelle.formats.base import FORMATS, QuantTensor, Spec, shape_of
from crelle.formats.storage.hf_layout import is_conv1d
from crelle.formats.storage.io import (
    ShardReader,
    is_plain_name,
    read_json,
    sha256,
    shown,
)
from crelle.formats.storage.ownership import (
    CONFIG,
    is_checkpoint,
)
from crelle.formats.storage.tokenizer_files import copy_tokenizer_files

FORMAT_VERSION = 1
_HASHING = 4  # threads: more than most disks can feed
_KEYS = {"quant_method": str, "format_version": int, "scheme": str, "overrides": dict, "tensors": dict, "shards": dict}


def check_quantization(q: dict[str, Any], where: str | Path) -> dict[str, Any]:
    """Return a checkpoint's quantization_config, or say why this Crelle does not read it."""
    if q.get("format_version") != FORMAT_VERSION:
        raise FormatError(
            f"{where} has format version {q.get('format_version')!r}; this Crelle reads version {FORMAT_VERSION}. "
            "A newer Crelle may read it"
        )
    if unknown := sorted(set(q) - set(_KEYS)):
        raise FormatError(f"{where}: quantization_config has the unknown key '{unknown[0]}'")
    for key, kind in _KEYS.items():
        if key not in q:
            raise FormatError(f"{where}: quantization_config has no key '{key}'")
        if not isinstance(q[key], kind):
            raise FormatError(f"{where}: '{key}' should be a {kind.__name__}, but is {shown(q[key])}")
    for name, spec in q["tensors"].items():
        if not _has_format(spec):
            known = ", ".join(sorted(FORMATS))
            raise FormatError(f"{where}: '{name}' has an unknown format in {shown(spec)} (known: {known})")
        try:
            shape_of(spec)
        except FormatError as e:
            raise FormatError(f"{where}: '{name}': {e}") from e
    for name, facts in q["shards"].items():
        if not is_plain_name(name):
            raise FormatError(f"{where}: the shard {shown(name)} should be a plain file name, next to config.json")
        if not (isinstance(facts, dict) and type(facts.get("bytes")) is int and type(facts.get("sha256")) is str):
            raise FormatError(f"{where}: the shard '{name}' should have bytes and sha256, but has {shown(facts)}")
    return q


def _has_format(spec: Any) -> bool:
    return isinstance(spec, dict) and isinstance(name := spec.get("format"), str) and name in FORMATS


def is_spec(spec: Any) -> bool:
    """Tell whether a value is a spec of a known format with a shape; what else it needs `from_parts` says."""
    try:
        return _has_format(spec) and bool(shape_of(spec))
    except FormatError:
        return False


class Checkpoint:
    """A finished quantized model, opened for reading; weights are read when asked for."""

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        self.config = read_json(path / CONFIG)
        if not is_checkpoint(self.config):
            raise FormatError(f"{path} is not a Crelle checkpoint: its config.json has no crelle quantization_config")
        self.quantization = check_quantization(self.config["quantization_config"], path / CONFIG)
        self.specs: dict[str, Spec] = self.quantization["tensors"]
        self.scheme: str = self.quantization["scheme"]
        self._shards: dict[str, ShardReader] = {}
        for name, facts in self.quantization["shards"].items():
            self._check_size(path / name, facts)
        if verify:
            self.verify()
        for name in self.quantization["shards"]:
            self._shards[name] = ShardReader(path / name)
        self._where = {tensor: shard for shard in self._shards.values() for tensor in shard.names()}

    def verify(self) -> None:
        """Refuse shards whose bytes are not those that were written; hashing is most of the time of opening."""
        shards = {self.path / name: facts["sha256"] for name, facts in self.quantization["shards"].items()}
        with ThreadPoolExecutor(_HASHING) as pool:  # hashlib lets other threads run
            for path, found, wanted in zip(shards, pool.map(sha256, shards), shards.values(), strict=True):
                if found != wanted:
                    pool.shutdown(cancel_futures=True)
                    raise FormatError(f"{path} was altered: its SHA-256 is not the one in config.json; copy it again")

    @staticmethod
    def _check_size(path: Path, facts: Mapping[str, Any]) -> None:
        if not path.is_file():
            raise FormatError(f"{path} is missing: the checkpoint is incomplete; copy it again")
        if (size := path.stat().st_size) != facts["bytes"]:
            raise FormatError(
                f"{path} has {size} bytes instead of {facts['bytes']}: the file is truncated; copy it again"
            )

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
        """Return a stored tensor, or a dequantized matrix under the name that they would have."""
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
