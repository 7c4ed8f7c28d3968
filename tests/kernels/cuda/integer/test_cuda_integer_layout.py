"""Integer weights as integer_gemm.cu reads them: read back by the description, value by value."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_cases import CASES, Case, pieces_of, random_integer_weight
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.kernels.cuda.integer.integer_layout import IntegerTiles, lay_out, refuses


def read_back(laid: IntegerTiles) -> tuple[Tensor, Tensor]:
    """Bytes of codes [rows, columns] (4 bits: unsigned) and pairs of bytes of scales [rows, groups, 2]."""
    pieces = pieces_of(laid)
    codes = torch.zeros(64 * len(pieces), laid.columns, dtype=torch.uint8)
    scales = torch.zeros(64 * len(pieces), laid.blocks * laid.subs, 2, dtype=torch.uint8)
    row, column = torch.arange(64)[:, None], torch.arange(128)
    warp, half, g = row // 16, row // 8 % 2, row % 8
    step, high, t, i = column // 32, column // 16 % 2, column // 4 % 4, column % 4
    lane = 4 * g + t
    narrow_at = (((warp * 2 + step // 2) * 32 + lane) * 4 + step % 2 * 2 + half) * 4 + i
    wide_at = (((warp * 4 + step) * 32 + lane) * 4 + high * 2 + half) * 4 + i
    group = torch.arange(laid.subs)
    scale_at = 2 * (((warp * 8 + g) * laid.subs + group) * 2 + half)
    for tile, blocks in enumerate(pieces):
        for b, piece in enumerate(blocks):
            four = b < laid.narrow
            values = piece[narrow_at] >> (4 * high).to(torch.uint8) & 15 if four else piece[wide_at]
            codes[tile * 64 : tile * 64 + 64, b * 128 : b * 128 + 128] = values
            behind = piece[4096 if four else 8192 :]
            found = torch.stack([behind[scale_at], behind[scale_at + 1]], -1)
            scales[tile * 64 : tile * 64 + 64, b * laid.subs : (b + 1) * laid.subs] = found
    return codes, scales


def check(case: Case, N: int, K: int) -> None:
    w = random_integer_weight(case, N, K)
    laid = lay_out(w)
    codes, scales = read_back(laid)
    s, start = w.sizes, laid.normal * 128
    wanted = w.codes().view(torch.uint8)
    assert torch.equal(codes[:N, : s.normal], wanted if s.bits == 8 else wanted & 15)
    assert not codes[:, s.normal : start].any()
    assert not codes[N:].any()
    if s.outliers:
        assert torch.equal(codes[:N, start : start + s.outliers].view(torch.int8), w.outliers)
        assert not codes[:, start + s.outliers :].any()
    width = 128 // laid.subs
    for begin, count, first in ((0, s.normal, 0), (start, s.outliers, s.groups[0])):
        for k in range(0, count, min(width, s.group)):
            found, c = scales[:N, (begin + k) // width], first + k // s.group
            if case.format == "grouped":
                assert torch.equal(found.contiguous().view(torch.float16)[:, 0], w.scale[:, c])
            elif begin == 0:
                assert torch.equal(found[:, 0], w.group_scale[:, c])
                assert torch.equal(found[:, 1], 128 - w.group_zero[:, c])
    if laid.row_scale is not None:
        assert torch.equal(laid.row_scale[:N], w.scale.float())
    # x's scales of each column, as the kernel finds them
    act_slices = w.activation.slices(K)
    assert laid.x_groups == len(act_slices)
    for c, columns in enumerate(act_slices):
        for k in (columns.start, columns.stop - 1):
            place = k if k < s.normal else start + k - s.normal
            block, sub = place // 128, place % 128 // width
            behind = block - laid.normal if block >= laid.normal else block
            row = (laid.x_outlier if block >= laid.normal else 0) + behind // laid.x_span * laid.x_subs
            assert min(row + (sub if laid.x_subs > 1 else 0), laid.x_groups - 1) == c


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("N", "K"), [(64, 512), (100, 300), (7, 260), (65, 1100)])
def test_weights_lie_as_described(case: Case, N: int, K: int) -> None:
    check(case, N, K)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["grouped", "two-level"]),
    st.sampled_from([3, 4, 8]),
    st.sampled_from([32, 64, 128, 256, 384]),
    st.integers(0, 200),
    st.integers(1, 140),
    st.integers(201, 900),
)
def test_any_weight_lies_as_described(form: str, bits: int, group: int, outliers: int, N: int, K: int) -> None:
    check(Case(form, 4 if form == "two-level" else bits, 8, group, group, outliers), N, K)


@pytest.mark.parametrize(("group", "outliers", "K"), [(448, 128, 576), (300, 0, 300), (200, 200, 400), (40, 3, 43)])
def test_a_group_of_all_channels_need_not_be_whole_blocks(group: int, outliers: int, K: int) -> None:
    case = Case("grouped", 4, 4, group, group, outliers)
    check(case, 70, K)
    laid = lay_out(random_integer_weight(case, 70, K))
    assert laid.segments == 1 + (outliers > 0)


def test_what_is_refused() -> None:
    w = random_integer_weight(CASES[0], 16, 512)
    assert refuses(w) is None
    assert "floats" in str(refuses(replace(w, activation=None)))
    assert "f16" in str(refuses(replace(w, scale=w.scale.float())))
    for group in (48, 96):
        with pytest.raises(UnsupportedError, match="groups of 32, 64"):
            lay_out(random_integer_weight(Case("grouped", 4, 8, group, group, 0), 16, 512))
    sizes = w.sizes._replace(outlier_bits=16)
    assert "outliers" in str(refuses(replace(w, sizes=sizes)))
