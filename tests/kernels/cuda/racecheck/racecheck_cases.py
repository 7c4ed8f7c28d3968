"""Small products, attentions and fits of every CUDA kernel, for racecheck.py: each case runs and checks one config."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from integer_cases import CASES, Case, inputs, integer_x, oracle, quantized, random_integer_weight
from mixed_weights import random_mixed
from plane_weights import TOLERANCE, random_weight, relative

from crelle.formats.activations import ActivationSpec
from crelle.kernels.cuda.integer import integer_gemm
from crelle.kernels.cuda.integer.integer_gemm import IntegerSm80TileConfig, IntegerTileConfig
from crelle.kernels.cuda.integer.integer_layout import lay_out as integer_layout
from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.lut import lut
from crelle.kernels.cuda.mixed import mixed_decode, mixed_gemm, mixed_gemv, mixed_layout
from crelle.kernels.cuda.mixed.mixed_config import MixedTileConfig
from crelle.kernels.cuda.mixed.mixed_decode import DecodeConfig
from crelle.kernels.cuda.planes import bmma_gemv, gemm, skinny_gemm
from crelle.kernels.cuda.planes.bmma_gemv import GemvTileConfig
from crelle.kernels.cuda.planes.gemm import GemmSm80TileConfig, GemmTileConfig
from crelle.kernels.cuda.planes.skinny_gemm import SkinnyTileConfig
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out
from crelle.kernels.cuda.step.activations import Prologue, is_gated

HALF = torch.float16
Cases = dict[str, Callable[[], None]]
CONTROLS = str(Path(__file__).with_name("racecheck_controls.cu"))
INTEGER_EPSILON = 2**-10


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=HALF)


def check(y: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE[HALF]) -> None:
    error = relative(y, wanted)
    assert error <= tolerance, f"wrong by {error:.2e}"


# --- what racecheck sees ----------------------------------------------------------------------------------------------


def control_warps(name: str) -> None:
    out = torch.empty(64, dtype=torch.int32, device="cuda")
    load(CONTROLS, f"crelle::{name}")((1, 1, 1), 64, out)
    if name == "control_barrier":
        assert torch.equal(out.cpu(), torch.arange(64, dtype=torch.int32) ^ 32)


def control_ring(early: bool, box: bool) -> None:
    pieces = 9
    x = torch.randint(-1000, 1000, (pieces, 128), dtype=torch.int32, device="cuda")
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    rows = integer_gemm._tensor_map(x.data_ptr(), 4 * pieces, 128, 4)
    expression = f"crelle::control_ring<{str(early).lower()}, {str(box).lower()}>"
    load(CONTROLS, expression)((1, 1, 1), 64, x, rows, out, pieces)
    assert early or int(out.sum()) == int(x.sum())


def control_store() -> None:
    out = torch.empty(2, 128, 4, device="cuda")
    load(CONTROLS, "crelle::control_store")((2, 1, 1), 128, out)
    assert torch.equal(out[..., 0].cpu(), torch.tensor([1.0, 0.0])[:, None].expand(2, 128))
    assert torch.equal(out[0, :, 1].cpu(), torch.arange(128.0))


def control_teams(teams: int) -> None:
    out, rounds = torch.empty(64 * teams, dtype=torch.int32, device="cuda"), 12
    load(CONTROLS, f"crelle::control_teams<{teams}>")((1, 1, 1), 64 * teams, out, rounds)
    thread = (torch.arange(64 * teams) + 64) % (64 * teams)
    mine = rounds * (thread // 64 + 1) // teams - rounds * (thread // 64) // teams
    assert torch.equal(out.cpu(), (mine * (thread ^ 32)).int())


CONTROL: Cases = {
    "race (must be reported)": partial(control_warps, "control_race"),
    "barrier (must not)": partial(control_warps, "control_barrier"),
    "ring released early": partial(control_ring, True, False),
    "ring of bulk copies": partial(control_ring, False, False),
    "ring of tensor copies": partial(control_ring, False, True),
    "st.async in a cluster": control_store,
    "2 teams at named barriers": partial(control_teams, 2),
    "8 teams at named barriers": partial(control_teams, 8),
}


# --- bit-planes -------------------------------------------------------------------------------------------------------

KINDS = [
    (ScaleKind.BCQ, 3, 64),
    (ScaleKind.BCQ, 4, 256),
    (ScaleKind.BCQ_SYMMETRIC, 2, 64),
    (ScaleKind.UNIFORM, 4, 512),
    (ScaleKind.AFFINE, 3, 96),
]


def gemv(kind: ScaleKind, P: int, group: int, tokens: int, config: GemvTileConfig | None = None) -> None:
    w = random_weight(kind, P, 100, 1300, group, HALF, "cuda")
    laid, x = lay_out(w), randn(tokens, 1300)
    y = bmma_gemv.product(bmma_gemv.encode(x, laid), laid, HALF, config=config)
    check(y, x.double() @ w.dequantize(torch.float64).T)


def gemv_encodes(op: Prologue, tokens: int) -> None:
    """Encoding inside the product, then the epilogue in clusters that encodes for the next one."""
    w = lay_out(random_weight(ScaleKind.BCQ, 3, 333, 1023, 128, HALF, "cuda"))
    x = randn(tokens, 1023 * (2 if is_gated(op) else 1))
    gain = randn(1023) if "NORM" in op else None
    y = bmma_gemv.encode_product(x, w, HALF, op, gain, None, 1e-5, config=bmma_gemv.choose(w, tokens))
    check(y, bmma_gemv.product(bmma_gemv.encode(x, w, op, gain, None, 1e-5), w, HALF).double())
    first = lay_out(random_weight(ScaleKind.BCQ, 2, 512 if is_gated(op) else 256, 512, 128, HALF, "cuda"))
    behind = lay_out(random_weight(ScaleKind.BCQ, 2, 40, 256, 128, HALF, "cuda"))
    digits = bmma_gemv.encode(randn(tokens, 512), first)
    gain = randn(256) if "NORM" in op else None
    plain = bmma_gemv.product(digits, first, HALF)
    _, made = bmma_gemv.product_encode(digits, first, HALF, op, gain, 1e-5)
    wanted = bmma_gemv.product(bmma_gemv.encode(plain, behind, op, gain, None, 1e-5), behind, HALF)
    check(bmma_gemv.product(made, behind, HALF), wanted.double(), 5 * TOLERANCE[HALF])


def skinny(config: SkinnyTileConfig, P: int) -> None:
    w = random_weight(ScaleKind.BCQ, P, 300, 1300, 128, HALF, "cuda")
    laid, x = lay_out(w), randn(37, 1300)
    y = skinny_gemm.product(skinny_gemm.permuted_rows(x, laid), laid, config=config)
    check(y, x.double() @ w.dequantize(torch.float64).T)


def plane_gemm(config: GemmTileConfig | GemmSm80TileConfig, P: int, M: int) -> None:
    w = random_weight(ScaleKind.BCQ, P, 300, 1300, 128, HALF, "cuda")
    laid, x = lay_out(w), randn(M, 1300)
    y = gemm.product(gemm.pack(x, laid), laid, config=config)
    check(y, x.double() @ w.dequantize(torch.float64).T)


def look_up(variant: Any, tokens: int) -> None:
    w = random_weight(ScaleKind.BCQ, 3, 100, 2504, 128, HALF, "cuda")
    x = randn(tokens, 2504)
    check(lut.matmul(x, lut.lay_out(w), variant=variant), x.double() @ w.dequantize(torch.float64).T)


GEMV_CONFIGS = [(1, 4, 1, 4, 32), (1, 8, 2, 2, 16), (2, 8, 1, 4, 24), (4, 4, 1, 5, 16), (1, 16, 1, 1, 32)]
GEMV: Cases = {
    **{f"{k.name} {P} bits, {n} tokens": partial(gemv, k, P, g, n) for k, P, g in KINDS for n in (1, 4)},
    **{f"config {c}": partial(gemv, ScaleKind.BCQ, 2, 128, 1, GemvTileConfig(*c)) for c in GEMV_CONFIGS},
    **{f"{op}, {n} tokens": partial(gemv_encodes, op, n) for op in ("RMS_NORM", "SILU_MUL") for n in (1, 3)},
}
SKINNY_CONFIGS = [(8, 2, 1, 16), (16, 1, 2, 8), (16, 3, 2, 4, 2), (24, 1, 1, 4), (32, 2, 1, 8)]
SKINNY: Cases = {f"{c}": partial(skinny, SkinnyTileConfig(*c), 4) for c in SKINNY_CONFIGS}
SM90 = [
    GemmTileConfig(16, 1, 2, 4, 3, 3),
    GemmTileConfig(32, 2, 2, 4, 3, 2),
    GemmTileConfig(64, 2, 2, 3, 2, 2),
    GemmTileConfig(128, 2, 2, 4, 2),
    GemmTileConfig(128, 2, 2, 4, 2, split_k=2),
    GemmTileConfig(144, 2, 1, 5, 2),
    GemmTileConfig(256, 2, 1, 4, 2, split_k=2),
]
SM80 = [
    GemmSm80TileConfig(8, 1, 2, 2, 2),
    GemmSm80TileConfig(8, 1, 4, 2, 3),
    GemmSm80TileConfig(16, 2, 2, 2, 2),
    GemmSm80TileConfig(64, 2, 4, 1, 2),
]
GEMM_SM90: Cases = {f"{c}": partial(plane_gemm, c, 3, 150) for c in SM90}
GEMM_SM80: Cases = {f"{c}, {M} tokens": partial(plane_gemm, c, 3, M) for c in SM80 for M in (8, 19)}
LUT: Cases = {f"{v}, {n} tokens": partial(look_up, v, n) for v in lut.VARIANTS for n in (1, 4)}


# --- mixed matrices ---------------------------------------------------------------------------------------------------

FORMS = [(100, 1000, 16, 0.25, 0.01), (40, 696, 8, 0.4, 0.05)]


def mixed(kernel: str, form: tuple[int, int, int, float, float], config: Any, M: int) -> None:
    w = random_mixed(*form, "cuda")
    laid, x = mixed_layout.lay_out(w), randn(M, form[1])
    wanted = x.double() @ w.dequantize(torch.float64).T
    if kernel == "decode":
        y = mixed_decode.product(x, [laid], HALF, "RMS_NORM", torch.ones(form[1], device="cuda").half(), config=config)
        wide = x.double()
        wanted = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)) @ w.dequantize(torch.float64).T
    elif kernel == "gemv":
        y = mixed_gemv.product(mixed_gemv.encode(x, laid), laid, HALF, config=config)
    else:
        y = mixed_gemm.product(gemm.pack(x, laid), laid, config=config)
    check(y, wanted)


DECODE = [DecodeConfig(2, 12, 2, 2), DecodeConfig(1, 8, 3, 2, 2), DecodeConfig(4, 5, 1, 1)]
MIXED_GEMV = [
    MixedTileConfig(1, 8, 4, 2),
    MixedTileConfig(1, 8, 4, 2, asynchronous=True),
    MixedTileConfig(2, 4, 2, 2),
    MixedTileConfig(2, 10, 2, 1, asynchronous=True),
]
MIXED_GEMM = [
    GemmTileConfig(16, 1, 2, 4, 3, 3),
    GemmTileConfig(32, 2, 2, 4, 2, 1),
    GemmTileConfig(128, 2, 2, 4, 2, split_k=2),
    GemmTileConfig(256, 2, 1, 4, 2),
    GemmSm80TileConfig(8, 1, 2, 2, 2),
    GemmSm80TileConfig(64, 1, 4, 1, 2),
]
MIXED: Cases = {
    **{f"{c}": partial(mixed, "decode", FORMS[0], c, 1) for c in DECODE},
    **{f"{c}, groups of {f[2]}": partial(mixed, "gemv", f, c, 2) for c in MIXED_GEMV for f in FORMS},
}
MIXED_MANY: Cases = {f"{c}, groups of {f[2]}": partial(mixed, "gemm", f, c, 33) for c in MIXED_GEMM for f in FORMS}


# --- integer matrices -------------------------------------------------------------------------------------------------


def integer(case: Case, config: IntegerTileConfig | IntegerSm80TileConfig, M: int) -> None:
    w = random_integer_weight(case, 330, 1500, "cuda")
    laid, q = integer_layout(w), quantized(inputs(M, 1500, HALF, "cuda"), w)
    y = integer_gemm.product(integer_x(q, w, HALF), laid, config=config)
    check(y, oracle(q, w).double(), INTEGER_EPSILON)


ATOM, FINE, ONE_SCALE, TWO_LEVEL, SMALL = CASES[0], CASES[4], CASES[8], CASES[12], CASES[13]
CLUSTERS = [
    (ATOM, IntegerTileConfig(8, 3, 3, split_k=2)),
    (ATOM, IntegerTileConfig(24, 3, 3, split_k=2)),
    (TWO_LEVEL, IntegerTileConfig(8, 3, 3, split_k=4)),
    (TWO_LEVEL, IntegerTileConfig(64, 3, 3, split_k=2)),
    (ONE_SCALE, IntegerTileConfig(16, 3, 3, split_k=4)),
    (FINE, IntegerTileConfig(16, 1, 3, split_k=2)),
    (SMALL, IntegerTileConfig(96, 2, 4, split_k=2)),
]
STREAM_K = [
    (ATOM, IntegerTileConfig(8, 3, 3)),
    (TWO_LEVEL, IntegerTileConfig(8, 3, 12)),
    (ONE_SCALE, IntegerTileConfig(8, 1, 3, occupancy=2)),
    (FINE, IntegerTileConfig(16, 2, 4)),
    (ATOM, IntegerTileConfig(24, 3, 3)),
    (TWO_LEVEL, IntegerTileConfig(128, 3, 3)),
    (SMALL, IntegerTileConfig(128, 2, 4)),
]
INT_SM80 = [
    (ATOM, IntegerSm80TileConfig(8, 1, 4, 1, 2, 2)),
    (ATOM, IntegerSm80TileConfig(16, 2, 4, 2, 3, 3, half_bytes=False)),
    (TWO_LEVEL, IntegerSm80TileConfig(32, 1, 4, 1, 2, 4)),
    (TWO_LEVEL, IntegerSm80TileConfig(8, 2, 2, 8, 2, 2, half_bytes=False)),
    (FINE, IntegerSm80TileConfig(16, 2, 1, 4, 2, 3, 2, half_bytes=False)),
]


def cases_of(pairs: Any, tokens: tuple[int, ...]) -> Cases:
    return {
        f"{case.format} {case.bits}x{case.bits_x} group {case.group}, {config}, {M} tokens": partial(
            integer, case, config, M
        )
        for case, config in pairs
        for M in tokens
    }


INTEGER_CLUSTERS = cases_of(CLUSTERS, (8, 70))
INTEGER_STREAM_K = cases_of(STREAM_K, (8,)) | cases_of(STREAM_K[:2], (600,))  # so many tiles use each stage again
INTEGER_SM80 = cases_of(INT_SM80, (8, 19))


# --- the others: their own tests, on small shapes ---------------------------------------------------------------------


def encode() -> Cases:
    import test_cuda_integer_encode as t

    specs = [(ActivationSpec(4, 128, 128, clip=0.9), 640), (ActivationSpec(8, 8192, 128), 1024)]
    specs += [(ActivationSpec(4, 128, 128, clip=0.9, hadamard=True), 704)]
    found: Cases = {
        f"{act}, {K}": partial(t.test_a_gpu_finds_the_same_integers, act, K, None, True, HALF) for act, K in specs
    }
    for op in ("RMS_NORM", "SILU_MUL"):
        found[op] = partial(t.test_a_row_has_the_same_bits_in_any_batch_on_a_gpu, op, 4096)
    return found


def attention() -> Cases:
    import test_cuda_decode_attention as decode
    import test_cuda_paged_attention as paged

    shapes = [
        (64, 6, 2, 2, 300, None, HALF, True, True, True),
        (128, 4, 4, 3, 100, 40, HALF, True, False, True),
        (72, 3, 1, 2, 70, 17, HALF, False, False, False),
    ]
    found: Cases = {f"decode {s}": partial(decode.check_against_oracle, s, 0, "cuda") for s in shapes}
    for fmt in ("kv16", "kv8", "kv4", "kv2"):
        for case in ((128, 8, 2, [33, 100, 0, 16], None, 2), (64, 9, 3, [130, 15], 17, 1)):
            found[f"paged {fmt} {case}"] = partial(paged.test_paged_attention_matches_oracle, fmt, HALF, case)
    found["append"] = partial(paged.test_append_rotates_and_turns, "kv4", 128)
    return found


def step() -> Cases:
    import test_cuda_dense as dense
    import test_cuda_embed_argmax as ends
    import test_cuda_residual_norm_pack as norm

    found: Cases = {"embed": partial(ends.test_embed_equals_torch, 3, 77, 20, HALF)}
    found["argmax"] = partial(ends.test_argmax_equals_torch, 3, 770, 20, torch.float32)
    for op in ("RMS_NORM", "LAYER_NORM", "SILU_MUL"):
        found[f"pack {op}"] = partial(norm.test_one_launch_gives_what_three_give, 9, 1000, 40, op, HALF)
        found[f"dense {op}"] = partial(dense.test_dense_matches_oracle, 3, 77, 501, op, HALF, HALF)
    return found


def solvers() -> Cases:
    import test_cuda_group_solver as groups
    import test_cuda_mixed_solver as mixed_solver
    import test_cuda_nested_sweep as nested
    import test_cuda_sweep as sweep

    found: Cases = {f"binary scales {P}": partial(groups.binary, "cuda", *binary(P)) for P in (2, 4)}
    found["binary codes"] = partial(groups.test_codes_are_those_of_the_reference, "cuda", 3, 50, 33)
    found["uniform grids"] = partial(groups.test_uniform_grids_are_those_of_the_reference, "cuda", 3, 64, True)
    found["affine grids"] = partial(groups.test_affine_grids_are_those_of_the_reference, "cuda", 3, 64, True)
    found["sweep"] = partial(sweep.compare, "cuda", 37, 131, sweep.table_of(37, [4, 16, 2]), True, False)
    found["descent"] = partial(sweep.compare, "cuda", 37, 131, sweep.table_of(37, [4, 16, 2]), True, True)
    found["nested"] = partial(nested.compare, "cuda", 37, 131, nested.grids_of(37, 131, 32, 4, 2), True)
    found["mixed grids"] = partial(mixed_solver.test_grids_are_those_in_torch, "cuda", 37, 50, 16)
    found["mixed scales"] = partial(mixed_solver.test_scales_are_those_in_torch, "cuda", 37, 50, 16, 0.25)
    return found


def binary(P: int) -> tuple[Any, ...]:
    import test_cuda_group_solver as groups

    return groups.groups(39, 64), groups.importances(3, 64), P, 20, True


def training() -> Cases:
    import test_cuda_kl_divergence as kl
    import test_cuda_straight_through as ste

    return {
        "divergence": partial(kl.test_divergence_and_its_gradient, 3, 600, torch.float32, "cuda"),
        "own grid": partial(ste.test_as_torch_computes_it, (3, 2, 64), "cuda"),
        "grid": partial(ste.test_grids_as_they_are, (3, 2, 64), "cuda"),
    }


FAMILIES: dict[str, Callable[[], Cases]] = {
    "control": lambda: CONTROL,
    "integer-clusters": lambda: INTEGER_CLUSTERS,
    "integer-stream-k": lambda: INTEGER_STREAM_K,
    "integer-sm80": lambda: INTEGER_SM80,
    "integer-encode": encode,
    "gemv": lambda: GEMV,
    "skinny-gemm": lambda: SKINNY,
    "gemm-sm90": lambda: GEMM_SM90,
    "gemm-sm80": lambda: GEMM_SM80,
    "lut": lambda: LUT,
    "mixed": lambda: MIXED,
    "mixed-gemm": lambda: MIXED_MANY,
    "attention": attention,
    "step": step,
    "solvers": solvers,
    "training": training,
}
