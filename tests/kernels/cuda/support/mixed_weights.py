"""Random mixed 2/4-bit weights for the tests of the CUDA kernels, and the way back from their layout."""

import torch
from torch import Tensor

from crelle.formats.mixed import MixedTensor
from crelle.formats.packing.mixed import MixedCodes, Packing, can_be_aligned, scale_widths
from crelle.kernels.cuda.mixed.mixed_layout import ROWS, UNIT2, UNIT4, MixedWeight, unit2_bytes

FORMS = [  # N, K, group, share of 4-bit groups, share of outliers
    (64, 1024, 16, 0.25, 0.002),
    (48, 4096, 16, 0.25, 0.0),
    (17, 256, 16, 0.0, 0.01),
    (40, 512, 16, 1.0, 0.0),
    (33, 1000, 16, 0.25, 0.015),
    (100, 333, 16, 0.4, 0.01),
    (7, 48, 16, 0.25, 0.05),
    (31, 696, 8, 0.25, 0.01),
    (64, 1111, 8, 0.1, 0.0),
    (50, 2080, 32, 0.25, 0.01),
    (20, 970, 64, 0.5, 0.01),
    (5, 5, 8, 0.0, 0.1),
    (1, 9, 8, 1.0, 0.0),
]


def random_mixed(
    N: int, K: int, G: int, four: float, outliers: float, device: str = "cpu", block: int = 16, seed: int = 0
) -> MixedTensor:
    """A matrix [N, K] with all codes, zeros and second-order zeros, and outliers in some 2-bit groups."""
    random = torch.Generator(device).manual_seed(seed)

    def integers(top: int, *shape: int) -> Tensor:
        return torch.randint(top, shape, generator=random, device=device, dtype=torch.uint8)

    C = -(-K // G)
    C4 = round(four * C)
    mask = torch.zeros(C, dtype=torch.uint8, device=device)
    mask[torch.randperm(C, generator=random, device=device)[:C4]] = 1
    C2, B = C - C4, -(-N // block)
    packing: Packing = "aligned" if can_be_aligned(G, C2, C4) else "general"
    widths = torch.tensor(scale_widths(packing, C2), device=device, dtype=torch.uint8)
    scale_codes = integers(16, N, C2) >> (4 - widths)
    second_zeros = integers(16, B, C2)
    codes = MixedCodes(integers(4, N, C2, G), integers(16, N, C4, G), scale_codes, integers(4, N, C2), second_zeros)
    second = (torch.rand(B, C2, generator=random, device=device) * 0.01 + 0.001).half()
    row = None
    if C4:
        row = (torch.rand(N, generator=random, device=device) * 0.05 + 0.01).half(), integers(16, N)
    sparse = None
    if outliers:
        allowed = (1 - mask).repeat_interleave(G)[:K].bool()
        chosen = (torch.rand(N, K, generator=random, device=device) < outliers) & allowed
        sparse = torch.randn(N, K, generator=random, device=device) * chosen
    return MixedTensor.from_codes((N, K), mask, codes, second, row, sparse, packing, block)


def values_in(w: MixedWeight) -> Tensor:
    """Read the values f64 [N, K] back out of the layout, by its description alone."""
    tiles, subs = w.tiles.shape[0], w.subs
    size = unit2_bytes(subs)
    two = w.tiles[:, : w.U2 * size].reshape(tiles, w.U2, size)
    places = torch.zeros(tiles * ROWS, w.places, dtype=torch.float64)
    pair, high = torch.arange(UNIT2) // 2 % 8, torch.arange(UNIT2) % 2
    span, sub = torch.arange(UNIT2) // 16, pair // (8 // subs)  # 16 inputs: set, t
    for g in range(8):
        for t in range(4):
            lane = 4 * g + t
            at = (span % 4 == t).nonzero()[:, 0]  # places of this lane
            s = span[at] // 4
            codes = two[..., :1024].reshape(tiles, w.U2, 2, 32, 16)[:, :, :, lane].contiguous().view(torch.int32)
            scales = two[..., 1024:][..., : 128 * subs].contiguous().view(torch.int32).view(tiles, w.U2, 32, subs)
            zeros = two[..., 1024 + 128 * subs :][..., : 64 * subs].contiguous().view(torch.int16)
            zeros = zeros.view(tiles, w.U2, 32, subs).int()
            second = two[..., 1024 + 192 * subs :][..., : 32 * subs].contiguous().view(torch.float16)
            second = second.view(tiles, w.U2, 4, subs, 4)
            offset = two[..., 1024 + 224 * subs :].contiguous().view(tiles, w.U2, 4, subs, 4)
            for r in range(2):
                word = codes[:, :, s // 2, 2 * r + s % 2]  # [tiles, U2, places]
                q = word >> (2 * pair[at] + 16 * high[at]) & 3
                code = scales[:, :, lane][:, :, sub[at]] >> (16 * r + 4 * s) & 15
                zero = zeros[:, :, lane][:, :, sub[at]] >> (8 * r + 2 * s) & 3
                scale = second[:, :, t, sub[at], s].double() * (code + offset[:, :, t, sub[at], s].double())
                columns = (torch.arange(w.U2)[:, None] * UNIT2 + at).flatten()
                value = scale * (q - (zero + 1) / 2)
                places.view(tiles, 2, 8, -1)[:, r, g, columns] = value.flatten(1).double()
    four = w.tiles[:, w.U2 * size :].contiguous().view(torch.int32).view(tiles, w.U4, 2, 8, 4, 4)  # r, g, t, word
    pair, high = torch.arange(8) // 2, torch.arange(8) % 2
    q = four[..., None] >> (4 * pair + 16 * high) & 15
    q = q.permute(0, 2, 3, 1, 4, 5, 6).reshape(tiles * ROWS, w.U4 * UNIT4).double()
    scale, zero = w.rows.double().unbind(1)
    places[:, w.U2 * UNIT2 :] = scale[:, None] * (q - zero[:, None])
    if w.outliers is not None and w.outlier_rows is not None and w.starts is not None:
        where, undo = _outlier_places(w)
        for tile in range(tiles):
            mine = slice(int(w.starts[tile]), int(w.starts[tile + 1]))
            place, bits = where[w.outliers[mine] & 0xFFFF], (w.outliers[mine] >> 16).to(torch.int16)
            value = bits.view(torch.float16).double() * undo[place] * 2.0**w.outlier_exponent
            assert bool((w.outlier_rows[mine] // ROWS == (tile + w.tile_base) % 16).all())
            row = (tile * ROWS + w.outlier_rows[mine].long() % ROWS)[:, None].expand_as(place)
            places.index_put_((row.flatten(), place.flatten().long()), value.flatten(), accumulate=True)
    out = torch.full((w.N, w.K), torch.nan, dtype=torch.float64)
    inside = w.perm >= 0
    out[:, w.perm[inside].long()] = places[: w.N, inside]
    return out


def _outlier_places(w: MixedWeight) -> tuple[Tensor, Tensor]:
    """Return the place that the low half of an outlier means, and what its value is multiplied by there."""
    place = torch.arange(w.places)
    pair, odd, two = place // 2 % 8, place % 2, place < UNIT2 * w.U2
    input2, input4 = pair + 8 * odd, pair // 4 * 8 + pair % 4 + 4 * odd  # of 16, as the span's digits are made
    byte = torch.where(two, input2 % 4 * 4 + input2 // 4, input4 // 8 * 8 + input4 % 2 * 4 + input4 % 8 // 2)
    where = torch.zeros(w.places + 16, dtype=torch.int64)
    where[place // 16 * 16 + byte] = place
    return where, torch.where(two & (input2 % 2 == 1), 0.25, 1.0).double()
