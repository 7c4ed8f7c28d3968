"""Checkpoints of compressed-tensors (llm-compressor, vLLM).

`nvfp4-pack-quantized` and `mxfp4-pack-quantized` have weight_packed uint8 [N, K/2] and weight_scale as they are in
crelle.formats.fp4, the former weight_global_scale f32 [1], a divisor. `pack-quantized`: w = scale (q - zero).

    weight_packed      int32 [N, words]     q + 2^(b-1) for signed q, packed along K, low bits first
    weight_scale       float [N, G]         one column where the strategy is `channel`
    weight_zero_point  int32 [words, G]     packed along N in the same way; absent where symmetric (older: int8 [N, G])
    weight_shape       int   [2]            N, K
    weight_g_idx       int32 [K]            the group of each input, where actorder = group
Words hold a dense bit stream, ceil(K b/32) of them, or, as older versions wrote it, 32 // b codes each. The two differ
for 3, 5, 6 and 7 bits; the number of words tells them apart or, where it is the same, the bits that the older leaves 0.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import SCALE_DTYPES, groups_in
from crelle.formats.fp4 import E4M3, Fp4Tensor, Mxfp4Tensor, Nvfp4Tensor
from crelle.formats.importers.base import EncodedDirectory, in_group_order, sorted_grid, whole_number
from crelle.formats.importers.name_patterns import MAX_WORK, NamePattern
from crelle.formats.packing import unpack_words
from crelle.formats.storage.io import shown

_INTEGERS = (torch.int32, torch.int64)
_FP4: dict[str, type[Fp4Tensor]] = {"nvfp4-pack-quantized": Nvfp4Tensor, "mxfp4-pack-quantized": Mxfp4Tensor}
_MAX_TARGETS = 1000  # names and patterns; real files have a few, or one for each matrix of some layers


class CompressedTensorsDirectory(EncodedDirectory):
    """A directory that compressed-tensors wrote."""

    method: ClassVar[str] = "compressed-tensors"
    parts: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "input_global_scale",
    )

    def __init__(self, path: Path, config: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
        if (layout := declared.get("format")) not in ("pack-quantized", *_FP4):
            raise UnsupportedError(
                f"{path} is compressed-tensors in the format '{layout}'; Crelle reads pack-quantized, {', '.join(_FP4)}"
            )
        self.fp4: type[Fp4Tensor] | None = _FP4.get(str(layout))
        for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
            if declared.get(key):
                raise UnsupportedError(
                    f"{path}: its compressed-tensors config has a '{key}', which Crelle does not support"
                )
        super().__init__(path, config, declared)
        groups = declared.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
            raise FormatError(f"{path}: its compressed-tensors config has no 'config_groups'")
        self.schemes: list[tuple[list[str | NamePattern], dict[str, Any]]] = []
        work = [MAX_WORK]
        for name, scheme in groups.items():
            if self.fp4 is not None and scheme.get("input_activations"):
                self.notes.append(f"'{name}' also quantizes activations to 4 bits; here they stay floats")
            elif scheme.get("input_activations") or scheme.get("output_activations"):
                raise UnsupportedError(f"{path}: '{name}' also quantizes activations, which Crelle does not support")
            weights, targets = scheme.get("weights"), scheme.get("targets")
            if not isinstance(weights, dict) or not isinstance(targets, list):
                raise FormatError(f"{path}: '{name}' in config_groups should have 'weights' and 'targets'")
            if weights.get("type", "int") != (kind := "int" if self.fp4 is None else "float"):
                found = weights.get("type", "int")
                raise UnsupportedError(
                    f"{path}: '{name}' has weights of type '{found}'; Crelle reads {kind} in {layout}"
                )
            if sum(len(t) for t, _ in self.schemes) + len(targets) > _MAX_TARGETS:
                raise UnsupportedError(f"{path}: config_groups has more than {_MAX_TARGETS} targets")
            self.schemes.append(([_pattern(t, path, work) for t in targets], weights))
        self._shapes: dict[str, tuple[int, int]] = {}

    def _scheme(self, module: str) -> dict[str, Any]:
        """Return how a module's weights are quantized; a target that names it goes before one that names its class."""
        for by_name in (True, False):
            for targets, weights in self.schemes:
                for t in targets:
                    named = t == module if isinstance(t, str) else t.match(module)
                    if named if by_name else t == "Linear":
                        return weights
        raise FormatError("no target in config_groups matches it")

    def _matrix_shape(self, module: str) -> tuple[int, int]:
        if self.fp4 is not None:
            N, half = self._part_shape(module, "weight_packed")
            return N, 2 * half
        if module not in self._shapes:
            shape = self.part(module, "weight_shape", (2,), _INTEGERS).tolist()
            if min(shape) < 1:
                raise FormatError(f"'weight_shape' should be two positive integers, but is {shape}")
            self._shapes[module] = shape[0], shape[1]
        return self._shapes[module]

    def _decode(self, module: str) -> QuantTensor:
        N, K = self._matrix_shape(module)
        scheme = self._scheme(module)
        if self.fp4 is not None:
            return self._four_bit_floats(self.fp4, module, N, K)
        bits = whole_number(scheme.get("num_bits"), "its number of bits")
        strategy, size = scheme.get("strategy"), scheme.get("group_size")
        if strategy not in ("group", "channel"):
            raise UnsupportedError(f"its strategy is '{strategy}'; Crelle reads 'group' and 'channel'")
        if strategy == "group" and (type(size) is not int or size < 1):
            raise FormatError(f"'group_size' should be a positive number, but is {size!r}")
        group = K if strategy == "channel" else min(int(size or K), K)
        G, order = groups_in(K, group), None
        if self.has(module, "weight_g_idx"):
            g_idx = self.part(module, "weight_g_idx", (K,), _INTEGERS)
            if int(g_idx.max()) >= 0:  # all -1: never filled in
                group, order = in_group_order(g_idx, G)
        scale = self.part(module, "weight_scale", (N, G), SCALE_DTYPES)
        codes = unpacked(self.part(module, "weight_packed", (N, None), (torch.int32,)), bits, K, "weight_packed")
        zero = None if scheme.get("symmetric", True) else self._zero_points(module, bits, N, G)
        return sorted_grid(codes, bits, scale, zero, group, order)

    def _four_bit_floats(self, kind: type[Fp4Tensor], module: str, N: int, K: int) -> Mxfp4Tensor | Nvfp4Tensor:
        sizes = (N, -(-K // kind.size))
        spec: dict[str, Any] = {"format": kind.format, "shape": [N, K], "bits": 4, "group": kind.size}
        stored = {"codes": self.part(module, "weight_packed", (N, K // 2), (torch.uint8,))}
        if kind is Mxfp4Tensor:
            return Mxfp4Tensor.from_parts(
                spec, stored | {"scale": self.part(module, "weight_scale", sizes, (torch.uint8,))}
            )
        stored["scale"] = self.part(module, "weight_scale", sizes, (E4M3,)).view(torch.uint8)
        stored["global_scale"] = self.part(module, "weight_global_scale", (1,), (torch.float32,))
        return Nvfp4Tensor.from_parts({**spec, "divides": True}, stored)

    def _zero_points(self, module: str, bits: int, N: int, G: int) -> Tensor:
        stored = self.part(module, "weight_zero_point", (None, G), (torch.int32, torch.int8))
        if stored.dtype == torch.int32:
            return unpacked(stored.T, bits, N, "weight_zero_point").T.to(torch.int16)
        return self.part(module, "weight_zero_point", (N, G), (torch.int8,)).to(torch.int16) + (1 << (bits - 1))


def _pattern(target: object, path: Path, work: list[int]) -> str | NamePattern:
    """Return a target as the name it is, or as the regular expression that `re:` announces."""
    if not isinstance(target, str):
        raise FormatError(f"{path}: a target in config_groups should be a string, but is {shown(target)}")
    try:
        return NamePattern(target[3:], work) if target.startswith("re:") else target
    except UnsupportedError as e:
        raise UnsupportedError(f"{path}: a target in config_groups: {e}") from e


def unpacked(words: Tensor, bits: int, count: int, name: str) -> Tensor:
    """Return the codes uint8 [rows, count] of words [rows, …] in whichever of the two packings they are."""
    dense, each = -(-count * bits // 32), 32 // bits
    padded = -(-count // each)
    if words.shape[1] not in (dense, padded):
        raise FormatError(f"'{name}' has {words.shape[1]} words for {count} codes of {bits} bits, which need {dense}")
    unused = words >> (each * bits) if 32 % bits else None  # the top bits of a word, where the older packing has 0
    if unused is None or words.shape[1] != padded or (dense == padded and bool(unused.any())):
        return unpack_words(words, bits, count)
    place = torch.arange(0, each * bits, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> place) & ((1 << bits) - 1)).flatten(-2)[:, :count].to(torch.uint8)
