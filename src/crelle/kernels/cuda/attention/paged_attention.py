"""Launches paged_append.cu and paged_attention.cu: new tokens into pages, and one token's attention over them.

    q = append(k, v, pages, table, position, q=q, cos=cos, sin=sin, center=center)     # q rotated, for `attend`
    y = attend(q, pages, table, lengths, rotated=True)
    k, v = read(pages, table, starts, total)                                           # for prompts' attention

`kernels/reference_attention.py` says what both compute. Here `table`, `position`, `starts` and `lengths` lie on the
device as int32 and are not read by the host, so a captured launch serves every later step. A sequence at position -1,
or of length 0, is padding: nothing is stored, and its result is 0. That fills a batch up to the size a graph was
captured for.

`attend` reads `table`, `lengths` and all tokens but the last ones before the kernel ahead of it in the stream is done:
that one may be `append`, but must not write any of those.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.kv.pages import KVCode, KVFormat, KVPages
from crelle.kernels.cuda.attention.decode_attention import extras
from crelle.kernels.cuda.launch import load, most_shared_memory, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES, BitSerialX, columns
from crelle.kernels.cuda.planes.weight_layout import CudaWeight
from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions

_TOKENS = 16  # that a tensor instruction takes
MOST_SPLITS = 128  # in paged_attention.cu
_HOPPER_SHARED = 227 * 1024  # bytes that a thread block can have
_STATIC_SHARED = 2048  # of which `attend` has so many, or fewer, at a fixed place
_HEADS = 8  # query heads that share a read, at most
_READ_HEADS = 4  # of a token that a thread of paged_read reads; as in paged_append.cu
_APPEND_THREADS = 256
_FOREVER = 2**31 - 1  # a window that nothing falls out of
_SIZES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PagedTileConfig:
    """Tile config of paged_attention.cu: its template parameters, and how many thread blocks share a sequence."""

    group: int  # query heads of a thread block
    chunks: int  # such groups of a key head
    splits: int  # thread blocks that share the tokens
    tiles: int  # of 16 tokens that a warp takes at a time
    stages: int  # such pieces under way in a warp
    warps: int  # of a thread block
    occupancy: int  # warps a multiprocessor should hold, which bounds their registers


def supports(fmt: KVFormat, head_size: int, dtype: torch.dtype, values: torch.dtype | None = None) -> str | None:
    """Return None, or why these kernels cannot do it; `values`: the type of 16-bit pages, where it is not `dtype`."""
    rest = head_size, dtype, values
    if dtype not in _SIZES or (not fmt.coded and (values or dtype) not in _SIZES):
        return f"attends in float16 and bfloat16, not in {dtype if dtype not in _SIZES else values}"
    if fmt.overrides:
        every = [own for _, own in fmt.overrides] + [fmt.layers(fmt.overrides[-1][0] + 2)[-1]]
        return next((reason for own in every if (reason := supports(own, *rest))), None)
    if fmt.key.coded != fmt.value.coded:
        return f"takes keys and values that are both codes or both of 16 bits, not {fmt}"
    if head_size % 16 or not 16 <= head_size <= 256:
        return f"takes heads of 16, 32, … 256 channels, not of {head_size}"
    if min(fmt.bits, fmt.v_bits) < 4 and head_size % 64:
        return f"takes codes of 3 and 2 bits in heads of 64, 128, … channels, not of {head_size}"
    if fmt.bits != fmt.v_bits and fmt.page != _TOKENS:
        return f"takes keys and values that differ in bits in pages of {_TOKENS} tokens, not of {fmt.page}"
    if fmt.page % _TOKENS:
        return f"takes pages of a multiple of {_TOKENS} tokens, not of {fmt.page}"
    if not most_heads(fmt, head_size):
        return f"takes groups of which 16 bytes of codes meet at most 8, not {fmt} in heads of {head_size}"
    return None


def most_heads(fmt: KVFormat, head_size: int) -> int:
    """Return how many query heads may share a read: 8, 4, 2, 1, or 0 where none can (`Columns` in kv_fragments.cuh)."""
    if not fmt.coded:
        return _HEADS
    return min(_most_heads(code, head_size) for code in (fmt.key, fmt.value))


def _most_heads(code: KVCode, head_size: int) -> int:
    wide, group = 64 if code.bits == 3 else 128 // code.bits, head_size // code.groups(head_size)
    for heads in (8, 4, 2, 1):
        together = group * _HEADS // heads  # channels whose columns lie together
        ends = ((u, min(u + wide, head_size) - 1) for u in range(0, head_size, wide))
        if all(first // together == last // together for first, last in ends):
            return heads
    return 0


def tile_config(
    fmt: KVFormat, batch: int, heads: int, kv_heads: int, head_size: int, longest: int, processors: int | None = None
) -> PagedTileConfig:
    """Return what was fastest on an H200; sequences of up to `longest` tokens are split until the device is busy."""
    chunks = -(-heads // kv_heads // most_heads(fmt, head_size))
    group = -(-heads // kv_heads // chunks)
    blocks, devices = batch * kv_heads * chunks, processors or multiprocessors()
    few = min(fmt.bits, fmt.v_bits) <= 4 and blocks >= 7 * devices  # there are blocks enough: fewer parts to add
    tiles, warps = (2 if fmt.coded else 1), (2 if few or head_size > 128 else 4)
    stages = 3 if min(fmt.bits, fmt.v_bits) <= 4 and group == 1 else 2 if fmt.coded or head_size > 64 else 4
    piece, splits = warps * tiles * _TOKENS, 1
    while splits < 8 and 2 * splits * piece <= longest:
        # until each multiprocessor has two thread blocks, or eight of those that have thousands of tokens each
        if splits * blocks > devices and (splits * blocks > 4 * devices or longest < 8192 * splits):
            break
        splits *= 2
    light = group <= 4 and group * fmt.key.groups(head_size) <= 16 and head_size <= 128
    occupancy = 16 if min(fmt.bits, fmt.v_bits) <= 4 and light else 12
    config = PagedTileConfig(group, chunks, splits, tiles, stages, warps, occupancy)
    if blocks >= devices:
        return config
    room = (most_shared_memory() if processors is None else _HOPPER_SHARED) - _STATIC_SHARED
    # Few sequences: all blocks run at one time, since a second wave would be short; in blocks of eight warps, since the
    # parts of warps are added sooner than those of blocks. Long sequences are read in larger pieces.
    for warps, stages in ((8, 2 if fmt.coded else 3), (8, 2), (4, 2)):
        fits = min(8 // warps * devices // blocks, longest // (warps * tiles * _TOKENS), MOST_SPLITS)
        splits = max(1, fits)
        more = 2 if min(fmt.bits, fmt.v_bits) <= 4 and longest >= 1024 * splits * warps else 1
        config = PagedTileConfig(group, chunks, splits, more * tiles, stages, warps, occupancy=8)
        if splits * blocks >= 0.9 * devices and shared_bytes(config, fmt, head_size) <= room:
            return config
    return replace(config, tiles=tiles)


def shared_bytes(p: PagedTileConfig, fmt: KVFormat, head_size: int) -> int:
    """Return what a thread block of `attend` needs (`TileOfPages::BYTES` in kv_fragments.cuh)."""
    codes = fmt.key, fmt.value
    tile = sum(256 * -(-code.row_bytes(head_size) // 16) + 32 * code.groups(head_size) for code in codes)
    return p.warps * p.stages * p.tiles * -(-tile // 128) * 128


def attend_variant(
    p: PagedTileConfig,
    fmt: KVFormat,
    head_size: int,
    values: torch.dtype,
    dtype: torch.dtype,
    bitserial: int = 0,
    extra: int = 0,
) -> tuple[str, str]:
    """`values`: the type of 16-bit pages, f16 for codes; `dtype`: that of the result; `bitserial`: DIGITS.

    `extra`: EXTRAS of extras.cuh (decode_attention.extras).
    """
    arguments = f"{_form(fmt, head_size)}, {p.group}, {p.tiles}, {p.stages}, {p.warps}, {p.occupancy}"
    types = f"{str(fmt.rotate).lower()}, {bitserial}, {extra}, {C_TYPES[values]}, {C_TYPES[dtype]}"
    return "attention/paged_attention.cu", f"crelle::paged_attend<{arguments}, {types}>"


def append_variant(
    fmt: KVFormat, head_size: int, dtype: torch.dtype, values: torch.dtype, rotated: int | None = None
) -> tuple[str, str]:
    """`dtype`: that of q, k and v; `values`: the type of 16-bit pages, f16 for codes; `rotated`: channels (all)."""
    rotated = rotated or head_size
    alike = _lanes(fmt, head_size, rotated) == 8
    form = f"{head_size}, {fmt.bits}, {fmt.key.groups(head_size)}" if alike else _form(fmt, head_size)
    name, arguments = f"paged_append{'_8lane' if alike else ''}", f"{form}, {str(fmt.rotate).lower()}"
    arguments += "" if alike else f", {rotated}"
    return "attention/paged_append.cu", f"crelle::{name}<{arguments}, {C_TYPES[dtype]}, {C_TYPES[values]}>"


def _lanes(fmt: KVFormat, head_size: int, rotated: int) -> int:
    """Return how many lanes have a head in `append`: 8 where it is a power of two and groups are whole lanes'."""
    alike = fmt.bits == fmt.v_bits >= 4 and rotated == head_size
    power = head_size >= 64 and head_size & (head_size - 1) == 0
    return 8 if alike and power and fmt.key.groups(head_size) <= 16 else 32


