"""What the importers of quantized Hugging Face directories share.

Such a directory differs from a plain one in that `module.weight` is missing for some modules; a few tensors with other
names stand for it (GPTQ: qweight, qzeros, scales, g_idx). An importer names those parts and converts them to one of our
tensors; everything else is read as from a plain directory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import MAX_BITS, SCALE_DTYPES, UniformTensor, groups_in
from crelle.formats.storage.hf import HFDirectory
from crelle.formats.storage.hf_layout import is_conv1d
from crelle.formats.wrappers.composite import PermutedTensor


class EncodedDirectory(HFDirectory):
    """A Hugging Face directory in which some matrices are encoded in another project's way."""

    method: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]  # the tensors that stand for a matrix; the first one always does

    def __init__(self, path: Path, config: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
        plain = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
        super().__init__(path, plain)
        self.declared = declared
        self.notes: list[str] = []  # what the reader decided where the files left room for doubt
        mark = f".{self.parts[0]}"
        self.encoded = dict.fromkeys(n.removesuffix(mark) for n in self._where if n.endswith(mark))  # in their order
        if not self.encoded:
            raise FormatError(f"{path} declares {self.method} quantization, but no tensor name ends in '{mark}'")

    def names(self) -> list[str]:
        parts = {f"{m}.{p}" for m in self.encoded for p in self.parts}
        return [f"{m}.weight" for m in self.encoded] + [n for n in self._where if n not in parts]

    def shape(self, name: str) -> tuple[int, ...]:
        if (module := self._encoded_module(name)) is None:
            return super().shape(name)
        with self._speaking_of(module):
            return self._matrix_shape(module)

    def read(self, name: str) -> Tensor:
        """Return a tensor; an encoded matrix dequantized to f32."""
        return self.matrix(module).dequantize() if (module := self._encoded_module(name)) else super().read(name)

    def matrix(self, module: str) -> QuantTensor:
        if module not in self.encoded:
            return super().matrix(module)
        with self._speaking_of(module):
            return self._decode(module)

    def transposed(self, name: str) -> bool:
        """Every layout read here decodes to [outputs, inputs]."""
        return self._encoded_module(name) is not None and is_conv1d(self.config, name)

    @contextmanager
    def _speaking_of(self, module: str) -> Iterator[None]:
        """Put the file's and the module's name before what is wrong with it."""
        try:
            yield
        except CrelleError as e:
            raise type(e)(f"{self.path}, '{module}': {e}") from e

    def _encoded_module(self, name: str) -> str | None:
        module, _, kind = name.rpartition(".")
        return module if kind == "weight" and module in self.encoded else None

    def _matrix_shape(self, module: str) -> tuple[int, int]:
        """Return (N, K), if possible without reading the tensors."""
        raise NotImplementedError

    def _decode(self, module: str) -> QuantTensor:
        raise NotImplementedError

    def _part_shape(self, module: str, part: str) -> tuple[int, ...]:
        return super().shape(f"{module}.{part}")

    def has(self, module: str, part: str) -> bool:
        return f"{module}.{part}" in self._where

    def part(self, module: str, part: str, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """Return one of the tensors that stand for a matrix, checked; None in the shape is any size."""
        if not self.has(module, part):
            raise FormatError(f"the tensor '{part}' is missing")
        t = super().read(f"{module}.{part}")
        fits = t.dim() == len(shape) and all(w in (None, n) for n, w in zip(t.shape, shape, strict=True))
        if not fits or t.dtype not in dtypes or not t.numel():
            kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            sizes = ", ".join("any" if n is None else str(n) for n in shape)
            found = f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
            raise FormatError(f"'{part}' should be {kinds} [{sizes}], but is {found}")
        return t

    def setting(self, *keys: str, default: Any = None) -> Any:
        """Return the first of some keys that the quantization config gives."""
        return next((self.declared[k] for k in keys if self.declared.get(k) is not None), default)


def grid(codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group: int) -> UniformTensor | AffineTensor:
    """Return w = scale (q - zero) for codes [N, K], scale and zero [N, C]; exact in f32 for any zero point."""
    if scale.dtype not in SCALE_DTYPES:
        raise FormatError(f"the scales are {str(scale.dtype).removeprefix('torch.')}, which is not supported")
    if zero is None or bool((zero == 1 << (bits - 1)).all()):
        return UniformTensor.from_codes(codes, bits, scale, None, group)
    if int(zero.min()) >= 0 and int(zero.max()) < 1 << bits:
        return UniformTensor.from_codes(codes, bits, scale, zero, group)
    if scale.dtype == torch.float32:
        raise UnsupportedError(f"a zero point outside 0 to {2**bits - 1} with f32 scales cannot be represented exactly")
    # Outside the codes' own range. A 16-bit scale times such a small integer is exact in f32, and so is the sum.
    return AffineTensor.from_codes(codes, bits, scale, -scale.float() * zero.float(), group)


def in_group_order(g_idx: Tensor, groups: int) -> tuple[int, Tensor | None]:
    """Return the group size and, where the groups are not runs of neighbours, the order that makes them so."""
    K = len(g_idx)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise FormatError(f"'g_idx' names groups outside 0 to {groups - 1}")
    in_order, order = torch.sort(g_idx.long(), stable=True)
    group = int((in_order == in_order[0]).sum())
    if not torch.equal(in_order, torch.arange(K) // group) or groups_in(K, group) != groups:
        raise UnsupportedError("the groups in 'g_idx' differ in size, which is not supported")
    return group, None if torch.equal(order, torch.arange(K)) else order.to(torch.int32)


def sorted_grid(
    codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group: int, order: Tensor | None
) -> QuantTensor:
    """Return the grid of `grid`, permuted where `order` says that its groups are scattered over the row."""
    if order is None:
        return grid(codes, bits, scale, zero, group)
    return PermutedTensor(grid(codes[:, order.long()], bits, scale, zero, group), order)


def whole_number(value: Any, what: str, choices: tuple[int, ...] = tuple(range(1, MAX_BITS + 1))) -> int:
    """Return a setting that must be one of some integers."""
    if type(value) is not int or value not in choices:
        raise UnsupportedError(f"{what} is {value!r}; Crelle reads {', '.join(map(str, choices))}")
    return value
