"""Every kernel that CI compiles for every architecture: each template with each value of its parameters at least once.

All combinations would be tens of thousands; a kernel that compiles for each value of each parameter has not yet been
seen to fail for a combination of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import get_args

import torch

from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.kernels.cuda import attention, decode, dense, dozens, layout, lut, paged, rows, tiles, tokens
from crelle.kernels.cuda.layout import CudaWeight, Kind

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
K = 2048
GROUPS = (32, 64, 128, 256)  # 8, 4, 2 and 1 in a block
_OPS = get_args(decode.Op)

Variant = tuple[str, str]  # file, expression


def variants(arch: str) -> list[Variant]:
    """Return (file, expression) of all of them for an architecture, e.g. sm_90a, in order."""
    capability = int(arch[3]), int(arch[4])
    return sorted(
        {
            *_decode(capability),
            *_tiles(capability),
            *_dozens(capability),
            *_lut(),
            *_small(),
            *paged.variants(),
            *rows.variants(),
        }
    )


def _weight(kind: Kind, P: int, group: int = 128, scales: torch.dtype = HALF) -> QuantTensor:
    """A matrix of zeros, for its form."""
    C = K // group
    planes = torch.zeros(P, 16, K // 8, dtype=torch.uint8)
    scale = torch.zeros(16, C, dtype=scales)
    if kind is Kind.AFFINE:
        return AffineTensor(planes, K, group, scale, scale)
    if kind is Kind.UNIFORM or kind is Kind.UNIFORM_SYMMETRIC:
        zero = torch.zeros(16, -(-C * P // 8), dtype=torch.uint8)
        return UniformTensor(planes, K, group, scale, zero if kind is Kind.UNIFORM else None)
    return BCQTensor(planes, K, group, torch.zeros(P, 16, C, dtype=scales), scale if kind is Kind.BCQ else None)


def _forms() -> Iterator[tuple[QuantTensor, torch.dtype]]:
    """Weights of all kinds, plane counts, groups and types of scales, each with a type of x."""
    for i, kind in enumerate(Kind):
        for P in range(1, 9):
            yield _weight(kind, P, GROUPS[(i + P) % 4]), HALF
    for scales in (BF16, F32):
        yield _weight(Kind.BCQ, 3, scales=scales), BF16
        yield _weight(Kind.AFFINE, 2, scales=scales), HALF


def _decode(capability: tuple[int, int]) -> Iterator[Variant]:
    for i, (w, dtype) in enumerate(_forms()):
        laid = layout.lay_out(w)
        tall, count = replace(laid, N=(4096, 49152)[i % 2]), (1, 2, 4)[i % 3]
        yield decode.decode_variant(tall, count, decode.choose(tall, count, processors=132), dtype)
    gives = decode.GIVES if capability >= (9, 0) else ("NUMBERS",)  # digits leave a cluster
    for P, kind, count, cut, give in decode.measured_cuts():
        divided = give in ("GATED", "POSITIVE")  # they come behind a norm
        if give in gives:
            yield decode.decode_variant(layout.lay_out(_weight(kind, P)), count, cut, HALF, give, divided)
    for i, give in enumerate(gives):
        for P in (2, 3, 4):
            laid = replace(layout.lay_out(_weight(Kind.BCQ, P)), N=(4096, 22016)[i % 2])
            count, dtype = (1, 1, 2, 4)[(i + P) % 4], (HALF, BF16)[P % 2]
            cut = decode.choose(laid, count, processors=132, chained=True, give=give)
            for divided in (False, True):
                yield decode.decode_variant(laid, count, cut, dtype, give, divided)
    for op in _OPS:
        for parts, count, dtype in ((1, 1, HALF), (2, 2, BF16), (4, 4, HALF)):
            yield decode.encode_variant(op, parts, count, dtype)


def _tiles(capability: tuple[int, int]) -> Iterator[Variant]:
    for i, (w, dtype) in enumerate(islice(_forms(), 1, None, 2)):
        laid: CudaWeight = replace(layout.lay_out(w), N=4096)
        count = (33, 72, 144, 256, 1024)[i % 5] if capability == (9, 0) else (8, 16, 64, 256, 1024)[i % 5]
        old = capability != (9, 0)
        shape = tiles._choose_old(laid, count, 99 * 1024) if old else tiles.choose(laid, count, dtype, 132, (9, 0))
        yield tiles.product_variant(laid, shape, dtype)
    for dtype in (HALF, BF16):
        yield tiles.arrange_variant(dtype)


def _dozens(capability: tuple[int, int]) -> Iterator[Variant]:
    for dtype in (HALF, BF16):
        yield dozens.gather_variant(dtype)
    if capability < (9, 0):
        return  # not there: its queues need the bulk copies of Hopper, and tiles.cu does the work
    for i, (w, dtype) in enumerate(islice(_forms(), 0, None, 3)):
        laid: CudaWeight = replace(layout.lay_out(w), N=(4096, 8192, 11008)[i % 3])
        yield dozens.variant(laid, dozens.choose(laid, (8, 16, 24, 32)[i % 4], 132), dtype)


def _lut() -> Iterator[Variant]:
    for i, (w, dtype) in enumerate(islice(_forms(), 0, None, 2)):
        laid = lut.lay_out(w)
        count, variant = (1, 2, 4)[i % 3], lut.VARIANTS[i % 2]
        yield lut.lut_variant(laid, count, variant, lut.choose(laid, count, variant, 132, 220 * 1024), dtype)


def _small() -> Iterator[Variant]:
    for size in (64, 80, 96, 128, 256):
        for heads, kv_heads in ((32, 32), (32, 8)):
            for cluster in (True, False):
                plan = attention.plan(1, heads, kv_heads, size, 2048, processors=132)
                yield attention.attend_variant(plan, size, HALF if cluster else BF16, cluster)
                narrow = attention.plan(1, heads, kv_heads, size, 2048, processors=132, narrow=True)
                for digits in (1, 2, 4) if size == 128 else ():
                    yield attention.attend_variant(narrow, size, HALF, cluster, digits)
    for op in _OPS:
        for count in range(1, 5):
            yield dense.product_variant(op, count, K, HALF if count % 2 else BF16, F32 if count > 2 else HALF)
    for dtype in (HALF, BF16):
        yield tokens.embed_variant(dtype)
        yield tokens.greedy_variant(dtype)
    yield tokens.greedy_variant(F32)
