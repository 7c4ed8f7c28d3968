"""Launches decode_attention.cu: rope, append and attention of one new token per sequence over 16-bit pages, fused.

    y = attend(qkv, pages, table, position, heads, scale, RopeNormArgs(cos, sin))

For few sequences of moderate length, whose steps are bound by launches; paged_attention.py does the same in two
launches, for every KV format. `table` and `position` lie on the device, so that a captured launch serves every later
token. They are read early, together with the earlier tokens' keys and values: all of that must have been written
before the first kernel of the step began.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.formats.kv.pages import KVPages
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES, BitSerialX, columns
from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions

_ROWS = 16  # positions that a warp takes at a time
_HEADS = 8  # query heads that share a read, at most
_FOREVER = 2**31 - 1  # a window that nothing falls out of
_LONGEST = 16384  # tokens: beyond, more thread blocks should share a sequence than a cluster has


@dataclass(frozen=True, slots=True)
class AttentionTileConfig:
    """Tile config of decode_attention.cu; its template parameters."""

    group: int  # query heads of a thread block
    chunks: int  # such groups of a key/value head
    splits: int  # thread blocks that share the positions
    stages: int  # tiles under way in a warp
    warps: int  # that share the positions of a thread block


def supports(head_size: int, dtype: torch.dtype) -> str | None:
    """Return None, or why heads like these cannot attend here."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"attends in float16 and bfloat16, not in {dtype}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"takes heads of 8, 16, … 256 channels, not of {head_size}"
    return None


def supports_pages(pages: KVPages, dtype: torch.dtype, longest: int) -> str | None:
    """Return None, or why a step over such pages, for sequences of up to `longest` tokens, takes two launches."""
    if pages.format.coded or pages.codes.dtype != dtype:
        return f"attends over pages of {dtype}, not {pages.format}"
    if pages.format.page % _ROWS:
        return f"takes pages of a multiple of {_ROWS} tokens, not of {pages.format.page}"
    if longest > _LONGEST:
        return f"takes sequences of up to {_LONGEST} tokens, not {longest}"
    return supports(pages.head_size, dtype)


