"""A tensor of any GGUF type, as floats or as one of our formats.

`dequantize` takes whatever the `gguf` package can decode. `decode` keeps a quantized matrix in its grid, without loss:
gguf_blocks.py has the uniform types, gguf_codebooks.py the others. Both work in blocks of rows, so that what they need
besides the result does not grow with the tensor.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.bcq import UniformTensor
from crelle.formats.importers import gguf_blocks, gguf_codebooks
from crelle.formats.importers.gguf_blocks import Array

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # stored as such, not dequantized
ROW_BLOCK = 1 << 21  # weights that are decoded at a time; the package needs some 20 bytes for each
_READERS = gguf_blocks.READERS | gguf_codebooks.READERS


def dequantize(kind: str, data: Array, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor's values: f32, or f16 and bf16 where it is stored so. Refuses types that nothing decodes."""
    import gguf

    if kind in FLOATS:
        return torch.from_numpy(np.array(data)).view(FLOATS[kind]).reshape(shape)
    qtype = gguf.GGMLQuantizationType[kind]
    rows, K = math.prod(shape[:-1]), shape[-1]
    stored = data.reshape(rows, -1)
    out = torch.empty(rows, K)
    for r in _row_blocks(rows, K):
        try:
            with np.errstate(all="ignore"):  # scales that are not finite give values that are not; no warning besides
                out[r] = torch.from_numpy(gguf.quants.dequantize(stored[r], qtype))
        except NotImplementedError as e:
            raise UnsupportedError(f"is {kind}, which Crelle cannot decode") from e
    return out.reshape(shape)


def decode(kind: str, data: Array, shape: tuple[int, ...]) -> UniformTensor | AffineTensor | None:
    """Return a matrix [N, K] of a quantized type as one of our tensors; None where we have no such grid."""
    if kind not in _READERS or len(shape) != 2:
        return None
    N, K = shape
    stored = data.reshape(N, -1)
    blocks = [_decode_rows(kind, stored[r], K) for r in _row_blocks(N, K)]
    if len(blocks) == 1:
        return blocks[0]
    # The first axis of every stored tensor is the rows, but for the planes, where it is the second.
    parts = {name: [b.tensors()[name] for b in blocks] for name in blocks[0].tensors()}
    joined = {name: torch.cat(p, dim=int(name == "planes")) for name, p in parts.items()}
    return type(blocks[0]).from_parts({**blocks[0].spec(), "shape": [N, K]}, joined)


def _decode_rows(kind: str, data: Array, K: int) -> UniformTensor | AffineTensor:
    bits, size, read = _READERS[kind]
    N = len(data)
    with np.errstate(all="ignore"):
        codes, scale, low, zero = read(np.ascontiguousarray(data).reshape(N * K // size, -1))
    group = codes.shape[1] // scale.shape[1]
    q, per_group = torch.from_numpy(codes.reshape(N, K)), _per_group(scale, N)
    if low is not None:
        return AffineTensor.from_codes(q, bits, per_group, _per_group(low, N), group)
    zeros = None if zero is None else torch.full(per_group.shape, zero, dtype=torch.uint8)
    return UniformTensor.from_codes(q, bits, per_group, zeros, group)


def _per_group(values: Array, N: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(N, -1)


def _row_blocks(rows: int, K: int) -> Iterator[slice]:
    step = max(1, ROW_BLOCK // K)
    for start in range(0, rows, step):
        yield slice(start, start + step)
