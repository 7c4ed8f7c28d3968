"""Every kernel that CI compiles for every architecture: each template with each value of its parameters at least once.

All combinations would be tens of thousands; a kernel that compiles for each value of each parameter has not yet been
seen to fail for a combination of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import get_args

import torch

from crelle.formats.activations import ActivationSpec
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor, format_of
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.trellis import BITS, CODES, TrellisTensor
from crelle.kernels.cuda.attention import decode_attention, paged_attention
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.experts import fp4_products, products, streaming
from crelle.kernels.cuda.fp4 import fp4_gemm, fp4_gemv
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight
from crelle.kernels.cuda.integer import integer_encode, integer_gemm, integer_layout
from crelle.kernels.cuda.lut import lut
from crelle.kernels.cuda.mixed import mixed_config, mixed_decode, mixed_gemm, mixed_gemv
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight
from crelle.kernels.cuda.planes import bmma_gemv, gemm, skinny_gemm, weight_layout
from crelle.kernels.cuda.planes.weight_layout import CudaWeight, ScaleKind
from crelle.kernels.cuda.solver import group_solver, mixed_solver, nested_sweep, sweep, viterbi
from crelle.kernels.cuda.step import embed_argmax, residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.training import kl_divergence, straight_through
from crelle.kernels.cuda.trellis import trellis_gemv, trellis_layout

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
K = 2048
GROUPS = (32, 64, 128, 256)  # 8, 4, 2 and 1 in a block
_OPS = get_args(Prologue)

Instantiation = tuple[str, str]  # file, expression


def instantiations(arch: str) -> list[Instantiation]:
    """Return (file, expression) of all of them for an architecture, e.g. sm_90a, in order."""
    capability = int(arch[3]), int(arch[4])
    return sorted(
        {
            *_gemv(capability),
            *_gemm(capability),
            *_skinny_gemm(capability),
            *_lut(),
            *_mixed(capability),
            *_mixed_gemm(capability),
            *_integer_gemm(capability),
            *_trellis(capability),
            *_fp4(capability),
            *_experts(capability),
            *_attention_dense_embed(),
            *paged_attention.variants(),
            *residual_norm_pack.variants(),
            *integer_encode.variants(),
            *sweep.variants(),
            *nested_sweep.variants(),
            *mixed_solver.variants(),
            *group_solver.variants(),
            *viterbi.variants(),
            *straight_through.variants(),
            *kl_divergence.variants(),
        }
    )


def _weight(kind: ScaleKind, P: int, group: int = 128, scales: torch.dtype = HALF) -> QuantTensor:
    """A matrix of zeros, for its form."""
    C = K // group
    planes = torch.zeros(P, 16, K // 8, dtype=torch.uint8)
    scale = torch.zeros(16, C, dtype=scales)
    if kind is ScaleKind.AFFINE:
        return AffineTensor(planes, K, group, scale, scale)
    if kind is ScaleKind.UNIFORM or kind is ScaleKind.UNIFORM_SYMMETRIC:
        zero = torch.zeros(16, -(-C * P // 8), dtype=torch.uint8)
        return UniformTensor(planes, K, group, scale, zero if kind is ScaleKind.UNIFORM else None)
    return BCQTensor(planes, K, group, torch.zeros(P, 16, C, dtype=scales), scale if kind is ScaleKind.BCQ else None)


def _weights() -> Iterator[tuple[QuantTensor, torch.dtype]]:
    """Weights of all kinds, plane counts, groups and types of scales, each with a type of x."""
    for i, kind in enumerate(ScaleKind):
        for P in range(1, 9):
            yield _weight(kind, P, GROUPS[(i + P) % 4]), HALF
    for scales in (BF16, F32):
        yield _weight(ScaleKind.BCQ, 3, scales=scales), BF16
        yield _weight(ScaleKind.AFFINE, 2, scales=scales), HALF


def _gemv(capability: tuple[int, int]) -> Iterator[Instantiation]:
    for i, (w, dtype) in enumerate(_weights()):
        laid = weight_layout.lay_out(w)
        tall, count = replace(laid, N=(4096, 49152)[i % 2]), (1, 2, 4)[i % 3]
        yield bmma_gemv.gemv_variant(tall, count, bmma_gemv.choose(tall, count, processors=132), dtype)
    epilogues = bmma_gemv.EPILOGUES if capability >= (9, 0) else ("STORE",)  # an encoding epilogue needs clusters
    for P, kind, groups, count, config, epilogue in bmma_gemv.autotuned_configs():
        divided = epilogue in ("SILU_MUL_ENCODE", "RELU_ENCODE")  # they come behind a norm
        if epilogue in epilogues:
            laid = weight_layout.lay_out(_weight(kind, P, weight_layout.BLOCK // groups))
            yield bmma_gemv.gemv_variant(laid, count, config, HALF, epilogue, divided)
    for i, epilogue in enumerate(epilogues):
        for P in (2, 3, 4) if "GELU" not in epilogue else (3,):
            laid = replace(weight_layout.lay_out(_weight(ScaleKind.BCQ, P)), N=(4096, 22016)[i % 2])
            count, dtype = (1, 1, 2, 4)[(i + P) % 4], (HALF, BF16)[P % 2]
            config = bmma_gemv.choose(laid, count, processors=132, in_graph=True, epilogue=epilogue)
            for divided in (False, True):
                yield bmma_gemv.gemv_variant(laid, count, config, dtype, epilogue, divided)
    for op in _OPS:
        for parts, count, dtype in ((1, 1, HALF), (2, 2, BF16), (4, 4, HALF)):
            yield bmma_gemv.encode_variant(op, parts, count, dtype)
    for i, op in enumerate(_OPS):  # encoded inside the product
        laid = weight_layout.lay_out(
            _weight((ScaleKind.UNIFORM, ScaleKind.BCQ)[i % 2], (4, 3, 2)[i % 3], (64, 128)[i % 2])
        )
        count, dtype = (1, 1, 2, 4)[i % 4], (HALF, BF16)[i % 2]
        config = bmma_gemv.choose(laid, count, processors=132, in_graph=True)
        yield bmma_gemv.gemv_variant(laid, count, config, dtype, prologue=op, x_dtype=dtype)


def _gemm(capability: tuple[int, int]) -> Iterator[Instantiation]:
    for i, (w, dtype) in enumerate(islice(_weights(), 1, None, 2)):
        laid: CudaWeight = replace(weight_layout.lay_out(w), N=4096)
        count = (33, 72, 144, 256, 1024)[i % 5] if capability == (9, 0) else (8, 16, 64, 256, 1024)[i % 5]
        old = capability != (9, 0)
        config = gemm._choose_sm80(laid, count, 99 * 1024) if old else gemm.choose(laid, count, dtype, 132, (9, 0))
        yield gemm.product_variant(laid, config, dtype)
    for dtype in (HALF, BF16):
        yield gemm.pack_variant(dtype)


def _skinny_gemm(capability: tuple[int, int]) -> Iterator[Instantiation]:
    for dtype in (HALF, BF16):
        yield skinny_gemm.permute_variant(dtype)
    if capability < (9, 0):
        return  # not there: its pipeline needs the bulk copies of Hopper, and gemm.cu does the work
    for i, (w, dtype) in enumerate(islice(_weights(), 0, None, 3)):
        laid: CudaWeight = replace(weight_layout.lay_out(w), N=(4096, 8192, 11008)[i % 3])
        yield skinny_gemm.variant(laid, skinny_gemm.choose(laid, (8, 16, 24, 32)[i % 4], 132), dtype)


def _lut() -> Iterator[Instantiation]:
    for i, (w, dtype) in enumerate(islice(_weights(), 0, None, 2)):
        laid = lut.lay_out(w)
        count, variant = (1, 2, 4)[i % 3], lut.VARIANTS[i % 2]
        yield lut.lut_variant(laid, count, variant, lut.choose(laid, count, variant, 132, 220 * 1024), dtype)


def _mixed(capability: tuple[int, int]) -> Iterator[Instantiation]:
    room = 227 * 1024 if capability >= (9, 0) else 99 * 1024
    forms = ((1, 4096, 4096, 1), (1, 12288, 12288, 1), (1, 32000, 4096, 2), (1, 4096, 11008, 4), (1, 4096, 4096, 8))
    for i, (subs, N, inputs, tokens) in enumerate(
        (*forms, (2, 4096, 4096, 1), (2, 12288, 4096, 2), (2, 4096, 2048, 8))
    ):
        U2, U4, nothing = -(-inputs * 3 // 1024), -(-inputs // 512), torch.empty(0)
        w = MixedWeight(N, inputs, U2, U4, subs, torch.empty(-(-N // 16), 0), nothing, nothing)
        count = mixed_config.at_a_time(w, tokens, room)
        dtype, out = (HALF, BF16)[i % 2], (HALF, BF16, F32)[i % 3]
        yield mixed_gemv.product_variant(subs, count, mixed_config.choose(w, count, 132, room), dtype, out)
    for config in (mixed_config.MixedTileConfig(tiles, 8, 2, 3 - tiles, True) for tiles in (1, 2)):
        yield mixed_gemv.product_variant(1, 1, config, HALF, HALF)
    for i, op in enumerate(_OPS):
        for N, inputs in ((4096, 4096), (12288, 4096), (12288, 12288)):
            w = MixedWeight(N, inputs, inputs * 3 // 1024, inputs // 512, 1, torch.empty(N // 16, 0), nothing, nothing)
            tile_config = mixed_decode.choose([w], False, 132, room)
            yield mixed_decode.variant(op, tile_config, (HALF, BF16)[i % 2], (HALF, BF16, F32)[i % 3])
        yield mixed_gemv.encode_variant(op, 1 + i % 2, K + i // 2 % 2, (HALF, BF16)[i // 4 % 2])
    for subs, inputs in ((1, K), (2, K + 1)):
        yield mixed_gemv.dequant_variant(subs, inputs, (HALF, BF16)[inputs % 2])


def _mixed_gemm(capability: tuple[int, int]) -> Iterator[Instantiation]:
    nothing = torch.empty(0)
    for i, (N, count) in enumerate(
        ((4096, 16), (12288, 32), (4096, 48), (12288, 64), (4096, 128), (12288, 160), (4096, 256), (12288, 1024))
    ):
        for subs, dtype in ((1, HALF), (1 + i % 2, BF16)):
            w = MixedWeight(N, K, 6, 4, subs, nothing, nothing, nothing)
            old = capability != (9, 0)
            s = mixed_gemm._choose_sm80(count, 99 * 1024) if old else mixed_gemm.choose(w, count, 132, (9, 0))
            yield mixed_gemm.variant(subs, s, dtype)


def _integer_gemm(capability: tuple[int, int]) -> Iterator[Instantiation]:
    forms = (  # format, bits, of x, group, of x, outliers, of x
        ("grouped", 4, 4, 128, 128, 128, 128),
        ("grouped", 4, 8, 128, 128, 0, 0),
        ("grouped", 4, 4, 64, 64, 0, 0),
        ("grouped", 4, 4, 32, 32, 32, 32),
        ("grouped", 8, 8, 128, 128, 128, 128),
        ("grouped", 8, 8, K, K, 0, 0),
        ("two-level", 4, 8, 128, K, 0, 0),
        ("two-level", 4, 8, 64, K, 128, 0),
        ("two-level", 4, 8, 32, K, 128, 128),
        ("two-level", 4, 4, 128, 128, 128, 128),
    )
    for i, (name, bits, bits_x, group, group_x, outliers, outliers_x) in enumerate(forms):
        act = ActivationSpec(bits_x, group_x, outliers_x)
        spec = {"format": name, "shape": [16, K], "bits": bits, "group": group, "outliers": outliers}
        spec |= {"permuted": False, "activation": act.to_json()}
        w = integer_layout.lay_out(format_of(spec).random(spec, torch.Generator().manual_seed(0)))
        sizes = ((4096, 8), (11008, 16), (4096, 64), (8192, 128), (11008, 256), (4096, 512))
        for j, (N, count) in enumerate(sizes[i % 2 :: 2]):
            tall, dtype = replace(w, N=N), (HALF, BF16)[(i + j) % 2]
            old = capability != (9, 0)
            s = integer_gemm._choose_sm80(tall, count, 99 * 1024) if old else None
            yield integer_gemm.variant(tall, s or integer_gemm.choose(tall, count, 132, (9, 0)), dtype)


def _trellis(capability: tuple[int, int]) -> Iterator[Instantiation]:
    kinds = [(c, bits) for c in CODES.values() for bits in BITS if not (c.weights * bits) % 1]
    for i, (code, bits) in enumerate(kinds):
        spec = {"format": "trellis", "shape": [256, 64], "bits": bits, "code": code.name}
        w = trellis_layout.lay_out(TrellisTensor.random(spec, torch.Generator()))
        for j, size in enumerate(trellis_gemv.TOKENS):
            tall = replace(w, units=w.units[:, :1].expand((16, 43, 192)[(i + j) % 3], 256, -1))
            config = trellis_gemv.choose(tall, 132, capability == (9, 0))
            yield trellis_gemv.product_variant(w, size, config, (HALF, BF16)[(i + j) % 2])
        yield trellis_gemv.dequant_variant(replace(w, K=K + i % 2), (HALF, BF16)[i // 2 % 2])
    for i, op in enumerate(_OPS):
        for j, size in enumerate(trellis_gemv.TOKENS):
            yield trellis_gemv.encode_variant(op, size, (i + j) % 3 > 0, (HALF, BF16)[(i + j) % 2])
    for dtype in (HALF, BF16):
        yield trellis_gemv.rotate_variant(dtype is HALF, dtype)


def _fp4(capability: tuple[int, int]) -> Iterator[Instantiation]:
    hopper = capability == (9, 0)
    room = 227 * 1024 if hopper else 99 * 1024
    shapes = ((4096, 4096), (12288, 12288), (49152, 4096), (1024, 4096), (4096, 14336))
    for i, (form, dtype) in enumerate((f, t) for f in ("mxfp4", "nvfp4") for t in (HALF, BF16)):
        weights = [Fp4Weight(N, inputs, form, torch.empty(-(-N // 16), 0)) for N, inputs in shapes]
        for j, op in enumerate(_OPS):
            w, size = weights[(i + j) % len(weights)], fp4_gemv.TOKENS[(i + j) % len(fp4_gemv.TOKENS)]
            config, out = fp4_gemv.choose(w, 132, room), F32 if op == "RMS_NORM" else dtype
            yield fp4_gemv.gemv_variant(w, op, size, config, (i + j) % 4 > 0, dtype, out, hopper)
        for j, count in enumerate((16, 33, 72, 144, 256, 1024)):
            w = weights[(i + j) % len(weights)]
            s = fp4_gemm.choose(w, count, 132, (9, 0)) if hopper else fp4_gemm._choose_sm80(w, count, 99 * 1024)
            yield fp4_gemm.variant(w, s, dtype)
        for count in (1, 64, 256) if hopper else ():
            yield fp4_gemm.variant(weights[0], fp4_gemm.invariant_config(weights[0], count), dtype)


def _experts(capability: tuple[int, int]) -> Iterator[Instantiation]:
    forms = (
        (ScaleKind.UNIFORM, 4, 128, HALF),
        (ScaleKind.BCQ, 2, 64, BF16),
        (ScaleKind.AFFINE, 3, 256, HALF),
        (ScaleKind.BCQ_SYMMETRIC, 8, 32, F32),
        (ScaleKind.UNIFORM_SYMMETRIC, 5, 128, HALF),
        (ScaleKind.UNIFORM, 4, 128, BF16),
    )
    for i, form in enumerate(forms):
        laid = weight_layout.lay_out(_weight(*form))
        yield from products.variants(i, replace(laid, N=768), replace(laid, N=2048), capability >= (9, 0))
    for i in range(6):  # gpt-oss, and longer rows
        inner, kind = (2880, 2880, 4096)[i % 3], ("mxfp4", "nvfp4")[(i + i // 3) % 2]
        gate, down = (Fp4Weight(N, n, kind, torch.empty(-(-N // 16), 0)) for N, n in ((inner, K), (K, inner)))
        yield from fp4_products.variants(i, gate, down, capability >= (9, 0))
    yield from (streaming.COUNT, streaming.PASSES)


def _attention_dense_embed() -> Iterator[Instantiation]:
    for size in (64, 80, 96, 128, 256):
        for heads, kv_heads in ((32, 32), (32, 8)):
            for cluster in (True, False):
                plan = decode_attention.tile_config(1, heads, kv_heads, size, 2048, processors=132)
                yield decode_attention.attend_variant(plan, size, HALF if cluster else BF16, cluster)
                narrow = decode_attention.tile_config(1, heads, kv_heads, size, 2048, processors=132, narrow=True)
                for digits in (1, 2, 4) if size == 128 else ():
                    yield decode_attention.attend_variant(narrow, size, HALF, cluster, digits)
                extra = 1 + (size // 16 + heads // kv_heads + cluster) % 3
                yield decode_attention.attend_variant(plan, size, BF16, cluster, 0, size // 2, extra)
                if size == 128:
                    yield decode_attention.attend_variant(narrow, size, HALF, cluster, 1, None, 3)
    for op in _OPS:
        for count in range(1, 5):
            yield dense.product_variant(op, count, K, HALF if count % 2 else BF16, F32 if count > 2 else HALF)
    for dtype in (HALF, BF16):
        yield embed_argmax.embed_variant(dtype)
        yield embed_argmax.greedy_variant(dtype)
    yield embed_argmax.greedy_variant(F32)
