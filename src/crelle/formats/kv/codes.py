"""Codes of a head of keys or values: 2, 3, 4 or 8 bits, a packed scale and zero per group; see crelle.formats.kv.pages.

Every other writer (kernels/cpu/csrc/attention/kv_pages.cpp, kernels/cuda/attention/kv_fragments.cuh) computes the same
roundings in the same order: the same bits everywhere.
"""

import torch
from torch import Tensor

ZERO_BITS = {2: 6, 3: 6, 4: 6, 8: 8}  # of a packed scale, by bits of a code
# The part of a group's range that codes span. 4 levels over all of it are too far apart: what lies near 0 pays for the
# two outermost values. Rotated channels are close to normal, so one factor does for all groups (docs/notes/kv.md).
CLIP = {2: 0.75, 3: 0.90625, 4: 1.0, 8: 1.0}


def row_bytes(bits: int, head_size: int) -> int:
    """Return the bytes of the codes of a head: 3 bits are a plane of the low two and a plane of the third."""
    if bits == 3:
        return -(-head_size // 4) + -(-head_size // 8)
    return -(-head_size * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [..., D] as bytes [..., row_bytes]."""
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat([_pack(codes & 3, 2), _pack(codes >> 2, 1)], -1)
    return _pack(codes, bits)


def unpack_codes(packed: Tensor, bits: int, head_size: int) -> Tensor:
    """Return codes uint8 [..., D] of bytes [..., row_bytes]."""
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed.split([-(-head_size // 4), -(-head_size // 8)], -1)  # type: ignore[no-untyped-call]
        return _unpack(low, 2, head_size) | _unpack(high, 1, head_size) << 2
    return _unpack(packed, bits, head_size)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Channel i at bit i*bits, little end first."""
    per = 8 // bits
    if missing := -codes.shape[-1] % per:
        codes = torch.nn.functional.pad(codes, (0, missing))
    packed = codes[..., 0::per].clone()
    for i in range(1, per):
        packed |= codes[..., i::per] << (i * bits)
    return packed


def _unpack(packed: Tensor, bits: int, head_size: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.stack([packed >> i & mask for i in range(0, 8, bits)], -1).flatten(-2)[..., :head_size]


def quantize(x: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [..., row_bytes] and packed scales int16 [..., C] (`words`) for x [..., D]."""
    steps, zero_bits = 2**bits - 1, ZERO_BITS[bits]
    x = _grouped(x.float(), groups)  # [..., C, D/C]
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    if CLIP[bits] != 1:
        low, high = low * CLIP[bits], high * CLIP[bits]
    # Up to the next f16 with the kept mantissa: adding to the bits of a positive float carries into its exponent.
    half = ((high - low) / steps).half().view(torch.int16).int()
    kept = zero_bits - 1  # bits of the f16 below the mantissa's kept part
    half = ((half + (1 << kept) - 1) >> kept << kept).clamp(max=0x7FFF & -(1 << kept))
    scale = half.to(torch.int16).view(torch.float16).float()
    safe = torch.where(scale > 0, scale, 1.0)  # also where it is NaN
    fine = 1 << (zero_bits - bits)  # parts of a step in which zero is told
    z = (-low / safe * fine).nan_to_num(0).round_().clamp_(0, (1 << zero_bits) - 1)
    codes = (x / safe[..., None] + (z / fine)[..., None]).nan_to_num(0).round_().clamp_(0, steps)
    half = torch.where((half < 0x7C00) & (half >= 0), half, 0x7E00)  # infinity times a rounded sum could be either sign
    word = (half << 1) | z.int()
    word = torch.where(word > 0x7FFF, word - 0x10000, word).to(torch.int16)
    return pack_codes(codes.to(torch.uint8).flatten(-2), bits), word


def dequantize(
    codes: Tensor, words: Tensor, bits: int, dtype: torch.dtype = torch.float32, head_size: int | None = None
) -> Tensor:
    """Return the values [..., D] of codes [..., row_bytes] and packed scales [..., C], computed in f32.

    head_size: D where a row's last byte is not full.
    """
    D = head_size or (codes.shape[-1] // 3 * 8 if bits == 3 else codes.shape[-1] * 8 // bits)
    scale, zero = scale_zero(words, bits)
    x = _grouped(unpack_codes(codes, bits, D).float(), words.shape[-1])  # [..., C, D/C]
    return ((x - zero[..., None]) * scale[..., None]).flatten(-2).to(dtype)


def scale_zero(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scale and zero f32 of packed scales int16."""
    zero_bits, word = ZERO_BITS[bits], words.int() & 0xFFFF
    scale = ((word >> zero_bits) << (zero_bits - 1)).to(torch.int16).view(torch.float16).float()
    zero = (word & ((1 << zero_bits) - 1)).float() / (1 << (zero_bits - bits))
    return scale, zero


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
