"""The outliers of a mixed 2/4-bit weight as mixed_gemm.cu reads them: those of 16 rows and 256 inputs together.

block_outliers  int32 [pieces, 4]   for each block of each tile its count, then that many words, padded to 16 bytes:
                                    f16 value in the high half; in the low one the chunk of 64 inputs at bits 11 and
                                    12, below the byte where the value stands among the chunk's operands of all lanes,
                                    [step][lane 4g + t][pair, row half][input of the pair]
block_starts    int32 [tiles * blocks + 1]   pieces before each block

Which input stands where: x_layout.cuh. Nothing here needs a GPU.
"""

import torch
from torch import Tensor

BLOCK, ROWS = 256, 16


def by_block(rows: Tensor, places: Tensor, values: Tensor, U2: int, tiles: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return both for outliers of given rows, places of x in the weight's order, and values f16."""
    key = rows // ROWS * blocks + places // BLOCK
    order = torch.sort(key, stable=True).indices
    counts = torch.bincount(key, minlength=tiles * blocks)
    pieces = (counts + 4) // 4  # with the count itself
    starts = torch.nn.functional.pad(pieces.cumsum(0), (1, 0))
    out = torch.zeros(int(starts[-1]), 4, dtype=torch.int32, device=rows.device)
    flat, key = out.view(-1), key[order]
    flat[4 * starts[:-1]] = counts.to(torch.int32)
    slot = torch.arange(len(key), device=rows.device) - (counts.cumsum(0) - counts)[key]
    word = values.view(torch.int16).to(torch.int32) << 16 | operand_place(rows, places, U2).to(torch.int32)
    flat[4 * starts[key] + 1 + slot] = word[order]
    return out, starts.to(torch.int32)


def operand_place(rows: Tensor, places: Tensor, U2: int) -> Tensor:
    """Return the low half of the words: where weights stand among the operands of their block."""
    two, inside = places < U2 * BLOCK, places % BLOCK
    chunk = torch.where(two, inside // 64, inside // 128 * 2 + inside % 32 // 16)
    t = torch.where(two, inside // 16 % 4, inside // 32 % 4)
    step, pair, second = inside % 16 // 4, inside // 2 % 2, inside % 2  # of a lane's 16 inputs
    lane, half = rows % 8 * 4 + t, rows % ROWS // 8
    return chunk << 11 | ((step * 32 + lane) * 4 + 2 * pair + half) * 4 + 2 * second
