"""The layout of the CUDA kernels holds exactly the values of the format, whatever the shape and the group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_weights import random_weight, values_in

from crelle.errors import UnsupportedError
from crelle.formats.dense import DenseTensor
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels.cuda.planes.weight_layout import BLOCK, ScaleKind, join, lay_out


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(ScaleKind),
    P=st.integers(1, 8),
    N=st.integers(1, 40),
    K=st.integers(1, 600),
    group=st.sampled_from([8, 32, 40, 48, 64, 72, 96, 128, 144, 256, 384, 512, 10**6]),
)
def test_layout_holds_the_numbers(kind: ScaleKind, P: int, N: int, K: int, group: int) -> None:
    w = random_weight(kind, P, N, K, group)
    assert torch.equal(values_in(lay_out(w)), w.dequantize(torch.float64))


@pytest.mark.parametrize("group", [40, 64])
def test_permuted_inputs_are_found_by_their_order(group: int) -> None:
    inner = random_weight(ScaleKind.UNIFORM, 3, 20, 300, group)
    w = PermutedTensor(inner, torch.randperm(300).to(torch.int32))
    assert torch.equal(values_in(lay_out(w)), w.dequantize(torch.float64))


def test_groups_that_fit_cost_no_padding() -> None:
    for group in (32, 64, 128, 256, 512):
        w = lay_out(random_weight(ScaleKind.BCQ, 2, 32, 1024, group))
        assert w.perm is None
        assert w.words.numel() * 32 == 2 * 32 * 1024
        assert w.scales.numel() == 3 * 32 * 1024 // group


def test_a_whole_row_has_one_set_of_scales() -> None:
    w = lay_out(random_weight(ScaleKind.AFFINE, 3, 16, 700, 700))
    assert w.scales.numel() == 2 * 16
    assert w.blocks == -(-700 // BLOCK)


def test_joined_matrices_share_memory_with_their_parts() -> None:
    parts = [lay_out(random_weight(ScaleKind.BCQ, 3, n, 512, 128)) for n in (32, 16, 24)]
    before = [values_in(p) for p in parts]
    joined = join(parts)
    assert joined is not None
    whole, views = joined
    assert torch.equal(values_in(whole), torch.cat(before))
    for view, values in zip(views, before, strict=True):
        assert torch.equal(values_in(view), values)
        assert view.words.untyped_storage().data_ptr() == whole.words.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "other", [(ScaleKind.BCQ, 2, 16, 512, 128), (ScaleKind.AFFINE, 3, 16, 512, 128), (ScaleKind.BCQ, 3, 16, 512, 64)]
)
def test_unlike_matrices_are_not_joined(other: tuple[ScaleKind, int, int, int, int]) -> None:
    assert join([lay_out(random_weight(ScaleKind.BCQ, 3, 16, 512, 128)), lay_out(random_weight(*other))]) is None


def test_rows_that_end_inside_a_tile_are_joined_only_at_the_end() -> None:
    ragged, whole = (lay_out(random_weight(ScaleKind.BCQ, 3, n, 512, 128)) for n in (24, 16))
    assert join([ragged, whole]) is None
    assert join([whole, ragged]) is not None


def test_a_plain_matrix_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot lay out the format 'dense'"):
        lay_out(DenseTensor(torch.zeros(4, 4)))
