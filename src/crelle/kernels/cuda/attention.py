"""Launches attention.cu: one new token per sequence is appended to the cache and attends to all before it.

    y = attend(qkv, cache, position, heads, scale, cos, sin)

`position` lies on the device, so that a captured launch serves every later token. It is read early, together with the
earlier tokens' keys and values: they must not be written by a kernel that overlaps with the following ones
(launch.py), other than the ends of a step that tokens.py launches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.kernels.cuda.decode import C_TYPES, Digits, columns
from crelle.kernels.cuda.launch import load, multiprocessors

_ROWS = 16  # positions that a warp takes at a time
_HEADS = 8  # query heads that share a read, at most
_FOREVER = 2**31 - 1  # a window that nothing falls out of


@dataclass(frozen=True, slots=True)
class Plan:
    """How attention.cu cuts the work; its template parameters."""

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
        return f"takes heads of 8, 16, … 256 numbers, not of {head_size}"
    return None


def plan(
    batch: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    capacity: int,
    processors: int | None = None,
    narrow: bool = False,
) -> Plan:
    """Fill a good half of the device: one thread block has enough reads under way, and splits cost time at the end.

    `narrow`: where twice as many splits still fit, they take half the warps each. That leaves room on a multiprocessor
    for the products in planes that overlap with this kernel; beside dense ones it was only measured wide.
    """
    chunks = -(-heads // kv_heads // _HEADS)
    group = -(-heads // kv_heads // chunks)
    warps = 8 if head_size <= 128 else 4
    blocks, most, splits = batch * kv_heads * chunks, processors or multiprocessors(), 1
    while splits < 8 and 2 * splits * blocks <= 0.8 * most and splits * warps * _ROWS < capacity:
        splits *= 2
    if narrow and warps == 8 and 1 < splits < 8 and 2 * splits * blocks <= most:
        splits, warps = 2 * splits, 4
    return Plan(group, chunks, splits, min(2, -(-capacity // (splits * warps * _ROWS))), warps)


def attend_variant(
    p: Plan, head_size: int, dtype: torch.dtype, cluster: bool = True, digits: int = 0
) -> tuple[str, str]:
    """`cluster`: the splits meet in shared memory, which needs sm_90; `digits`: see attention.cu."""
    numbers = f"{head_size}, {p.group}, {p.splits}, {p.stages}, {p.warps}, {str(cluster).lower()}, {digits}"
    return "attention.cu", f"crelle::attend<{numbers}, {C_TYPES[dtype]}>"


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """How heads are made of a product's output, where a model says more than their number."""

    cos: Tensor | None = None  # f32 [context, D/2], where heads are rotated
    sin: Tensor | None = None
    window: int | None = None  # how many positions a token sees, its own among them
    q_norm: Tensor | None = None  # [D], where heads are normed before they are rotated
    k_norm: Tensor | None = None
    eps: float = 0.0


PLAIN = Heads()


def attend(
    qkv: Tensor,
    cache: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    how: Heads = PLAIN,
    out: Tensor | None = None,
    cut: Plan | None = None,
    cluster: bool | None = None,
) -> Tensor:
    """Store k and v of each sequence at its position; return what its queries see up to there, [B, heads * D].

    qkv [B, (heads + 2 kv_heads) D]; cache [2, B, kv_heads, capacity, D]; position i32 [B].
    """
    y = torch.empty(len(qkv), heads * cache.shape[-1], dtype=qkv.dtype, device=qkv.device) if out is None else out
    _launch(qkv, cache, position, heads, scale, how, (y, None), 0, cut, cluster)
    return y


def makes_digits(head_size: int, heads: int) -> bool:
    """Whether what heads see can leave as digits: a head is half a block then."""
    return head_size == 128 and heads % 2 == 0


def attend_digits(
    qkv: Tensor,
    cache: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    how: Heads = PLAIN,
    cut: Plan | None = None,
    cluster: bool | None = None,
) -> Digits:
    """The same, as digits for weights with groups of at least 128 inputs in their own order."""
    B = len(qkv)
    made = Digits.empty(B, heads, 1, qkv.device)
    _launch(qkv, cache, position, heads, scale, how, (made.bits, made.scale), columns(B), cut, cluster)
    return made


def _launch(
    qkv: Tensor,
    cache: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    how: Heads,
    out: tuple[Tensor, Tensor | None],
    digits: int,
    cut: Plan | None,
    cluster: bool | None,
) -> None:
    _, B, kv_heads, capacity, D = cache.shape
    p = cut or plan(B, heads, kv_heads, D, capacity, narrow=digits > 0)
    together = torch.cuda.get_device_capability(qkv.device) >= (9, 0) if cluster is None else cluster
    parts = arrived = None
    if p.splits > 1 and not together:
        sets = B * kv_heads * p.chunks
        parts = torch.empty(sets * p.splits * p.group * (D + 2), device=qkv.device)
        arrived = torch.zeros(sets, dtype=torch.int32, device=qkv.device)
    kernel = load(*attend_variant(p, D, qkv.dtype, together, digits))
    kernel(
        (p.splits, kv_heads * p.chunks, B),
        32 * p.warps,
        qkv,
        cache,
        position,
        how.cos,
        how.sin,
        how.q_norm,
        how.k_norm,
        *out,
        parts,
        arrived,
        heads,
        kv_heads,
        capacity,
        how.window or _FOREVER,
        float(scale),
        float(how.eps),
        shared=p.warps * p.stages * 2 * _ROWS * (-(-D // 16) * 16 + 8) * 2,
        overlap=True,
    )
