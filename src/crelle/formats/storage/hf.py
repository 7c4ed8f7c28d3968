"""A model directory as transformers saves it: config.json and safetensors shards."""

from pathlib import Path
from typing import Any

from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.io import ShardReader, is_plain_name, looks_pickled, read_json, refuse_pickle, shown
from crelle.formats.storage.ownership import HF_INDEX
from crelle.formats.storage.tokenizer_files import copy_tokenizer_files


class HFDirectory:
    """A model as transformers saves it: config.json and safetensors shards."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config = path, config
        self.files = self._shard_files()
        self._where: dict[str, ShardReader] = {}
        for shard in map(ShardReader, self.files):
            if twice := self._where.keys() & set(shard.names()):
                raise FormatError(f"{path}: the tensor '{min(twice)}' is in more than one *.safetensors file")
            self._where |= dict.fromkeys(shard.names(), shard)

    def _shard_files(self) -> list[Path]:
        if (index := self.path / HF_INDEX).exists():
            shards = read_json(index).get("weight_map")
            if not (isinstance(shards, dict) and all(isinstance(s, str) for s in shards.values())):
                raise FormatError(f"{index} has no weight_map from tensors to files")
            if odd := [s for s in shards.values() if not is_plain_name(s)]:
                raise FormatError(
                    f"{index} names the file {shown(odd[0])}, which should be a plain file name, next to config.json"
                )
            return [self.path / s for s in sorted(set(shards.values()))]
        if found := sorted(self.path.glob("*.safetensors")):
            return found
        for f in sorted(self.path.iterdir()):
            if f.is_file() and f.stat().st_size and looks_pickled(f):
                raise refuse_pickle(f)
        raise FormatError(f"{self.path} contains no *.safetensors file")

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).shape(name)

    def read(self, name: str) -> Tensor:
        return self._shard(name).read(name)

    def read_slice(self, name: str, part: tuple[int | slice, ...]) -> Tensor:
        return self._shard(name).read_slice(name, part)

    def _shard(self, name: str) -> ShardReader:
        if name not in self._where:
            raise FormatError(f"{self.path} has no tensor '{name}'")
        return self._where[name]

    def transposed(self, name: str) -> bool:
        return False

    def matrix(self, module: str) -> QuantTensor:
        return DenseTensor(self.read(f"{module}.weight"))

    def copy_tokenizer(self, to: Path) -> None:
        copy_tokenizer_files(self.path, to)
