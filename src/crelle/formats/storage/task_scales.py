"""The scales of a task, apart from the codes that all tasks share (AlphaTuning): one safetensors file.

    MODULE.TENSOR    f16    each trained scale, under its name in the checkpoint

Metadata: "crelle_scales_of", the SHA-256 over the codes that the scales belong to. A checkpoint opened with such a file
has those scales; changing the task changes nothing else.
"""

import hashlib
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor, format_of
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.io import ShardReader, write_whole
from crelle.formats.storage.open import Weights

_CODES = "crelle_scales_of"


def save_scales(tuned: Checkpoint, base: Checkpoint, path: Path) -> int:
    """Write the scales in which a tuned checkpoint differs from the one it was made from; return the file's bytes."""
    scales: dict[str, Tensor] = {}
    for module in _quantized(base):
        old, new = base.matrix(module), tuned.matrix(module)
        names = old.scales().keys()
        if _codes(old).keys() != _codes(new).keys() or not all(
            torch.equal(t, _codes(new)[name]) for name, t in _codes(old).items()
        ):
            raise FormatError(
                f"'{module}' has other codes in {tuned.path} than in {base.path}: only the scales of a checkpoint "
                "whose scales alone were tuned can be exchanged"
            )
        changed = {name: t for name, t in new.tensors().items() if name in names}
        scales |= {f"{module}.{name}": t for name, t in changed.items() if not torch.equal(t, old.tensors()[name])}
    data = safetensors.torch.save(scales, metadata={_CODES: fingerprint(base)})
    write_whole(path, data)
    return len(data)


class ScaledCheckpoint(Checkpoint):
    """A checkpoint with the scales of a task."""

    def __init__(self, path: Path, scales: Path, verify: bool = True) -> None:
        super().__init__(path, verify)
        self._scales: ShardReader | None = None
        reader = ShardReader(scales)
        if reader.metadata().get(_CODES) != fingerprint(self):
            raise FormatError(f"{scales} does not contain scales of {path}, but of another checkpoint or nothing")
        known = {f"{m}.{name}" for m in _quantized(self) for name in self.matrix(m).scales()}
        if odd := sorted(set(reader.names()) - known):
            raise FormatError(f"{scales}: '{odd[0]}' is not a scale of {path}")
        self._scales, self._changed = reader, frozenset(reader.names())

    def _stored(self, name: str) -> Tensor:
        if self._scales is not None and name in self._changed:
            return self._scales.read(name)
        return super()._stored(name)


def with_scales(weights: Weights, scales: str | Path) -> ScaledCheckpoint:
    """Return an opened checkpoint with the scales of a task."""
    if not isinstance(weights, Checkpoint):
        raise FormatError(f"{weights.path} is not a Crelle checkpoint, so that no scales belong to it")
    return ScaledCheckpoint(weights.path, Path(scales), verify=False)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hash of all codes: what scales of a task belong to."""
    found = hashlib.sha256()
    for module in _quantized(checkpoint):
        for name, t in sorted(_codes(checkpoint.matrix(module)).items()):
            found.update(f"{module}.{name}{list(t.shape)}".encode())
            found.update(t.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _quantized(checkpoint: Checkpoint) -> list[str]:
    return sorted(m for m, spec in checkpoint.specs.items() if format_of(spec).quantized)


def _codes(w: QuantTensor) -> dict[str, Tensor]:
    scales = w.scales()
    return {name: t for name, t in w.tensors().items() if name not in scales}
