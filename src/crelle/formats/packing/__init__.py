"""How codes become bytes: bit-planes for weights, dense bit streams for small side tables. Pure torch.

    planes   codes [..., K] of P bits  ->  uint8 [P, ..., ceil(K/8)]
             plane 0 holds the most significant bit; bit j of byte k is input 8k+j; the padding bits are 0
    stream   codes [..., G] of P bits  ->  uint8 [..., ceil(G*P/8)]
             code i occupies bits i*P ... i*P+P-1 of its row, little end first
    words    the same stream in int32 [..., ceil(G*P/32)], as GPTQ, AWQ and compressed-tensors store it

Plane 0 is the most significant so that the first p planes of a tensor are a coarser version of it.
"""

import torch
from torch import Tensor

# Eight bits in eight bytes are an int64 b_0 + 2^8 b_1 + …, whose product with Σ_j 2^(56-7j) has them in its top byte,
# which no other term reaches. Machines are little-endian, as safetensors is.
_GATHER = sum(1 << (56 - 7 * j) for j in range(8))


def _bytes_of_bits(bits: Tensor) -> Tensor:
    """Pack 0/1 [..., n] into uint8 [..., ceil(n/8)], little end first."""
    n = bits.shape[-1]
    if not bits.numel():
        return bits.new_zeros(*bits.shape[:-1], -(-n // 8), dtype=torch.uint8)
    bits = torch.nn.functional.pad(bits.to(torch.uint8), (0, -n % 8)).contiguous()  # pad copies: aligned for int64
    return (bits.view(torch.int64).mul(_GATHER) >> 56).to(torch.uint8)


def _bits_of_bytes(data: Tensor, n: int) -> Tensor:
    """Unpack uint8 [..., ceil(n/8)] into 0/1 uint8 [..., n]."""
    byte, place = (torch.arange(k, dtype=torch.uint8, device=data.device) for k in (256, 8))
    eight = ((byte[:, None] >> place) & 1).view(torch.int64)[:, 0]
    return eight[data.int()].view(torch.uint8)[..., :n]


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [..., K] (integers below 2**bits) as bit-planes [bits, ..., ceil(K/8)]."""
    return torch.stack([_bytes_of_bits((codes >> (bits - 1 - p)) & 1) for p in range(bits)])


def unpack_planes(planes: Tensor, K: int) -> Tensor:
    """Return the codes uint8 [..., K] of bit-planes [P, ..., ceil(K/8)]."""
    P = planes.shape[0]
    codes = _bits_of_bytes(planes[0], K)
    for p in range(1, P):
        codes = (codes << 1) | _bits_of_bytes(planes[p], K)
    return codes


def unpack_signs(plane: Tensor, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one plane [..., ceil(K/8)] as -1/+1 [..., K]."""
    return _bits_of_bytes(plane, K).to(dtype).mul_(2).sub_(1)


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Return codes [..., G] as a dense little-endian bit stream [..., ceil(G*bits/8)]."""
    if 8 % bits:
        place = torch.arange(bits, dtype=torch.uint8, device=codes.device)
        return _bytes_of_bits(((codes.to(torch.uint8).unsqueeze(-1) >> place) & 1).flatten(-2))
    each = 8 // bits  # codes of a byte: none straddles two
    codes = torch.nn.functional.pad(codes.to(torch.uint8) & ((1 << bits) - 1), (0, -codes.shape[-1] % each))
    codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // each, each)
    out = codes[..., 0].clone()
    for j in range(1, each):
        out |= codes[..., j] << (j * bits)
    return out


def unpack_stream(data: Tensor, bits: int, G: int) -> Tensor:
    """Return the codes uint8 [..., G] of a dense bit stream."""
    if 8 % bits:
        place = torch.arange(bits, dtype=torch.uint8, device=data.device)
        each = _bits_of_bytes(data, G * bits).reshape(*data.shape[:-1], G, bits)
        return (each << place).sum(-1, dtype=torch.uint8)
    place = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> place) & ((1 << bits) - 1)).flatten(-2)[..., :G]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return codes [..., G] as a dense little-endian bit stream in int32 [..., ceil(G*bits/32)]."""
    stream = pack_stream(codes, bits)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 4))
    return stream.reshape(-1).view(torch.int32).reshape(*stream.shape[:-1], -1)


def unpack_words(words: Tensor, bits: int, G: int) -> Tensor:
    """Return the codes uint8 [..., G] of a dense bit stream in int32 words."""
    # Flat first: where a dimension is 1, even a contiguous tensor may have a stride that `view` does not take.
    data = words.reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], -1)
    return unpack_stream(data[..., : -(-G * bits // 8)], bits, G)