def _form(fmt: KVFormat, head_size: int) -> str:
    """Return the template arguments that say how keys and values are stored."""
    k, v = fmt.key, fmt.value
    return f"{head_size}, {k.bits}, {k.groups(head_size)}, {v.bits}, {v.groups(head_size)}"


def read_variant(fmt: KVFormat, head_size: int, values: torch.dtype) -> tuple[str, str]:
    """`values`: the type of 16-bit pages, f16 for codes; also that of the result."""
    return "attention/paged_append.cu", f"crelle::paged_read<{_form(fmt, head_size)}, {C_TYPES[values]}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles: each head size, number of bits, number of heads that share a read, and type."""
    half, brain = torch.float16, torch.bfloat16
    formats = [KVFormat.parse(f) for f in ("kv16", "kv8", "kv4", "kv4:group=64", "kv4:group=16,rotate=false")]
    for i, size in enumerate((48, 64, 80, 96, 128)):
        for j, fmt in enumerate(formats if size in (80, 128) else formats[:3]):
            dtype = (half, brain)[(i + j) % 2]
            values = half if fmt.coded else dtype
            yield append_variant(fmt, size, dtype, values)
            yield read_variant(fmt, size, values)
            for heads in (1, 2, 4, 7) if size == 128 and j < 3 else ((1, 3, 2, 8)[(i + j) % 4],):
                yield attend_variant(tile_config(fmt, 16, heads, 1, size, 1024, 132), fmt, size, values, dtype)
            for heads, digits in ((1, 1), (4, 2), (4, 4)) if size == 128 and j < 3 else ():
                yield attend_variant(tile_config(fmt, 2, heads, 1, size, 1024, 132), fmt, size, values, dtype, digits)
    for i, size in enumerate((64, 128)):
        for j, fmt in enumerate(map(KVFormat.parse, ("kv3", "kv2", "k4v2", "k8v4", "k3v2:group=64", "k8v3"))):
            dtype, heads = (half, brain)[(i + j) % 2], (1, 2, 4, 8)[(i + j) % 4]
            yield append_variant(fmt, size, dtype, half)
            yield read_variant(fmt, size, half)
            yield attend_variant(tile_config(fmt, 16, heads, 1, size, 1024, 132), fmt, size, half, dtype)
    for i, (size, rotated) in enumerate(((64, 16), (96, 24), (128, 64), (256, 64))):  # what not all families have
        for j, fmt in enumerate(formats[:3]):
            dtype, heads = (half, brain)[(i + j) % 2], (1, 2, 4, 8)[(i + j) % 4]
            values = half if fmt.coded else dtype
            yield append_variant(fmt, size, dtype, values, rotated)
            config = tile_config(fmt, 16, heads, 1, size, 1024, 132)
            yield attend_variant(config, fmt, size, values, dtype, 0, 1 + (i + j) % 3)


