"""Blocks of GGUF's uniform types taken apart into codes and scales, without loss.

A row is split into blocks of 32 weights, or 256 in the K-quants; b bits, d and m are f16 values of the block:
    Q4_0 Q5_0 Q8_0    w = d (q - 2^(b-1))                    groups of 32, f16 scales
    Q4_1 Q5_1         w = d q + m                            groups of 32, f16 scales
    Q3_K Q6_K         w = d s (q - 2^(b-1))                  groups of 16, s an integer of 6 or 8 bits
    Q2_K              w = d s q - m t                        groups of 16, s and t integers of 4 bits
    Q4_K Q5_K         w = d s q - m t                        groups of 32, s and t integers of 6 bits
    TQ1_0 TQ2_0       w = d (q - 1)                          groups of 256, f16 scales, b = 2
The products d s and m t are exact in f32 and are stored so, which makes K-quants larger here: Q4_K takes 6 bits per
weight instead of 4.5, Q6_K 8 instead of 6.6. Where the bytes of a block lie is said beside the code that reads them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Blocks(NamedTuple):
    """Blocks taken apart: codes [n, weights], and per group scales and lows [n, groups].

    w = scale (q - zero), where zero is 2^(bits-1) unless given; with lows: w = scale q + low.
    """

    codes: Array
    scale: Array
    low: Array | None = None
    zero: int | None = None


class Reader(NamedTuple):
    """How the blocks of one type are read."""

    bits: int  # of a code
    size: int  # weights in a block
    read: Callable[[Array], Blocks]


def half(blocks: Array) -> Array:
    """Two bytes as an f16 value [n, 1]."""
    return np.ascontiguousarray(blocks).view(np.float16)


def fields(data: Array, bits: int) -> Array:
    """Split bytes [..., m] into fields: [..., 8/bits, m], all lowest fields first."""
    place = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (data[..., None, :] >> place) & ((1 << bits) - 1)


# Blocks of 32. d, then m in the `_1` types, then the fifth bits, then nibbles: all low ones first.


def _nibbles(blocks: Array) -> Array:
    return fields(blocks, 4).reshape(len(blocks), 32)


def _fifth(blocks: Array) -> Array:
    return np.unpackbits(blocks, axis=-1, bitorder="little") << 4


def _q4_0(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 2:]), half(b[:, :2]), None)


def _q4_1(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 4:]), half(b[:, :2]), half(b[:, 2:4]))


def _q5_0(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 6:]) | _fifth(b[:, 2:6]), half(b[:, :2]), None)


def _q5_1(b: Array) -> Blocks:
    return Blocks(_nibbles(b[:, 8:]) | _fifth(b[:, 4:8]), half(b[:, :2]), half(b[:, 2:4]))


def _q8_0(b: Array) -> Blocks:
    return Blocks(b[:, 2:] ^ 0x80, half(b[:, :2]), None)  # signed q + 128


# Blocks of 256. Fields of a byte belong to weights 32 apart.


def times(d: Array, integers: Array) -> Array:
    """Return an f16 value times small integers, exact in f32."""
    product: Array = half(d).astype(np.float32) * integers.astype(np.float32)
    return product


def _q2_k(b: Array) -> Blocks:
    """16 bytes of scale and, above it, minimum; 64 of codes; d; m."""
    n = len(b)
    codes = fields(b[:, 16:80].reshape(n, 2, 32), 2).reshape(n, 256)
    return Blocks(codes, times(b[:, 80:82], b[:, :16] & 15), -times(b[:, 82:84], b[:, :16] >> 4))


def _q3_k(b: Array) -> Blocks:
    """32 bytes of third bits, 64 of the lower two; scales + 32: 8 bytes of low nibbles, 4 of upper two bits; d."""
    n = len(b)
    low = fields(b[:, 32:96].reshape(n, 2, 32), 2).reshape(n, 256)
    third = fields(b[:, :32], 1).reshape(n, 256)
    scales = fields(b[:, 96:104], 4).reshape(n, 16) | fields(b[:, 104:108], 2).reshape(n, 16) << 4
    return Blocks(low | third << 2, times(b[:, 108:110], scales.astype(np.int8) - 32), None)


def _scales_and_minima(b: Array) -> tuple[Array, Array]:
    """Twelve bytes as eight scales and eight minima of 6 bits: the first four of each plainly, the rest in pieces."""
    s, m, rest = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scales = np.concatenate([s & 63, (rest & 15) | (s >> 6 << 4)], axis=-1)
    return scales, np.concatenate([m & 63, (rest >> 4) | (m >> 6 << 4)], axis=-1)


def _q4_k(b: Array) -> Blocks:
    """d; m; 12 bytes of scales and minima; 128 of codes."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    codes = fields(b[:, 16:144].reshape(-1, 4, 32), 4).reshape(len(b), 256)
    return Blocks(codes, times(b[:, :2], scales), -times(b[:, 2:4], minima))


def _q5_k(b: Array) -> Blocks:
    """As Q4_K, with 32 bytes of fifth bits before the codes."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    codes = fields(b[:, 48:176].reshape(-1, 4, 32), 4).reshape(len(b), 256)
    codes |= fields(b[:, 16:48], 1).reshape(len(b), 256) << 4
    return Blocks(codes, times(b[:, :2], scales), -times(b[:, 2:4], minima))


def _q6_k(b: Array) -> Blocks:
    """128 bytes of low nibbles, 64 of upper two bits, 16 signed scales, d."""
    n = len(b)
    low = fields(b[:, :128].reshape(n, 2, 64), 4).reshape(n, 256)
    upper = fields(b[:, 128:192].reshape(n, 2, 32), 2).reshape(n, 256)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8)
    return Blocks(low | upper << 4, times(b[:, 208:210], scales), None)


# Ternary: codes 0, 1, 2 stand for -1, 0, 1.


def _tq1_0(b: Array) -> Blocks:
    """48 bytes with five base-3 digits each, in runs of 32 and 16 bytes; 4 with four digits; d.

    A byte holds ceil(256 n / 243) for the number n of its digits, so that multiplying by 3 brings the first digit out
    above the byte: byte * 3^i, truncated to a byte, begins with digit i.
    """
    digits = []
    for start, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        power = np.array([3**i for i in range(count)], dtype=np.uint8)[:, None]
        shifted = (b[:, None, start:end] * power).astype(np.uint16)
        digits.append((shifted * 3 >> 8).astype(np.uint8).reshape(len(b), -1))
    return Blocks(np.concatenate(digits, axis=-1), half(b[:, 52:54]), zero=1)


def _tq2_0(b: Array) -> Blocks:
    """64 bytes of codes; d."""
    codes = fields(b[:, :64].reshape(-1, 2, 32), 2).reshape(len(b), 256)
    return Blocks(codes, half(b[:, 64:66]), zero=1)


READERS: dict[str, Reader] = {
    "Q4_0": Reader(4, 32, _q4_0),
    "Q4_1": Reader(4, 32, _q4_1),
    "Q5_0": Reader(5, 32, _q5_0),
    "Q5_1": Reader(5, 32, _q5_1),
    "Q8_0": Reader(8, 32, _q8_0),
    "Q2_K": Reader(2, 256, _q2_k),
    "Q3_K": Reader(3, 256, _q3_k),
    "Q4_K": Reader(4, 256, _q4_k),
    "Q5_K": Reader(5, 256, _q5_k),
    "Q6_K": Reader(6, 256, _q6_k),
    "TQ1_0": Reader(2, 256, _tq1_0),
    "TQ2_0": Reader(2, 256, _tq2_0),
}
