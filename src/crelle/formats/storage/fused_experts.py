"""Experts that a directory stores fused, all of a layer in one tensor of three dimensions, read matrix by matrix.

    as stored                               as read here, for each of the E experts
    X.experts.gate_up_proj  [E, 2 I, H]     X.experts.0.gate_proj.weight [I, H], X.experts.0.up_proj.weight [I, H], …
    X.experts.down_proj     [E, H, I]       X.experts.0.down_proj.weight [H, I], …

transformers 5 keeps the experts of a model like this, and saves them so with `save_original_format=False`; some
families have no other files. A matrix is one slice of the tensor: the others are not read. Where a family's own files
have other names for the matrices of an expert (Mixtral), they have those here.

gpt-oss stores [E, H, 2 I] with gate and up column by column, [E, I, H], and biases [E, 2 I] and [E, H]. Other layouts
(Llama 4: transposed) stay as they are stored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.hf import HFDirectory
from crelle.formats.storage.io import MAX_TENSORS

_EXPERTS = ".experts."
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_BIASED = {f"{name}{kind}": parts for name, parts in _PARTS.items() for kind in ("", "_bias")}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MATRICES = dict.fromkeys(("mixtral", "minimax", "minimax_m2", "phimoe", "lfm2_moe"), _MIXTRAL)
_BLOCKS = {  # (as transformers calls it, as the family's own files do), behind the layer
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), ((".mlp.", ".block_sparse_moe."),)),
    "phimoe": ((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
}


class _Slice(NamedTuple):
    """One expert's rows of a fused tensor; transposed: its columns."""

    stored: str
    expert: int
    rows: slice
    shape: tuple[int, ...]
    transposed: bool = False


_Found = TypeVar("_Found", str, _Slice)


class SplitExperts:
    """Weights over those of a directory with fused experts."""

    def __init__(self, inner: HFDirectory, fused: Mapping[str, tuple[str, ...]]) -> None:
        """`fused`: the tensors to take apart, with the matrices that each holds, one behind the other."""
        self.inner, self.path = inner, inner.path
        self.config: dict[str, Any] = inner.config
        kind = str(inner.config.get("model_type"))
        own, blocks = _MATRICES.get(kind, {}), _BLOCKS.get(kind, ())
        biased = any(name.endswith("_bias") for name in fused)
        self._slices: dict[str, _Slice] = {}
        self._stored: dict[str, str] = {}  # by the name here, the other tensors
        for name in inner.names():
            here = name
            for theirs, ours in blocks:
                here = here.replace(theirs, ours)
            if (parts := fused.get(name)) is None:
                self._put(here, name, self._stored)
                continue
            prefix, shape = here.rpartition(".")[0], inner.shape(name)
            for e in range(shape[0]):
                for i, part in enumerate(parts):
                    module = f"{prefix}.{e}.{own.get(part, part)}"
                    kind = "bias" if len(shape) == 2 else "weight"
                    self._put(f"{module}.{kind}", _slice(name, e, i, len(parts), shape, biased), self._slices)

    def _put(self, here: str, found: _Found, where: dict[str, _Found]) -> None:
        if here in self._stored or here in self._slices:
            raise FormatError(f"{self.path} has the tensor '{here}' twice, once as fused experts")
        where[here] = found

    def names(self) -> list[str]:
        return [*self._stored, *self._slices]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slices[name].shape if name in self._slices else self.inner.shape(self._stored.get(name, name))

    def read(self, name: str) -> Tensor:
        if (part := self._slices.get(name)) is None:
            return self.inner.read(self._stored.get(name, name))
        if not part.transposed:
            return self.inner.read_slice(part.stored, (part.expert, part.rows))
        columns = self.inner.read_slice(part.stored, (part.expert,))[..., part.rows]
        return columns.T.contiguous() if columns.dim() == 2 else columns.contiguous()

    def matrix(self, module: str) -> QuantTensor:
        return DenseTensor(self.read(f"{module}.weight"))

    def transposed(self, name: str) -> bool:
        return False

    def copy_tokenizer(self, to: Path) -> None:
        self.inner.copy_tokenizer(to)


def _slice(name: str, expert: int, part: int, parts: int, shape: tuple[int, ...], interleaved: bool) -> _Slice:
    """Return where a part of a fused tensor lies."""
    if interleaved:
        return _Slice(name, expert, slice(part, None, parts), (shape[-1] // parts, *shape[1:-1]), True)
    N = shape[1] // parts
    return _Slice(name, expert, slice(part * N, (part + 1) * N), (N, shape[2]))


def split_experts(weights: HFDirectory) -> HFDirectory | SplitExperts:
    """Return weights in which every expert's matrix has a name of its own; most directories store them so."""
    blocks: dict[str, set[str]] = {}
    for name in weights.names():
        before, found, inside = name.rpartition(_EXPERTS)
        if found:
            blocks.setdefault(before, set()).add(inside)
    fused: dict[str, tuple[str, ...]] = {}
    matrices = 0
    for before, tensors_there in blocks.items():
        stored = next((known for known in (_PARTS, _BIASED) if tensors_there == set(known)), None)
        if stored is None:
            continue  # a matrix for each expert already, or scales of one
        tensors = {f"{before}{_EXPERTS}{name}": parts for name, parts in stored.items()}
        shapes = {name.rpartition(".")[2]: weights.shape(name) for name in tensors}
        both, down = shapes["gate_up_proj"], shapes["down_proj"]
        if not (_fits(both, down) if stored is _PARTS else _fits_biased(shapes)):
            continue
        fused |= tensors
        matrices += 3 * both[0]
        if matrices > MAX_TENSORS:  # the file may promise any number; no list of names is made of it yet
            raise FormatError(f"{weights.path} has more than {MAX_TENSORS:,} expert matrices, which is the limit")
    return SplitExperts(weights, fused) if fused else weights


def _fits(both: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Tell whether two shapes are [E, 2 I, H] and [E, H, I]; those of a transposed layout never are."""
    return len(both) == 3 and 0 not in both and both[1] % 2 == 0 and down == (both[0], both[2], both[1] // 2)


def _fits_biased(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether shapes are [E, H, 2 I], [E, I, H], and biases of as many columns."""
    both, down = shapes["gate_up_proj"], shapes["down_proj"]
    if len(both) != 3 or 0 in both or both[2] % 2 or down != (both[0], both[2] // 2, both[1]):
        return False
    return shapes["gate_up_proj_bias"] == (both[0], both[2]) and shapes["down_proj_bias"] == (both[0], both[1])
