"""The quantized types of GGUF as grids of ours, read without loss.

A row is cut into blocks of 32 weights, or 256 in the K-quants; b bits, d and m are f16 numbers of the block:
    Q4_0 Q5_0 Q8_0    w = d (q - 2^(b-1))                    groups of 32, f16 scales
    Q4_1 Q5_1         w = d q + m                            groups of 32, f16 scales
    Q3_K Q6_K         w = d s (q - 2^(b-1))                  groups of 16, s an integer of 6 or 8 bits
    Q2_K              w = d s q - m t                        groups of 16, s and t integers of 4 bits
    Q4_K Q5_K         w = d s q - m t                        groups of 32, s and t integers of 6 bits
The products d s and m t are exact in f32 and are stored so, which makes K-quants larger here: Q4_K takes 6 bits per
weight instead of 4.5, Q6_K 8 instead of 6.6. Where the bytes of a block lie is said beside the code that reads them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor
from crelle.formats.bcq import UniformTensor

Array = np.ndarray[Any, Any]


class Blocks(NamedTuple):
    """Blocks taken apart: codes [n, weights], and per group scales and lows [n, groups]; no lows: symmetric."""

    codes: Array
    scale: Array
    low: Array | None


def decode(kind: str, data: Array, shape: tuple[int, ...]) -> UniformTensor | AffineTensor | None:
    """Return a matrix [N, K] of a quantized type as one of our tensors; None where we have no such grid."""
    if kind not in _READERS or len(shape) != 2:
        return None
    bits, size, read = _READERS[kind]
    N, K = shape
    codes, scale, low = read(np.ascontiguousarray(data).reshape(N * K // size, -1))
    group = codes.shape[1] // scale.shape[1]
    q = torch.from_numpy(codes.reshape(N, K))
    if low is None:
        return UniformTensor.from_codes(q, bits, _per_group(scale, N), None, group)
    return AffineTensor.from_codes(q, bits, _per_group(scale, N), _per_group(low, N), group)


def _per_group(values: Array, N: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(N, -1)


def _half(blocks: Array) -> Array:
    """Two bytes as an f16 number [n, 1]."""
    return np.ascontiguousarray(blocks).view(np.float16)


def _fields(data: Array, bits: int) -> Array:
    """Cut bytes [..., m] into fields: [..., 8/bits, m], all lowest fields first."""
    place = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (data[..., None, :] >> place) & ((1 << bits) - 1)


# Blocks of 32. d, then m in the `_1` types, then the fifth bits, then nibbles: all low ones first.


def _nibbles(blocks: Array) -> Array:
    return _fields(blocks, 4).reshape(len(blocks), 32)


def _fifth(blocks: Array) -> Array:
    return np.unpackbits(blocks, axis=-1, bitorder="little") << 4


def _q4_0(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 2:]), _half(b[:, :2]), None)


def _q4_1(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4]))


def _q5_0(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 6:]) | _fifth(b[:, 2:6]), _half(b[:, :2]), None)


def _q5_1(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 8:]) | _fifth(b[:, 4:8]), _half(b[:, :2]), _half(b[:, 2:4]))


def _q8_0(b: Array) -> Blocks:
    return Blocks(b[:, 2:] ^ 0x80, _half(b[:, :2]), None)  # signed q + 128


# Blocks of 256. Fields of a byte belong to weights 32 apart.


def _times(number: Array, integers: Array) -> Array:
    """Return d times small integers, exact in f32."""
    product: Array = _half(number).astype(np.float32) * integers.astype(np.float32)
    return product


def _q2_k(b: Array) -> Blocks:
    """16 bytes of scale and, above it, minimum; 64 of codes; d; m."""
    n = len(b)
    codes = _fields(b[:, 16:80].reshape(n, 2, 32), 2).reshape(n, 256)
    return Blocks(codes, _times(b[:, 80:82], b[:, :16] & 15), -_times(b[:, 82:84], b[:, :16] >> 4))


def _q3_k(b: Array) -> Blocks:
    """32 bytes of third bits, 64 of the lower two; scales + 32: 8 bytes of low nibbles, 4 of upper two bits; d."""
    n = len(b)
    low = _fields(b[:, 32:96].reshape(n, 2, 32), 2).reshape(n, 256)
    third = _fields(b[:, :32], 1).reshape(n, 256)
    scales = _fields(b[:, 96:104], 4).reshape(n, 16) | _fields(b[:, 104:108], 2).reshape(n, 16) << 4
    return Blocks(low | third << 2, _times(b[:, 108:110], scales.astype(np.int8) - 32), None)


def _scales_and_minima(b: Array) -> tuple[Array, Array]:
    """Twelve bytes as eight scales and eight minima of 6 bits: the first four of each plainly, the rest in pieces."""
    s, m, rest = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scales = np.concatenate([s & 63, (rest & 15) | (s >> 6 << 4)], axis=-1)
    return scales, np.concatenate([m & 63, (rest >> 4) | (m >> 6 << 4)], axis=-1)


def _q4_k(b: Array) -> Blocks:
    """d; m; 12 bytes of scales and minima; 128 of codes."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    codes = _fields(b[:, 16:144].reshape(-1, 4, 32), 4).reshape(len(b), 256)
    return Blocks(codes, _times(b[:, :2], scales), -_times(b[:, 2:4], minima))


def _q5_k(b: Array) -> Blocks:
    """As Q4_K, with 32 bytes of fifth bits before the codes."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    codes = _fields(b[:, 48:176].reshape(-1, 4, 32), 4).reshape(len(b), 256)
    codes |= _fields(b[:, 16:48], 1).reshape(len(b), 256) << 4
    return Blocks(codes, _times(b[:, :2], scales), -_times(b[:, 2:4], minima))


def _q6_k(b: Array) -> Blocks:
    """128 bytes of low nibbles, 64 of upper two bits, 16 signed scales, d."""
    n = len(b)
    low = _fields(b[:, :128].reshape(n, 2, 64), 4).reshape(n, 256)
    upper = _fields(b[:, 128:192].reshape(n, 2, 32), 2).reshape(n, 256)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8)
    return Blocks(low | upper << 4, _times(b[:, 208:210], scales), None)


_READERS: dict[str, tuple[int, int, Callable[[Array], Blocks]]] = {  # bits of a code, weights in a block
    "Q4_0": (4, 32, _q4_0),
    "Q4_1": (4, 32, _q4_1),
    "Q5_0": (5, 32, _q5_0),
    "Q5_1": (5, 32, _q5_1),
    "Q8_0": (8, 32, _q8_0),
    "Q2_K": (2, 256, _q2_k),
    "Q3_K": (3, 256, _q3_k),
    "Q4_K": (4, 256, _q4_k),
    "Q5_K": (5, 256, _q5_k),
    "Q6_K": (6, 256, _q6_k),
}
