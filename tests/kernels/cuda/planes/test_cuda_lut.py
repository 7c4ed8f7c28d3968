"""The look-up kernel: layout and algorithm in plain torch everywhere, the kernel itself where there is a GPU."""

from dataclasses import replace

import pytest
import torch
from plane_weights import TOLERANCE, random_weight, relative
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.bcq import BCQTensor
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.lut import lut
from crelle.kernels.cuda.lut.lut import LutTileConfig, LutWeight, Variant
from crelle.kernels.cuda.planes.weight_layout import ScaleKind

ROW = 10**6

CASES = [  # kind, planes, group, type of the scales
    (ScaleKind.BCQ, 3, 128, torch.float16),
    (ScaleKind.BCQ, 1, 8, torch.float16),
    (ScaleKind.BCQ_SYMMETRIC, 2, 64, torch.bfloat16),
    (ScaleKind.BCQ, 8, 1024, torch.float16),
    (ScaleKind.UNIFORM, 4, 24, torch.float16),
    (ScaleKind.UNIFORM, 3, 512, torch.float16),
    (ScaleKind.UNIFORM_SYMMETRIC, 8, 256, torch.float16),
    (ScaleKind.AFFINE, 2, 40, torch.float16),
    (ScaleKind.AFFINE, 3, ROW, torch.float16),
    (ScaleKind.AFFINE, 4, 96, torch.float32),
    (ScaleKind.UNIFORM, 2, 2048, torch.float16),
]
SHAPES = [(100, 576), (17, 301), (33, 2504)]


# The layout and the algorithm ---------------------------------------------------------------------------------------


def bytes_of(w: LutWeight) -> Tensor:
    """Undo the layout of the words: [P, rows, units, slices, lanes]."""
    words = w.words.clone()
    words[..., 16:, :] = words[..., 16:, :].roll(8, -1)
    return words.permute(2, 0, 5, 1, 3, 4).flatten(1, 2)


