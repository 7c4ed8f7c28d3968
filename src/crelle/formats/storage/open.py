"""Opens a model's weights: Hugging Face directories (plain or quantized by others), GGUF files and our own checkpoints.

The layers above call `open_weights(path)` and name tensors as Hugging Face does.
"""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.fused_experts import split_experts
from crelle.formats.storage.hf import HFDirectory
from crelle.formats.storage.io import looks_pickled, read_json, refuse_pickle
from crelle.formats.storage.nearby import meant_instead, models_in
from crelle.formats.storage.ownership import CONFIG, is_checkpoint

_MODELOPT = "hf_quant_config.json"


class Weights(Protocol):
    """A model's config, tokenizer and tensors; a tensor is read from the disk when it is asked for.

    Two things may differ from Hugging Face's own files, and a reader tells them instead of changing values:
    `transposed`, and config["norm_weight_offset"]. The latter is what a norm adds to its stored weight; where the key
    is missing, it is what the family has (Gemma: 1). GGUF files of Gemma have it added already, and say 0.
    """

    path: Path
    config: dict[str, Any]

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...

    def matrix(self, module: str) -> QuantTensor:
        """Return the weight of a linear layer or embedding, encoded as it is stored and in the layout of `read`."""
        ...

    def transposed(self, name: str) -> bool:
        """Tell whether a matrix that Hugging Face stores [inputs, outputs] (`is_conv1d`) is [outputs, inputs] here."""
        return False

    def copy_tokenizer(self, to: Path) -> None:
        """Write the tokenizer's files into a directory."""
        ...


def open_weights(path: str | Path, verify: bool = True, encoded: bool = False) -> Weights:
    """Open whatever lies at `path`, or say in a sentence why not.

    `encoded` leaves the matrices of a GGUF file in their grids where we have such a grid; otherwise they come
    dequantized. Directories quantized by others always stay encoded.
    """
    path = Path(path)
    if not path.exists():
        raise FormatError(f"{path} does not exist; {meant_instead(path)}")
    if path.is_file():
        with open(path, "rb") as f:
            magic = f.read(4)
        if magic == b"GGUF":
            from crelle.formats.importers.gguf import GGUFFile

            return GGUFFile(path, encoded)
        if path.stat().st_size and looks_pickled(path):
            raise refuse_pickle(path)
        raise FormatError(f"{path} is neither a GGUF file nor a directory; give a model directory or a .gguf file")
    if not (path / CONFIG).is_file():
        if (path / "adapter_config.json").is_file():
            raise FormatError(
                f"{path} is an adapter, not a model; load the model with transformers and the adapter with peft "
                "(docs/guide/transformers.md), or merge it into the unquantized model"
            )
        inside = [str(m) for m in models_in(path)[:4]]
        hint = f"; it contains these models: {', '.join(inside)}" if inside else ""
        raise FormatError(f"{path} has no config.json, so it is not a model directory{hint}")
    config = read_json(path / CONFIG)
    if is_checkpoint(config):
        return Checkpoint(path, verify)
    declared = _declared(path, config)
    return split_experts(HFDirectory(path, config)) if declared is None else open_quantized(path, config, declared)


def _declared(path: Path, config: dict[str, Any]) -> Any:
    """Return what a directory says about its quantization; older GPTQ, AWQ and ModelOpt say it in a file of its own."""
    if found := config.get("quantization_config") or config.get("compression_config"):
        return found
    for file, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq"), (_MODELOPT, "modelopt")):
        if (path / file).is_file():
            return {"quant_method": method, **read_json(path / file)}
    return None


def open_quantized(path: Path, config: dict[str, Any], declared: Any) -> Weights:
    """Open a directory that another project quantized; `declared` is its quantization_config."""
    from crelle.formats.importers.awq import AWQDirectory
    from crelle.formats.importers.compressed_tensors import CompressedTensorsDirectory
    from crelle.formats.importers.exl3 import Exl3Directory
    from crelle.formats.importers.gptq import GPTQDirectory
    from crelle.formats.importers.modelopt import ModelOptDirectory
    from crelle.formats.importers.mxfp4 import Mxfp4Directory

    every = (GPTQDirectory, AWQDirectory, CompressedTensorsDirectory, ModelOptDirectory, Mxfp4Directory, Exl3Directory)
    readers: dict[str, Any] = {r.method: r for r in every}
    method = declared.get("quant_method") if isinstance(declared, dict) else declared
    if not isinstance(declared, dict) or not isinstance(method, str) or method not in readers:
        known = ", ".join(readers)
        raise FormatError(f"{path} is quantized by '{method}', which Crelle cannot read (it reads {known} and GGUF)")
    found: Weights = readers[method](path, config, declared)
    return found


def matrices_of(weights: Weights) -> list[str]:
    """Return the modules whose weight is a matrix."""
    return [n.removesuffix(".weight") for n in weights.names() if is_matrix(weights, n)]


def is_matrix(weights: Weights, name: str) -> bool:
    """Tell whether a tensor is the weight [outputs, inputs] of a linear layer, or an embedding."""
    return name.endswith(".weight") and len(weights.shape(name)) == 2


def scheme_of(weights: Weights) -> str:
    """Return the scheme of a checkpoint of ours, or what else quantized a model."""
    from crelle.formats.importers.base import EncodedDirectory

    if isinstance(weights, Checkpoint):
        return weights.scheme
    return f"quantized by {weights.method}" if isinstance(weights, EncodedDirectory) else "not quantized by Crelle"
