"""Blocks of GGUF's codebook and 4-bit float types taken apart into codes and scales, without loss.

A weight of these types is a scale times an entry of a codebook, and all entries are small integers (times a constant
that goes into the scale). So each type is a subset of a uniform grid, which holds it exactly at the cost of more bits:

    type                entries                          grid                     scale                  stored bits
    MXFP4               0 ±1 ±2 ±3 ±4 ±6 ±8 ±12          5 bits, groups of 32     2^(e-128)              6
    NVFP4               the same                         5 bits, groups of 16     E4M3 / 2               7
    IQ4_NL              -127 ... 113                     8 bits, groups of 32     d                      8.5
    IQ4_XS              -127 ... 113                     8 bits, groups of 32     d s                    9
    IQ3_S               ±1 ±3 ... ±15                    5 bits, groups of 32     d (2s + 1)             6
    IQ3_XXS             ±4 ±12 ... ±62                   7 bits, groups of 32     d (s + 1/2) / 2        8
    IQ2_XXS             ±8 ±25 ±43                       7 bits, groups of 32     d (s + 1/2) / 4        8
    IQ2_XS IQ2_S        ±8 ±25 ±43                       7 bits, groups of 16     d (s + 1/2) / 4        9
    IQ1_S               8 (-1, 0 or 1) ± 1               5 bits, groups of 32     d (2s + 1) / 8         6
    IQ1_M               8 (-1, 0 or 1) ± 1               5 bits, groups of 16     d (2s + 1) / 8         7

Only the scales are read here; the entries are what the `gguf` package decodes, divided by the scale. Every product has
at most 24 significant bits, so the division gives the integer up to rounding, and the grid gives the package's values
to the last bit. (Scales of subnormal size, which only a damaged file has, may round.)
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from crelle.formats.importers.gguf_blocks import Array, Blocks, Reader, fields, half, times


def _entries(kind: str, bits: int, scales: Callable[[Array], Array], b: Array) -> Blocks:
    """Return codes q with w = scale (q - 2^(bits-1)); where the scale is 0 or not finite, the entry is 0."""
    import gguf

    values = gguf.quants.dequantize(b, gguf.GGMLQuantizationType[kind])
    scale = scales(b)
    half_range = float(1 << (bits - 1))
    entries: Array = values.reshape(*scale.shape, -1) / scale[..., None].astype(np.float32)
    np.nan_to_num(entries, copy=False, nan=0.0, posinf=half_range, neginf=-half_range)
    codes = np.clip(np.rint(entries) + half_range, 0, 2 * half_range - 1)
    return Blocks(codes.astype(np.uint8).reshape(len(b), -1), scale)


def _mxfp4(b: Array) -> Array:
    """e, a power of two; 16 bytes of codes."""
    return np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)


def _nvfp4(b: Array) -> Array:
    """Four scales of 4 bits exponent and 3 bits mantissa (0x7f: NaN, read as 0); 32 bytes of codes."""
    x = b[:, :4].astype(np.int32) & 0x7F
    exponent, mantissa = x >> 3, x & 7
    value = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    zero = (b[:, :4] == 0) | (b[:, :4] == 0x7F)
    return np.where(zero, 0.0, value / 2).astype(np.float32)  # half: the entries above are those of E2M1 doubled


def _iq4_nl(b: Array) -> Array:
    """d; 16 bytes of codes."""
    return half(b[:, :2])


def _iq4_xs(b: Array) -> Array:
    """d; 2 bytes with the upper two bits of eight scales + 32; 4 bytes of low nibbles; 128 of codes."""
    upper = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = fields(b[:, 4:8], 4).swapaxes(1, 2).reshape(len(b), 8)
    return times(b[:, :2], (low | upper.astype(np.uint8) << 4).astype(np.int8) - 32)


def _nibbles(data: Array) -> Array:
    """Scales of 4 bits, the two of a byte side by side."""
    return fields(data, 4).swapaxes(1, 2).reshape(len(data), -1).astype(np.float32)


def _top_nibbles(data: Array) -> Array:
    """Scales of 4 bits at the top of 32-bit words."""
    return (np.ascontiguousarray(data).view("<u4") >> 28).astype(np.float32)


def _iq3_s(b: Array) -> Array:
    """d; 64 + 8 bytes of indices; 32 of signs; 4 of scales."""
    return times(b[:, :2], 2 * _nibbles(b[:, 106:110]) + 1)


def _iq3_xxs(b: Array) -> Array:
    """d; 64 bytes of indices; 8 words with signs and a scale."""
    return times(b[:, :2], (_top_nibbles(b[:, 66:98]) + 0.5) / 2)


def _iq2_xxs(b: Array) -> Array:
    """d; 8 times a word of indices and a word with signs and a scale."""
    return times(b[:, :2], (_top_nibbles(b[:, 2:66])[:, 1::2] + 0.5) / 4)


def _iq2_xs(b: Array) -> Array:
    """d; 64 bytes of indices and signs; 8 of scales."""
    return times(b[:, :2], (_nibbles(b[:, 66:74]) + 0.5) / 4)


def _iq2_s(b: Array) -> Array:
    """d; 32 bytes of indices, 32 of signs, 8 of upper bits of the indices, 8 of scales."""
    return times(b[:, :2], (_nibbles(b[:, 74:82]) + 0.5) / 4)


def _iq1_s(b: Array) -> Array:
    """d; 32 bytes of indices; 8 words of 16 bits with a scale in bits 12 to 14."""
    s = np.ascontiguousarray(b[:, 34:50]).view("<u2") >> 12 & 7
    return times(b[:, :2], (2 * s.astype(np.float32) + 1) / 8)


def _iq1_m(b: Array) -> Array:
    """32 bytes of indices; 16 of upper bits; 4 words of 16 bits with four scales each, and on top a nibble of d."""
    words = np.ascontiguousarray(b[:, 48:56]).view("<u2")
    nibbles = words >> 12 << np.array([0, 4, 8, 12], dtype=np.uint16)
    d = np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).astype("<u2").view(np.uint8)
    s = words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7
    return times(d, (2 * s.reshape(len(b), 16).astype(np.float32) + 1) / 8)


_SCALES: dict[str, tuple[int, int, Callable[[Array], Array]]] = {  # bits of the grid, weights in a block
    "MXFP4": (5, 32, _mxfp4),
    "NVFP4": (5, 64, _nvfp4),
    "IQ4_NL": (8, 32, _iq4_nl),
    "IQ4_XS": (8, 256, _iq4_xs),
    "IQ3_S": (5, 256, _iq3_s),
    "IQ3_XXS": (7, 256, _iq3_xxs),
    "IQ2_XXS": (7, 256, _iq2_xxs),
    "IQ2_XS": (7, 256, _iq2_xs),
    "IQ2_S": (7, 256, _iq2_s),
    "IQ1_S": (5, 256, _iq1_s),
    "IQ1_M": (5, 256, _iq1_m),
}
READERS = {kind: Reader(bits, size, partial(_entries, kind, bits, f)) for kind, (bits, size, f) in _SCALES.items()}
