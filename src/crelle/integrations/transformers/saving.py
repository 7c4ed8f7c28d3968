"""save_pretrained of a model with our modules: a Crelle checkpoint like those of `crelle quantize`.

transformers writes model.safetensors, which it would open without us under a warning and with random weights. So it
writes into a directory beside, and what it wrote gets the names that a Crelle checkpoint has
(formats/storage/checkpoint.py) before it is moved; config.json comes last. A directory with another model in it is
refused before anything is written; other files (a tokenizer, a README) may be there and stay. Norms are as the family's
own files have them, with no offset added.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.core_model_loading import revert_weight_conversion

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import Spec
from crelle.formats.dense import DENSE_DTYPES
from crelle.formats.storage.checkpoint import FORMAT_VERSION
from crelle.formats.storage.checkpoint_writer import shard_name, transformers_notice
from crelle.formats.storage.io import ShardReader, read_json, sha256, to_json, write_whole
from crelle.formats.storage.ownership import CONFIG, HF_INDEX, INDEX, is_checkpoint, listed_shards, read_mark
from crelle.integrations.transformers.layers import QuantModule

_MODEL_FILES = ("model*.safetensors", HF_INDEX, "pytorch_model*", "*.gguf")


def save_pretrained(
    model: Any, save_directory: str | Path, *, push_to_hub: bool = False, variant: str | None = None, **options: Any
) -> None:
    """Write a Crelle checkpoint; the options are those of PreTrainedModel.save_pretrained."""
    if push_to_hub or variant is not None:
        raise UnsupportedError("save a Crelle checkpoint to a directory, without a variant; upload that directory")
    out = Path(save_directory)
    _refuse_foreign(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".crelle-", dir=out) as place:
        made = Path(place)
        type(model).save_pretrained(model, made, **options)
        specs = _specs(model, options.get("save_original_format", True))
        _complete(model, made, specs)
        _move(made, out)


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FormatError(f"{out} is a file; give a directory")
    config = out / CONFIG
    if config.is_file() and not config.is_symlink() and is_checkpoint(read_mark(config)):
        return
    found = [CONFIG] if os.path.lexists(config) else []
    found += [p.name for pattern in _MODEL_FILES for p in sorted(out.glob(pattern))]
    if found:
        raise FormatError(f"{out} holds {found[0]} of a model that Crelle did not write; choose another directory")


def _specs(model: Any, original: bool) -> dict[str, Spec]:
    """Return the specs of the quantized matrices under the names that they are stored by."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, QuantModule)}
    first = {f"{name}.{m.part_names[0]}": getattr(m, m.part_names[0]) for name, m in modules.items()}
    stored = revert_weight_conversion(model, dict(first)) if original else first
    names = {id(t): name for name, t in stored.items()}
    return {
        names[id(getattr(m, m.part_names[0]))].removesuffix(f".{m.part_names[0]}"): m.spec for m in modules.values()
    }


def _complete(model: Any, made: Path, specs: Mapping[str, Spec]) -> None:
    """Turn a directory that transformers wrote into a checkpoint of ours."""
    files = sorted(made.glob("*.safetensors"))
    shards = {shard_name(i, len(files)): file for i, file in enumerate(files, start=1)}
    facts: dict[str, dict[str, Any]] = {}
    where: dict[str, str] = {}
    dense: dict[str, Spec] = {}
    for name, file in shards.items():
        reader = ShardReader(file)
        for tensor in reader.names():
            where[tensor] = name
            module, _, kind = tensor.rpartition(".")
            if kind == "weight" and len(shape := reader.shape(tensor)) == 2:
                if reader.read(tensor).dtype not in DENSE_DTYPES:
                    continue
                dense[module] = {"format": "dense", "shape": list(shape)}
        del reader
        file.rename(made / name)
        facts[name] = {"sha256": sha256(made / name), "bytes": (made / name).stat().st_size}
    (made / HF_INDEX).unlink(missing_ok=True)
    size = sum(f["bytes"] for f in facts.values())
    write_whole(made / INDEX, to_json({"metadata": {"total_size": size}, "weight_map": where}))
    config = read_json(made / CONFIG)
    ours = model.config.quantization_config
    config.pop("norm_weight_offset", None)  # of a checkpoint that this model came from
    config["quantization_config"] = {
        "quant_method": "crelle",
        "format_version": FORMAT_VERSION,
        "scheme": ours.scheme,
        "overrides": dict(ours.overrides),
        "tensors": {**dense, **specs},
        "shards": facts,
    }
    write_whole(made / CONFIG, to_json({**config, **transformers_notice()}))


def _move(made: Path, out: Path) -> None:
    """Move the files of `made` to `out`, config.json last and that of an earlier checkpoint away first."""
    old = _shards_of(out / CONFIG)
    (out / CONFIG).unlink(missing_ok=True)
    for file in sorted(made.iterdir(), key=lambda f: f.name == CONFIG):
        shutil.move(file, out / file.name)
    for name in old - _shards_of(out / CONFIG):
        (out / name).unlink(missing_ok=True)


def _shards_of(config: Path) -> set[str]:
    found = read_mark(config) if config.is_file() else {}
    return listed_shards(found, {}) if is_checkpoint(found) else set()
