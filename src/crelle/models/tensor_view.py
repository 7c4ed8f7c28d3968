"""A model's tensors as its family's spec wants them, whatever way they are stored.

Some families store a linear's weight transposed (GPT-2's Conv1D), or q, k and v as one matrix, or norms as weights to
which 1 is added. A view gives such tensors other names, under which they have the usual form; what a quantizer makes
of them is stored under those names, so that a checkpoint needs no view any more. Families without such tensors have
none either: the weights stay as they are.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import Weights
from crelle.kernels.spec import DecoderSpec
from crelle.models.families.base import Family, StoredMatrix

OFFSET = "norm_weight_offset"  # key of a config: what is still to be added to the weights of norms


class TensorView:
    """Weights over other weights."""

    def __init__(self, inner: Weights, family: Family) -> None:
        self.inner, self.path = inner, inner.path
        self.config: dict[str, Any] = dict(inner.config)
        self._family = family
        self._offset = float(inner.config.get(OFFSET, family.norm_offset))
        if family.norm_offset:
            self.config[OFFSET] = 0.0  # the norms of this view have it added
        self._from: dict[str, tuple[str, StoredMatrix, int]] = {}  # name here -> (name inside, how, which part)
        self._names: list[str] = []
        for name in inner.names():
            if any(name.endswith(end) for end in family.dropped):
                continue
            module, _, kind = name.rpartition(".")
            rule = next((r for r in family.stored if module.endswith(f".{r.module}")), None)
            if rule is None:
                self._names.append(name)
                continue
            prefix = module.removesuffix(rule.module)
            for part, to in enumerate(rule.parts):
                self._from[f"{prefix}{to}.{kind}"] = name, rule, part
                self._names.append(f"{prefix}{to}.{kind}")

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._from:
            return self.inner.shape(name)
        stored, rule, _ = self._from[name]
        shape = self.inner.shape(stored)
        if len(shape) == 1:
            return (len(self._rows(name, shape[0])),)
        N, K = reversed(shape) if self._transposed(stored, rule) else shape
        return len(self._rows(name, N)), K

    def read(self, name: str) -> Tensor:
        if name not in self._from:
            t = self.inner.read(name)
            return t.float() + self._offset if self._offset and self._is_norm(name, t) else t
        stored, rule, _ = self._from[name]
        t = self.inner.read(stored)
        if t.dim() == 2 and self._transposed(stored, rule):
            t = t.T
        return t[self._rows(name, len(t))].contiguous()

    def matrix(self, module: str) -> QuantTensor:
        name = f"{module}.weight"
        if name not in self._from:
            return self.inner.matrix(module)
        stored, rule, _ = self._from[name]
        w = self.inner.matrix(stored.removesuffix(".weight"))
        if w.format == DenseTensor.format:
            return DenseTensor(self.read(name))
        if self._transposed(stored, rule):
            raise UnsupportedError(
                f"{self.path}: '{stored}' is quantized and stored transposed, which is not supported"
            )
        return w.rows(self._rows(name, w.shape[0]))

    def _rows(self, name: str, N: int) -> Tensor:
        """Return which of the N rows of the stored tensor `name` has here."""
        stored, rule, part = self._from[name]
        if (rows := rule.rows(self._spec, N)) is None:
            s, parts = self._spec, ", ".join(rule.parts)
            raise FormatError(
                f"{self.path}: '{stored}' has {N} rows, which cannot be {parts} of {s.heads} heads and "
                f"{s.kv_heads} key heads of {s.head_size}, as the model's config has them"
            )
        return rows[part]

    @cached_property
    def _spec(self) -> DecoderSpec:
        return self._family.spec(self.inner.config)

    def packed(self, name: str) -> bool:
        """Tell whether f32 was unpacked from fewer bits (GGUF)."""
        packed = getattr(self.inner, "packed", None)
        return packed is not None and bool(packed(self._from[name][0] if name in self._from else name))

    def transposed(self, name: str) -> bool:
        return False

    def copy_tokenizer(self, to: Path) -> None:
        self.inner.copy_tokenizer(to)

    def _transposed(self, stored: str, rule: StoredMatrix) -> bool:
        """Some readers (GGUF) give as [N, K] what Hugging Face stores as [K, N]; those say so."""
        return rule.transposed and not self.inner.transposed(stored)

    @staticmethod
    def _is_norm(name: str, t: Tensor) -> bool:
        return t.dim() == 1 and name.endswith("norm.weight")


def as_specified(weights: Weights, family: Family) -> Weights:
    """Return weights under the names and in the forms that the family's spec has."""
    if isinstance(weights, TensorView | Checkpoint) or not (family.stored or family.norm_offset or family.dropped):
        return weights  # a checkpoint was made through a view
    return TensorView(weights, family)
