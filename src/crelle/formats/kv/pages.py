"""Keys and values of past tokens: pages of 16, 8, 4, 3 or 2 bits, written once, token by token.

A value of a head is x = scale * (code - zero), with one scale and one zero for each token, head and group of channels.
Keys and values have bits of their own, and so may single layers (`KVFormat`).

    stored key     H (k - c)    k after rope; H: the rotation below; c: the centre of the layer's keys
    stored value   H v

Neither H nor c is undone when pages are read, and neither costs a bit:

    H  is orthogonal and symmetric: (H q)·(H k) = q·k, and the attention's sum over H v is rotated back at its end.
       It is the Hadamard matrix (+-1/sqrt) of the greatest power of two that divides D, for each run of so many
       channels (D = 64: one of 64; D = 80: five of 16). Keys have a few channels many times larger than the rest,
       which would set the scale for all: rotated, every channel has a share of each.
    c  a vector for each key head of a layer. It takes q·c from the scores of all tokens alike; softmax does not see it.
       Keys of slow rope frequencies lie around a mean far from 0; what is left without it is a fraction to code.

Layout of one layer (the only place it is defined; docs/notes/kv.md draws it). Token t of a sequence lies in the page
that its table names at t // page, at place t % page. Key is 0, value is 1; Hkv heads of D channels; C groups of D/C.

    16 bits     values  f16, bf16 or f32   [pages, 2, Hkv, page, D]      not rotated, not centred
    2, 3, 4, 8  codes   uint8              [pages, 2, Hkv, page, row]    channel i at bit i*bits, little end first;
                                           3 bits: a plane of the codes' low two bits, then a plane of the third
                words   int16              [pages, 2, Hkv, page, C]      scale and zero of a group in 16 bits:

    4 bits      eeeeemmmmmzzzzzz    zero = z/4      quarters of a step, so that the grid fits both ends of the range
    3, 2 bits   the same            zero = z/8, z/16
    8 bits      eeeeemmmzzzzzzzz    zero = z        whole steps
                scale: the f16 with exponent e and mantissa m, the rest 0, that is ((word >> 1) & 0x7fe0), for 8 bits
                ((word >> 1) & 0x7f80), as f16. It is the least such one >= (max - min) / (2^bits - 1) in f16, where
                the range [min, max] of the group is widened to hold 0; but for the last bit |x - stored| <= scale / 2.
                3 and 2 bits span 29/32 and 3/4 of the range (`CLIP`): the outermost values are clipped.
                A group of zeros has scale 0. What is not finite makes its group's scale, and so its values, NaN.

Where keys and values differ in bits, a page's codes are one run of bytes, [pages, bytes]: all keys, then, from the next
multiple of 16 bytes on, all values, each as above without the axis of 2; where they differ in C, so are its words (no
multiples there).

Bits per value, everything counted: bits + 16 C / D. C is the greatest divisor of D with groups of at least `group`
channels and an even number of them: D = 64 or 128 with group 32: 4.5 bits, 3.56 times the tokens of f16; with groups of
64: 4.25 (3.76 times). 8 bits in groups of 64: 8.25. `k4v2`: 3.5 (4.57 times).
Sources: Atom (arXiv 2310.19102), QuaRot (2404.00456) for H, SageAttention (2410.02367) for c, KIVI (2402.02750) and
KVQuant (2401.18079) for keys and values apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.formats.kv.codes import dequantize, quantize, scale_zero
from crelle.formats.kv.format import KVCode, KVFormat, PageLayout
from crelle.formats.wrappers.hadamard import block_size as hadamard_block_size
from crelle.formats.wrappers.hadamard import hadamard_blocks

__all__ = [
    "KVCode",
    "KVFormat",
    "KVPages",
    "as_stored",
    "dequantize",
    "hadamard",
    "hadamard_block_size",
    "quantize",
    "scale_zero",
]


@dataclass(frozen=True, slots=True, eq=False)
class KVPages:
    """The pages of one layer; the module's docstring has their layout. 16 bits: `codes` holds the values."""

    format: KVFormat
    head_size: int
    heads: int
    dtype: torch.dtype  # of values of 16 bits
    codes: Tensor  # [pages, 2, Hkv, page, row], or uint8 [pages, bytes] where keys and values differ in bits
    words: Tensor | None = None  # [pages, 2, Hkv, page, C], or [pages, words] where they differ in groups

    @classmethod
    def new(
        cls, fmt: KVFormat, pages: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVPages":
        """Return pages of zeros; `dtype` is that of a 16-bit format's values."""
        assert not fmt.overrides, "pages are of one layer"
        fmt.check(head_size)
        at = PageLayout.of(fmt, heads, head_size, dtype.itemsize)
        shape = (pages, 2, heads, fmt.page)
        if fmt.bits != fmt.v_bits:
            codes = torch.zeros(pages, at.bytes, dtype=torch.uint8, device=device)
        elif fmt.bits == 16:
            codes = torch.zeros(*shape, head_size, dtype=dtype, device=device)
        else:
            codes = torch.zeros(*shape, at.rows[0], dtype=torch.uint8, device=device)
        words = None
        if at.words:
            alike = at.groups[0] == at.groups[1]
            words = torch.zeros(
                *((*shape, at.groups[0]) if alike else (pages, at.words)), dtype=torch.int16, device=device
            )
        return cls(fmt, head_size, heads, dtype, codes, words)

    @property
    def count(self) -> int:
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return what is stored, each with the pages first: to copy page a to b, copy t[a] to t[b] of each."""
        return [self.codes] if self.words is None else [self.codes, self.words]

    def codes_of(self, kind: int) -> Tensor:
        """Return codes or values of keys (0) or values (1), [pages, Hkv, page, row]: a view."""
        if self.codes.ndim == 5:
            return self.codes[:, kind]
        at, coded = self.layout, self.format.code(kind).coded
        rows = self.heads * self.format.page * at.rows[kind]
        begin = kind * at.values_at
        flat = self.codes[:, begin : begin + rows]
        flat = flat if coded else flat.view(self.dtype)
        return flat.view(len(flat), self.heads, self.format.page, flat.shape[1] // (self.heads * self.format.page))

    def words_of(self, kind: int) -> Tensor:
        """Return packed scales of keys (0) or values (1), [pages, Hkv, page, C]: a view."""
        assert self.words is not None
        if self.words.ndim == 5:
            return self.words[:, kind]
        tokens, groups = self.heads * self.format.page, self.layout.groups
        begin = kind * tokens * groups[0]
        flat = self.words[:, begin : begin + tokens * groups[kind]]
        return flat.view(len(flat), self.heads, self.format.page, groups[kind])

    @property
    def layout(self) -> PageLayout:
        return PageLayout.of(self.format, self.heads, self.head_size, self.dtype.itemsize)

    def grown(self, more: int) -> "KVPages":
        """Return these pages and `more` of zeros behind them, in new memory."""
        grown = [torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in self.tensors()]
        return KVPages(self.format, self.head_size, self.heads, self.dtype, *grown)

    def write(self, kind: int, which: Tensor, place: Tensor, x: Tensor) -> None:
        """Store x [N, Hkv, D], rotated and centred, at `place` [N] of pages `which` [N]."""
        code, codes = self.format.code(kind), self.codes_of(kind)
        if not code.coded:
            codes[which, :, place] = x.to(codes.dtype)
            return
        codes[which, :, place], self.words_of(kind)[which, :, place] = quantize(
            x, code.bits, code.groups(self.head_size)
        )

    def read(self, which: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [2, Hkv, n*page, D] in pages `which` [n], rotated and centred as they are stored."""
        return torch.stack([self.read_kind(kind, which, dtype) for kind in (0, 1)])

    def read_kind(self, kind: int, which: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return keys (0) or values (1) [Hkv, n*page, D] in pages `which` [n]."""
        code = self.format.code(kind)
        codes = self.codes_of(kind)[which].movedim(0, 1).flatten(1, 2)  # [Hkv, n*page, row]
        if not code.coded:
            return codes.to(dtype)
        words = self.words_of(kind)[which].movedim(0, 1).flatten(1, 2)
        return dequantize(codes, words, code.bits, dtype, self.head_size)


def hadamard(x: Tensor, code: KVCode | KVFormat) -> Tensor:
    """Return H x in f32 for x [..., D], or x where keys or values of that kind are not rotated."""
    return hadamard_blocks(x) if code.rotate else x.float()


def as_stored(x: Tensor, code: KVCode, center: Tensor | None = None) -> Tensor:
    """Return keys or values [..., Hkv, D] as a cache would give them back; straight-through gradient."""
    if not code.coded:
        return x
    with torch.no_grad():
        middle = 0.0 if center is None else center
        D = x.shape[-1]
        codes, words = quantize(hadamard(x.float() - middle, code), code.bits, code.groups(D))
        seen = hadamard(dequantize(codes, words, code.bits, head_size=D), code) + middle
    return x + (seen.to(x.dtype) - x).detach()