def tile_config(
    batch: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    longest: int,
    processors: int | None = None,
    narrow: bool = False,
) -> AttentionTileConfig:
    """Fill a good half of the device: one thread block has enough reads under way, and splits cost time at the end.

    `narrow`: where twice as many splits still fit, they take half the warps each. That leaves room on a multiprocessor
    for the products in planes that overlap with this kernel; beside dense ones it was only measured wide.
    """
    chunks = -(-heads // kv_heads // _HEADS)
    group = -(-heads // kv_heads // chunks)
    warps = 8 if head_size <= 128 else 4
    blocks, most, splits = batch * kv_heads * chunks, processors or multiprocessors(), 1
    while splits < 8 and 2 * splits * blocks <= 0.8 * most and splits * warps * _ROWS < longest:
        splits *= 2
    if narrow and warps == 8 and 1 < splits < 8 and 2 * splits * blocks <= most:
        splits, warps = 2 * splits, 4
    return AttentionTileConfig(group, chunks, splits, min(2, -(-longest // (splits * warps * _ROWS))), warps)


def attend_variant(
    p: AttentionTileConfig,
    head_size: int,
    dtype: torch.dtype,
    cluster: bool = True,
    bitserial: int = 0,
    rotated: int | None = None,
    extra: int = 0,
) -> tuple[str, str]:
    """`cluster`: splits are added in distributed shared memory (sm_90); `bitserial`: DIGITS of decode_attention.cu.

    `rotated`: channels of a head that are (all); `extra`: EXTRAS of extras.cuh (`extras`).
    """
    arguments = f"{head_size}, {p.group}, {p.splits}, {p.stages}, {p.warps}, {str(cluster).lower()}, {bitserial}"
    arguments += f", {rotated or head_size}, {extra}"
    return "attention/decode_attention.cu", f"crelle::decode_attention<{arguments}, {C_TYPES[dtype]}>"


def extras(how: AttendOptions) -> int:
    """Return EXTRAS of extras.cuh: 1 for a soft cap, 2 for sinks."""
    return (how.softcap is not None) + 2 * (how.sinks is not None)


@dataclass(frozen=True, slots=True, eq=False)
class RopeNormArgs:
    """Rope and qk-norm of the heads, and what attention does beside the usual; all optional."""

    cos: Tensor | None = None  # f32 [context, R/2], where the first R channels of heads are rotated
    sin: Tensor | None = None
    options: AttendOptions = ATTEND_ALL
    q_norm: Tensor | None = None  # [D], where heads are normed before they are rotated
    k_norm: Tensor | None = None
    eps: float = 0.0


PLAIN = RopeNormArgs()


def attend(
    qkv: Tensor,
    pages: KVPages,
    table: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    how: RopeNormArgs = PLAIN,
    out: Tensor | None = None,
    config: AttentionTileConfig | None = None,
    cluster: bool | None = None,
) -> Tensor:
    """Store k and v of each sequence at its position; return what its queries see up to there, [B, heads * D].

    qkv [B, (heads + 2 kv_heads) D]; table int32 [B, max_pages]; position int32 [B], -1: padding, whose result is 0.
    """
    y = torch.empty(len(qkv), heads * pages.head_size, dtype=qkv.dtype, device=qkv.device) if out is None else out
    _launch(qkv, pages, table, position, heads, scale, how, (y, None), 0, config, cluster)
    return y


def can_encode(head_size: int, heads: int) -> bool:
    """Whether the epilogue can encode the heads for a GEMV: a head must be half a block."""
    return head_size == 128 and heads % 2 == 0


def attend_encode(
    qkv: Tensor,
    pages: KVPages,
    table: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    how: RopeNormArgs = PLAIN,
    config: AttentionTileConfig | None = None,
    cluster: bool | None = None,
) -> BitSerialX:
    """The same, bit-serial, for weights with groups of at least 128 inputs and no permutation."""
    B = len(qkv)
    made = BitSerialX.empty(B, heads, 1, qkv.device)
    out = made.bits, made.scale
    _launch(qkv, pages, table, position, heads, scale, how, out, columns(B), config, cluster)
    return made


def _launch(
    qkv: Tensor,
    pages: KVPages,
    table: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    how: RopeNormArgs,
    out: tuple[Tensor, Tensor | None],
    bitserial: int,
    config: AttentionTileConfig | None,
    cluster: bool | None,
) -> None:
    B, max_pages = table.shape
    kv_heads, D, page = pages.heads, pages.head_size, pages.format.page
    p = config or tile_config(B, heads, kv_heads, D, max_pages * page, narrow=bitserial > 0)
    together = torch.cuda.get_device_capability(qkv.device) >= (9, 0) if cluster is None else cluster
    parts = semaphores = None
    if p.splits > 1 and not together:
        sets = B * kv_heads * p.chunks
        parts = torch.empty(sets * p.splits * p.group * (D + 2), device=qkv.device)
        semaphores = torch.zeros(sets, dtype=torch.int32, device=qkv.device)
    rotated, options = None if how.cos is None else 2 * how.cos.shape[1], how.options
    kernel = load(*attend_variant(p, D, qkv.dtype, together, bitserial, rotated, extras(options)))
    kernel(
        (p.splits, kv_heads * p.chunks, B),
        32 * p.warps,
        *(qkv, pages.codes, table, position, how.cos, how.sin, how.q_norm, how.k_norm, *out, parts, semaphores),
        *(heads, kv_heads, max_pages, page, options.window or _FOREVER, float(scale), float(how.eps)),
        *(float(options.softcap or 0), options.sinks),
        shared=p.warps * p.stages * 2 * _ROWS * (-(-D // 16) * 16 + 8) * 2,
        pdl=True,
    )
