"""How the codes of a mixed 2/4-bit matrix become bytes. Two packings of the same `MixedCodes`.

general   any groups      codes2        2-bit codes, a dense bit stream              uint8 [N, ceil(C2 G / 4)]
                          codes4        4-bit codes                                  uint8 [N, ceil(C4 G / 2)]
                          scale_codes   first-order scales, 4 bits                   uint8 [N, ceil(C2 / 2)]
                          zeros         first-order zeros, 2 bits                    uint8 [N, ceil(C2 / 4)]
                          second_zeros  second-order zeros, 4 bits                   uint8 [B, ceil(C2 / 2)]
aligned   groups of 16,   words         three 2-bit groups and the first half of a   int32 [N, C4, 4]
          C2 = 3 C4                     4-bit group: one load of 16 bytes
                          halves        the other half of the 4-bit group            int32 [N, C4]
                          first         zeros and scales of the three groups:        int16 [N, C4]
                                        z0 z1 z2 (2 bits each), s0 (4), s1 s2 (3 each), from the lowest bit on
                          second_zeros  padded to a byte                             uint8 [B, C2]

The j-th word of the aligned packing holds the 2-bit groups 3j, 3j+1, 3j+2 and the 4-bit group j, counted among their
own kind. To fit zeros and scales into 16 bits, the scale codes of two of the three groups have 3 bits ("scale
clipping"), so a quantizer must ask `scale_widths` before it chooses them.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from crelle.formats.packing import pack_stream, pack_words, unpack_stream, unpack_words

Packing = Literal["general", "aligned"]
PACKINGS: tuple[str, ...] = get_args(Packing)
ALIGNED_GROUP = 16
_ALIGNED_WIDTHS = (4, 3, 3)  # of the scale codes of three neighbouring 2-bit groups


class MixedCodes(NamedTuple):
    """All integer codes of a matrix, one to an element (uint8)."""

    codes2: Tensor  # [N, C2, G]
    codes4: Tensor  # [N, C4, G]
    scale_codes: Tensor  # [N, C2]
    zeros: Tensor  # [N, C2]
    second_zeros: Tensor  # [B, C2]


class Sizes(NamedTuple):
    """What the shapes of the packed tensors follow from: rows, blocks of rows, groups of each kind, group size."""

    N: int
    B: int
    C2: int
    C4: int
    G: int


def can_be_aligned(group: int, two: int, four: int) -> bool:
    """Whether the aligned packing takes so many 2-bit and 4-bit groups."""
    return group == ALIGNED_GROUP and four > 0 and two == 3 * four


def scale_widths(packing: Packing, two: int) -> list[int]:
    """Return the bits of the scale code of each 2-bit group."""
    return [_ALIGNED_WIDTHS[c % 3] if packing == "aligned" else 4 for c in range(two)]


def packed_shapes(packing: Packing, s: Sizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each packed tensor."""
    if packing == "aligned":
        return {
            "words": ((s.N, s.C4, 4), torch.int32),
            "halves": ((s.N, s.C4), torch.int32),
            "first": ((s.N, s.C4), torch.int16),
            "second_zeros": ((s.B, s.C2), torch.uint8),
        }
    return {
        "codes2": ((s.N, -(-s.C2 * s.G // 4)), torch.uint8),
        "codes4": ((s.N, -(-s.C4 * s.G // 2)), torch.uint8),
        "scale_codes": ((s.N, -(-s.C2 // 2)), torch.uint8),
        "zeros": ((s.N, -(-s.C2 // 4)), torch.uint8),
        "second_zeros": ((s.B, -(-s.C2 // 2)), torch.uint8),
    }


def pack(packing: Packing, codes: MixedCodes) -> dict[str, Tensor]:
    """Return the packed tensors."""
    if packing == "general":
        return {
            "codes2": pack_stream(codes.codes2.flatten(1), 2),
            "codes4": pack_stream(codes.codes4.flatten(1), 4),
            "scale_codes": pack_stream(codes.scale_codes, 4),
            "zeros": pack_stream(codes.zeros, 2),
            "second_zeros": pack_stream(codes.second_zeros, 4),
        }
    N, C4, _ = codes.codes4.shape
    three = pack_words(codes.codes2, 2).reshape(N, C4, 3)
    both = pack_words(codes.codes4, 4)  # [N, C4, 2]
    z, s = codes.zeros.reshape(N, C4, 3).int(), codes.scale_codes.reshape(N, C4, 3).int()
    first = z[..., 0] | z[..., 1] << 2 | z[..., 2] << 4 | s[..., 0] << 6 | s[..., 1] << 10 | s[..., 2] << 13
    return {
        "words": torch.cat([three, both[..., :1]], -1).contiguous(),
        "halves": both[..., 1].contiguous(),
        "first": torch.where(first > 0x7FFF, first - 0x10000, first).to(torch.int16),
        "second_zeros": codes.second_zeros.contiguous(),
    }


def unpack(packing: Packing, s: Sizes, tensors: Mapping[str, Tensor]) -> MixedCodes:
    """Return the codes that packed tensors hold."""
    if packing == "general":
        return MixedCodes(
            unpack_stream(tensors["codes2"], 2, s.C2 * s.G).reshape(s.N, s.C2, s.G),
            unpack_stream(tensors["codes4"], 4, s.C4 * s.G).reshape(s.N, s.C4, s.G),
            unpack_stream(tensors["scale_codes"], 4, s.C2),
            unpack_stream(tensors["zeros"], 2, s.C2),
            unpack_stream(tensors["second_zeros"], 4, s.C2),
        )
    words, first = tensors["words"], tensors["first"].int()
    codes2 = unpack_words(words[..., :3].reshape(s.N, s.C2, 1), 2, s.G)
    codes4 = unpack_words(torch.stack([words[..., 3], tensors["halves"]], -1), 4, s.G)
    zeros = torch.stack([first >> at & 3 for at in (0, 2, 4)], -1)
    scales = torch.stack([first >> at & mask for at, mask in ((6, 15), (10, 7), (13, 7))], -1)
    return MixedCodes(
        codes2,
        codes4,
        scales.to(torch.uint8).reshape(s.N, s.C2),
        zeros.to(torch.uint8).reshape(s.N, s.C2),
        tensors["second_zeros"],
    )