def append(
    k: Tensor | None,
    v: Tensor | None,
    pages: KVPages,
    table: Tensor | None,
    position: Tensor | None,
    *,
    starts: Tensor | None = None,
    center: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor | None:
    """Store k and v [N, Hkv, D] behind the `position` tokens that each sequence has; return q for `attend`.

    q [N, H, D] may be absent, or be all there is (k and v None). Heads lie together; tokens may be apart, so that q, k
    and v can be views of one qkv. q and k are normed where there are weights [D], then their first R channels rotated
    where there are cos and sin, f32 [context, R/2]. `center` f32 [Hkv, D]; `starts` int32 [B + 1], absent: N/B
    tokens for each sequence.
    """
    fmt, D = pages.format, pages.head_size
    some = k if k is not None else q
    assert some is not None, "give k and v, or q, or all"
    assert (k is None) == (v is None), "give k and v, or q, or all"
    N, stored = some.shape[0], 0 if k is None else pages.heads
    values = _values(pages)
    if reason := supports(fmt, D, some.dtype, values):
        raise UnsupportedError(f"paged_append.cu {reason}")
    rotated = None
    if q is not None:
        rotated = torch.empty(N, q.shape[1], D, dtype=values, device=q.device) if out is None else out
    heads = 0 if q is None else q.shape[1]
    B, R = 1 if table is None else table.shape[0], D if cos is None else 2 * cos.shape[1]
    if N == 0:
        return rotated
    load(*append_variant(fmt, D, some.dtype, values, R))(
        (N, -(-(heads + 2 * stored) * _lanes(fmt, D, R) // _APPEND_THREADS), 1),
        _APPEND_THREADS,
        *(q, k, v),
        *(_apart(x, D) for x in (q, k, v)),
        *(position, starts, table, cos, sin, q_norm, k_norm, center, rotated, pages.codes, pages.words),
        *(B, 0 if table is None else table.shape[1], pages.count, fmt.page, 0 if cos is None else cos.shape[0]),
        *(heads, pages.heads, stored, float(eps)),
        pdl=True,
    )
    return rotated


def attend(
    q: Tensor,
    pages: KVPages,
    table: Tensor,
    lengths: Tensor,
    *,
    how: AttendOptions = ATTEND_ALL,
    scale: float | None = None,
    rotated: bool = False,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: PagedTileConfig | None = None,
    semaphores: Tensor | None = None,
    packed_for: CudaWeight | None = None,
    pdl: bool = True,
) -> Tensor:
    """Return softmax(q K^T * scale) V [B, H, D] for q [B, H, D], one token of each sequence, the last of its `lengths`.

    `rotated`: q is what `append` returned; then `dtype` is that of the result, the pages' values' (f16 for codes)
    unless told. `config` fixes the order of sums; otherwise it depends on the batch's size and the table's width.
    `semaphores`: int32 zeros [B * Hkv * chunks] or more that stay zeros, to be shared by the launches of one stream.
    `packed_for`: the result is [2 H, B, 64], packed as gemm.py packs x for this weight; for D = 128, an even H and B a
    multiple of 8.
    `pdl`: table, lengths and all tokens but the last of each sequence were there before the kernel ahead began.
    """
    B, H, D = q.shape
    result = dtype or q.dtype
    assert packed_for is None or (D == 128 and H % 2 == 0 and B % 8 == 0), "nothing would fill the rest of the blocks"
    shape = (B, H, D) if packed_for is None else (2 * H, B, 64)
    if not rotated:
        prepared = append(None, None, pages, None, None, q=q)
        assert prepared is not None
        q = prepared
    y = torch.empty(shape, dtype=result, device=q.device) if out is None else out
    packed = (0, False) if packed_for is None else (B, packed_for.stride16)
    _attend(q, pages, table, lengths, how, scale, result, (y, None), config, semaphores, packed, 0, pdl)
    return y


def attend_encode(
    q: Tensor,
    pages: KVPages,
    table: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    *,
    how: AttendOptions = ATTEND_ALL,
    scale: float | None = None,
    config: PagedTileConfig | None = None,
    semaphores: Tensor | None = None,
    pdl: bool = True,
) -> BitSerialX:
    """The same for what `append` returned: rounded to `dtype`, then bit-serial (decode_attention.can_encode)."""
    B, H, _ = q.shape
    made = BitSerialX.empty(B, H, 1, q.device)
    out = made.bits, made.scale
    _attend(q, pages, table, lengths, how, scale, dtype, out, config, semaphores, (0, False), columns(B), pdl)
    return made


def _attend(
    q: Tensor,
    pages: KVPages,
    table: Tensor,
    lengths: Tensor,
    how: AttendOptions,
    scale: float | None,
    result: torch.dtype,
    out: tuple[Tensor, Tensor | None],
    config: PagedTileConfig | None,
    semaphores: Tensor | None,
    packed: tuple[int, bool],
    bitserial: int,
    pdl: bool,
) -> None:
    B, H, D = q.shape
    fmt, values = pages.format, _values(pages)
    if reason := supports(fmt, D, result, values):
        raise UnsupportedError(f"paged_attention.cu {reason}")
    if B == 0:
        return
    p = config or tile_config(fmt, B, H, pages.heads, D, table.shape[1] * fmt.page)
    sets = B * pages.heads * p.chunks
    parts = None
    if p.splits > 1:
        parts = torch.empty(sets * p.splits * p.group * (D + 2), device=q.device)
        if semaphores is None:
            semaphores = torch.zeros(sets, dtype=torch.int32, device=q.device)
    load(*attend_variant(p, fmt, D, values, result, bitserial, extras(how)))(
        (p.splits, pages.heads * p.chunks, B),
        32 * p.warps,
        *(q, pages.codes, pages.words, table, lengths, *out, parts, semaphores),
        *(table.shape[1], H, pages.heads, fmt.page, how.window or _FOREVER, *packed),
        *(float(D**-0.5 if scale is None else scale), float(how.softcap or 0), how.sinks),
        shared=shared_bytes(p, fmt, D),
        pdl=pdl,
    )


def read(pages: KVPages, table: Tensor, starts: Tensor, total: int) -> Tensor:
    """Return keys and values [2, total, Hkv, D] of some sequences' first tokens, dequantized as they are stored.

    `table` int32 [B, max_pages]; `starts` int32 [B + 1]: where those of each sequence begin, then their number, which
    is at most `total`.
    """
    fmt, D, values = pages.format, pages.head_size, _values(pages)
    if reason := supports(fmt, D, values):
        raise UnsupportedError(f"paged_append.cu {reason}")
    out = torch.empty(2, total, pages.heads, D, dtype=values, device=pages.codes.device)
    if total == 0:
        return out
    load(*read_variant(fmt, D, values))(
        (-(-total * D // (8 * 256)), -(-pages.heads // _READ_HEADS), 2),
        256,
        *(pages.codes, pages.words, table, starts, out, *table.shape, fmt.page, pages.heads, total),
        pdl=True,
    )
    return out


def _values(pages: KVPages) -> torch.dtype:
    return torch.float16 if pages.format.coded else pages.codes.dtype


def _apart(x: Tensor | None, head_size: int) -> int:
    """Return the stride between tokens, whose heads are contiguous."""
    if x is None:
        return 0
    assert x.stride()[1:] == (head_size, 1), "heads of a token must lie together"
    return x.stride(0)