def looked_up(x: Tensor, w: LutWeight) -> Tensor:
    """What lut.cu computes, in fp64: tables of 256 signed sums, one look-up for a byte, scales per lane."""
    M, lanes = x.shape[0], torch.arange(32)
    padded = torch.zeros(M, w.units * lut.UNIT, dtype=torch.float64)
    if w.perm is None:
        padded[:, : w.K] = x
    else:
        padded[:, w.perm >= 0] = x[:, w.perm[w.perm >= 0].long()].double()
    inputs = padded.view(M, w.units, 32, 4, 8).transpose(2, 3)  # token, unit, slice, lane, input
    signs = (torch.arange(256)[:, None] >> torch.arange(8) & 1).double() * 2 - 1
    tables = inputs @ signs.T  # [M, units, 4, 32, 256]
    tables = tables[:, None].expand(M, w.semaphores.numel() * 16, w.units, 4, 32, 256)
    sums = [
        tables.gather(-1, plane.long()[None, ..., None].expand(M, *plane.shape, 1))[..., 0].sum(-2)
        for plane in bytes_of(w)
    ]  # per plane [M, rows, units, lanes]
    everything = inputs.sum((-1, -3))[:, None]  # [M, 1, units, lanes]
    scales = w.scales.double().repeat_interleave(w.blocks_per_scale, dim=1)[
        :, : w.units
    ]  # [tiles, units, words, groups, 16]
    scales = scales[..., lanes * w.groups // 32, :].permute(2, 0, 4, 1, 3).flatten(1, 2)  # [words, rows, units, lanes]
    P, top = w.P, (1 << w.P) - 1
    if w.kind in (ScaleKind.BCQ, ScaleKind.BCQ_SYMMETRIC):
        y = sum(scales[p] * sums[p] for p in range(P))
        y = y + scales[P] * everything if w.kind is ScaleKind.BCQ else y
    else:
        code = (sum(2 ** (P - 1 - p) * sums[p] for p in range(P)) + top * everything) / 2
        zero = scales[1] if w.kind is ScaleKind.UNIFORM else 2 ** (P - 1)
        low = scales[1] if w.kind is ScaleKind.AFFINE else -zero * scales[0]
        y = scales[0] * code + low * everything
    assert isinstance(y, Tensor)
    return y.sum((-1, -2))[:, : w.N]


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize(("kind", "P", "group", "scales"), CASES)
def test_table_algorithm_matches_oracle(
    kind: ScaleKind, P: int, group: int, scales: torch.dtype, N: int, K: int
) -> None:
    w = random_weight(kind, P, N, K, group, scales)
    laid = lut.lay_out(w)
    x = torch.randn(2, K, dtype=torch.float64)
    assert (laid.kind, laid.words.shape[2]) == (kind, P)
    assert relative(looked_up(x, laid), x @ w.dequantize(torch.float64).T) < 1e-12


@pytest.mark.parametrize("K", [1024, 2048, 2504])
def test_layout_keeps_every_bit(K: int) -> None:
    w = random_weight(ScaleKind.BCQ, 3, 37, K, 128, torch.float16)
    assert isinstance(w, BCQTensor)
    back = bytes_of(lut.lay_out(w)).transpose(-1, -2).flatten(2)  # [P, rows, bytes]
    assert torch.equal(back[:, :37, : K // 8], w.planes)
    assert not back[:, 37:].any()
    assert not back[:, :, K // 8 :].any()


@pytest.mark.parametrize("group", [128, 40])
def test_permuted_inputs_match_oracle(group: int) -> None:
    inner = random_weight(ScaleKind.AFFINE, 3, 20, 1200, group, torch.float16)
    w = PermutedTensor(inner, torch.randperm(1200).to(torch.int32))
    x = torch.randn(2, 1200, dtype=torch.float64)
    assert relative(looked_up(x, lut.lay_out(w)), x @ w.dequantize(torch.float64).T) < 1e-12


def test_layout_costs_no_more_than_its_format() -> None:
    w = random_weight(ScaleKind.BCQ, 3, 64, 4096, 128, torch.float16)
    assert lut.lay_out(w).nbytes == sum(t.numel() * t.element_size() for t in w.tensors().values())


def test_layout_refuses_other_formats() -> None:
    class Other:
        format = "other"

    with pytest.raises(UnsupportedError, match="cannot lay out the format 'other'"):
        lut.lay_out(Other())  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", ["SHARED", "PRIVATE"])
@pytest.mark.parametrize("room", [226 * 1024, 98 * 1024])  # of Hopper; of Ada
@pytest.mark.parametrize(("N", "K"), [(16, 64), (4096, 4096), (11008, 4096), (49152, 12288), (64, 10**6)])
def test_chosen_shapes_fit_a_multiprocessor(N: int, K: int, room: int, variant: Variant, tokens: int) -> None:
    tiles, units = -(-N // 16), -(-K // 1024)
    w = LutWeight(
        N,
        K,
        3,
        ScaleKind.BCQ,
        8,
        1,
        torch.empty(tiles, units, 3, 4, 32, 16, dtype=torch.uint8, device="meta"),
        torch.empty(tiles, units, 4, 8, 16, dtype=torch.float16, device="meta"),
        torch.empty(tiles, dtype=torch.int32, device="meta"),
    )
    s = lut.choose(w, tokens, variant, processors=132, room=room)
    assert 1 <= s.row_blocks <= tiles
    assert lut.table_bytes(s, tokens, variant) <= room


# The kernel ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.sample(3)
def test_compiles_for_each_architecture(arch: str, tokens: int) -> None:
    w = lut.lay_out(random_weight(ScaleKind.BCQ, 2, 16, 1024, 128, torch.float16))
    room = {"sm_80": 162, "sm_89": 98}.get(arch, 226) * 1024
    for variant in lut.VARIANTS:
        config = lut.choose(w, tokens, variant, processors=132, room=room)
        assert jit.compile(*lut.lut_variant(w, tokens, variant, config, torch.float16), arch).cubin[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["SHARED", "PRIVATE"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "P", "group", "scales"), CASES)
def test_matmul_matches_oracle(
    kind: ScaleKind, P: int, group: int, scales: torch.dtype, dtype: torch.dtype, variant: Variant
) -> None:
    for (N, K), tokens in zip([*SHAPES, (64, 1024)], (1, 3, 4, 2), strict=True):
        w = random_weight(kind, P, N, K, group, scales, "cuda")
        x = torch.randn(tokens, K, device="cuda", dtype=dtype)
        bias = torch.randn(N, device="cuda", dtype=dtype)
        residual = torch.randn(tokens, N, device="cuda", dtype=dtype)
        y = torch.full((tokens, N), torch.nan, device="cuda", dtype=dtype)
        lut.matmul(x, lut.lay_out(w), bias, residual, variant, out=y)
        expected = x.double() @ w.dequantize(torch.float64).T + bias.double() + residual.double()
        assert relative(y, expected) < TOLERANCE[dtype], (N, K, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("table", [torch.float32, torch.float16])
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_every_cut_and_table_matches_oracle(tokens: int, slices: int, table: torch.dtype) -> None:
    w = random_weight(ScaleKind.BCQ, 2, 100, 2504, 128, torch.float16, "cuda")
    laid = lut.lay_out(w)
    x = torch.randn(tokens, 2504, device="cuda", dtype=torch.float16)
    for row_blocks in (1, 3, 7):
        config = LutTileConfig(slices, 16, 1, row_blocks, 1, table)
        if lut.table_bytes(config, tokens, "PRIVATE") > 226 * 1024:
            pytest.skip("more tables than shared memory holds")
        y = lut.matmul(x, laid, config=config)
        assert relative(y, x.double() @ w.dequantize(torch.float64).T) < TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_half_tables_hold_inputs_of_any_size(size: float) -> None:
    w = random_weight(ScaleKind.UNIFORM, 3, 64, 1024, 128, torch.float16, "cuda")
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16) * size
    y = lut.matmul(x, lut.lay_out(w))
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["SHARED", "PRIVATE"])
@pytest.mark.parametrize("tokens", [2, 4])
def test_half_tables_do_not_round_what_every_row_shares(tokens: int, variant: Variant) -> None:
    w = random_weight(ScaleKind.AFFINE, 3, 64, 1024, ROW, torch.float16, "cuda")
    assert isinstance(w, AffineTensor)
    w = replace(w, low=torch.ones_like(w.low))  # times the sum of all inputs, which is nearly 0
    x = torch.randn(tokens, 1024, device="cuda")
    x = (x - x.mean(1, keepdim=True)).half()
    y = lut.matmul(x, lut.lay_out(w), variant=variant)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) < TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["SHARED", "PRIVATE"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_matmul_rerun_is_bitwise_equal(tokens: int, variant: Variant) -> None:
    laid = lut.lay_out(random_weight(ScaleKind.BCQ, 3, 1000, 4096, 128, torch.float16, "cuda"))
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.float16)
    first = lut.matmul(x, laid, variant=variant)
    assert all(torch.equal(lut.matmul(x, laid, variant=variant), first) for _ in range(20))
    assert not laid.semaphores.any()
