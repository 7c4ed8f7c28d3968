"""Keys and values of past tokens: pages of 16, 8 or 4 bits, written once, token by token.

A value of a head is x = scale * (code - zero), with one scale and one zero for each token, head and group of channels.

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

    16 bits   values  f16, bf16 or f32   [pages, 2, Hkv, page, D]          not rotated, not centred
    8, 4      codes   uint8              [pages, 2, Hkv, page, D*bits/8]   channel i at bit i*bits, little end first
              words   int16              [pages, 2, Hkv, page, C]          scale and zero of a group in 16 bits:

    4 bits    eeeeemmmmmzzzzzz    zero = z/4      quarters of a step, so that the grid fits both ends of the range
    8 bits    eeeeemmmzzzzzzzz    zero = z        whole steps
              scale: the f16 with exponent e and mantissa m, the rest 0, that is ((word >> 1) & 0x7fe0) for 4 bits and
              ((word >> 1) & 0x7f80) for 8, as f16. It is the least such one >= (max - min) / (2^bits - 1) in f16, where
              the range [min, max] of the group is widened to hold 0; but for f16's last bit |x - stored| <= scale / 2.
              A group of zeros has scale 0. What is not finite makes its group's scale, and so its values, NaN.

Bits per value, everything counted: bits + 16 C / D. C is the greatest divisor of D with groups of at least `group`
channels and an even number of them: D = 64 or 128 with group 32: 4.5 bits, 3.56 times the tokens of f16; with groups of
64: 4.25 (3.76 times). 8 bits in groups of 64: 8.25.
Sources: Atom (arXiv 2310.19102), QuaRot (2404.00456) for H, SageAttention (2410.02367) for c.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from crelle.errors import SchemeError

GROUPS = {4: 32, 8: 64, 16: 0}  # default group by bits
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a cache stores keys and values. Round-trips with a short string: kv16, kv8, kv4, kv4:group=64,center=false.

    What buys accuracy, and its price:
        group    channels that share scale and zero: 16/group bits per value
        rotate   spreads large channels over all (H above): no bits; D log2 D sums for each head of q, k, v and result
        center   takes the mean from keys (c above): no bits; the model has to run over 256 tokens once to find it
        page     tokens of a page: no bits; smaller wastes less of each sequence's last page
    """

    bits: int = 16
    group: int = 0  # 0: what GROUPS has for these bits
    rotate: bool = True
    center: bool = True
    page: int = 16

    def __post_init__(self) -> None:
        if self.bits not in GROUPS:
            raise SchemeError(f"a KV cache has 16, 8 or 4 bits, not {self.bits}")
        if self.bits == 16:  # values as they are
            usual = {"group": 0, "rotate": False, "center": False}
        else:
            usual = {"group": self.group or GROUPS[self.bits]}
        for name, value in usual.items():
            object.__setattr__(self, name, value)
        if self.coded and self.group < 8:
            raise SchemeError(f"a group of a KV cache has at least 8 channels, got {self.group}")
        if self.page < 1:
            raise SchemeError(f"a page holds at least one token, got {self.page}")

    @classmethod
    def parse(cls, text: "str | int | KVFormat") -> "KVFormat":
        """Read 4, kv4, kv=4 or kv4:group=64,center=false; a format stays as it is."""
        if isinstance(text, cls):
            return text
        name, _, rest = str(text).strip().partition(":")
        bits = name.removeprefix("kv").removeprefix("=")
        if bits not in map(str, GROUPS):
            raise SchemeError(f"a KV cache is one of 16, 8 or 4 (or kv4:group=64,center=false …), not '{text}'")
        settings: dict[str, int | bool] = {}
        kinds = {f.name: f.type for f in fields(cls) if f.name != "bits"}
        for item in filter(None, rest.split(",")):
            key, eq, value = (part.strip() for part in item.partition("="))
            if key not in kinds or not eq:
                raise SchemeError(f"in '{text}', '{item}' should be one of {', '.join(f'{k}=…' for k in kinds)}")
            if key in settings:
                raise SchemeError(f"in '{text}', {key} is given twice")
            flag = kinds[key] is bool
            if value not in _FLAGS if flag else not value.isdecimal():
                raise SchemeError(f"in '{text}', {key} must be {'true or false' if flag else 'a whole number'}")
            settings[key] = _FLAGS[value] if flag else int(value)
        if bits == "16" and settings.keys() - {"page"}:
            raise SchemeError(f"'{text}': 16 bits are stored as they are; only page can be set")
        return replace(cls(int(bits)), **settings)  # type: ignore[arg-type]

    def __str__(self) -> str:
        plain = KVFormat(self.bits)
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        other = [f"{k}={str(v).lower()}" for k, v in said.items() if v != getattr(plain, k)]
        return f"kv{self.bits}" + (f":{','.join(other)}" if other else "")

    @property
    def coded(self) -> bool:
        """Whether pages hold codes, not floats."""
        return self.bits < 16

    def groups(self, head_size: int) -> int:
        """Return C: the most equal groups of a head with at least `group` channels each, an even number."""
        if not self.coded:
            return 0
        return next(
            (c for c in range(head_size // self.group, 0, -1) if head_size % c == 0 and head_size // c % 2 == 0), 1
        )

    def bits_per_value(self, head_size: int, element_size: int = 2) -> float:
        """Return what a value costs, scales and zeros counted; `element_size`: bytes of a 16-bit format's dtype."""
        return self.bits + 16 * self.groups(head_size) / head_size if self.coded else 8.0 * element_size

    def page_bytes(self, heads: int, head_size: int, element_size: int = 2) -> int:
        """Return the bytes of one page of one layer, keys and values."""
        row = head_size * self.bits // 8 + 2 * self.groups(head_size) if self.coded else head_size * element_size
        return 2 * heads * self.page * row

    def check(self, head_size: int) -> None:
        """Refuse a head that cannot be stored."""
        if self.coded and head_size % 2:
            raise SchemeError(f"{self} packs channels in pairs; a head of {head_size} has an odd one")


@dataclass(frozen=True, slots=True, eq=False)
class KVPages:
    """The pages of one layer; the module's docstring has their layout. 16 bits: `codes` holds the values."""

    format: KVFormat
    head_size: int
    codes: Tensor  # [pages, 2, Hkv, page, row]
    words: Tensor | None = None  # [pages, 2, Hkv, page, C]

    @classmethod
    def new(
        cls, fmt: KVFormat, pages: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVPages":
        """Return pages of zeros; `dtype` is that of a 16-bit format's values."""
        fmt.check(head_size)
        shape = (pages, 2, heads, fmt.page)
        if not fmt.coded:
            return cls(fmt, head_size, torch.zeros(*shape, head_size, dtype=dtype, device=device))
        codes = torch.zeros(*shape, head_size * fmt.bits // 8, dtype=torch.uint8, device=device)
        return cls(fmt, head_size, codes, torch.zeros(*shape, fmt.groups(head_size), dtype=torch.int16, device=device))

    @property
    def count(self) -> int:
        return self.codes.shape[0]

    @property
    def heads(self) -> int:
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return what is stored, each with the pages first: to copy page a to b, copy t[a] to t[b] of each."""
        return [self.codes] if self.words is None else [self.codes, self.words]

    def grown(self, more: int) -> "KVPages":
        """Return these pages and `more` of zeros behind them, in new memory."""
        grown = [torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in self.tensors()]
        return KVPages(self.format, self.head_size, *grown)

    def read(self, which: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [2, Hkv, n*page, D] in pages `which` [n], rotated and centred as they are stored."""
        codes = self.codes[which].movedim(0, 2).flatten(2, 3)  # [2, Hkv, n*page, row]
        if self.words is None:
            return codes.to(dtype)
        return dequantize(codes, self.words[which].movedim(0, 2).flatten(2, 3), self.format.bits, dtype)


def quantize(x: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [..., D*bits/8] and packed scales int16 [..., C] (`words`) for x [..., D]."""
    steps, zero_bits = 2**bits - 1, _zero_bits(bits)
    x = _grouped(x.float(), groups)  # [..., C, D/C]
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
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
    packed = codes.to(torch.uint8).flatten(-2)
    return (packed if bits == 8 else packed[..., 0::2] | packed[..., 1::2] << 4), word


def dequantize(codes: Tensor, words: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [..., D] of codes [..., D*bits/8] and packed scales [..., C], computed in f32."""
    scale, zero = scale_zero(words, bits)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)  # [..., D]
    x = _grouped(codes.float(), words.shape[-1])  # [..., C, D/C]
    return ((x - zero[..., None]) * scale[..., None]).flatten(-2).to(dtype)


def scale_zero(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scale and zero f32 of packed scales int16."""
    zero_bits, word = _zero_bits(bits), words.int() & 0xFFFF
    scale = ((word >> zero_bits) << (zero_bits - 1)).to(torch.int16).view(torch.float16).float()
    zero = (word & ((1 << zero_bits) - 1)).float() / (1 << (zero_bits - bits))
    return scale, zero


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _zero_bits(bits: int) -> int:
    return {4: 6, 8: 8}[bits]


def hadamard(x: Tensor, fmt: KVFormat) -> Tensor:
    """Return H x in f32 for x [..., D], or x where the format does not rotate; it is its own inverse.

    By sums and differences at distance 1, 2, 4 …, then 1/sqrt: the same bits for a row wherever it is computed.
    """
    x = x.float()
    if not fmt.rotate:
        return x
    shape, block = x.shape, hadamard_block_size(x.shape[-1])
    for step in (1 << i for i in range(block.bit_length() - 1)):
        a, b = x.reshape(*shape[:-1], shape[-1] // (2 * step), 2, step).unbind(-2)  # [..., D/2/step, step]
        x = torch.stack([a + b, a - b], -2).reshape(shape)
    return x * (1 / math.sqrt(block))


def hadamard_block_size(head_size: int) -> int:
    """Return how many channels a block of H has: the greatest power of two that divides D."""
    return head_size & -head_size
