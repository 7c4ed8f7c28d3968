"""The layout of mixed 2/4-bit weights for the CUDA kernels: nothing is lost, and few bytes are added."""

import pytest
import torch
from mixed_weights import FORMS, random_mixed, values_in

from crelle.errors import UnsupportedError
from crelle.formats.base import nbytes
from crelle.kernels.cuda.mixed.mixed_layout import join, lay_out, same_inputs


@pytest.mark.parametrize(("N", "K", "G", "four", "outliers"), FORMS)
def test_all_values_are_in_the_layout(N: int, K: int, G: int, four: float, outliers: float) -> None:
    w = random_mixed(N, K, G, four, outliers)
    assert torch.allclose(values_in(lay_out(w)), w.dequantize(torch.float64), rtol=1e-12, atol=1e-12)


def test_second_order_scales_of_more_rows() -> None:
    w = random_mixed(100, 512, 16, 0.25, 0.01, block=48)
    assert torch.allclose(values_in(lay_out(w)), w.dequantize(torch.float64), rtol=1e-12, atol=1e-12)


def test_second_order_scales_of_fewer_rows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="multiple of 16 rows, not of 8"):
        lay_out(random_mixed(32, 512, 16, 0.25, 0.0, block=8))


def test_large_outliers_do_not_overflow() -> None:
    w = random_mixed(32, 512, 16, 0.25, 0.01)
    assert w.outlier_values is not None
    large = w.with_scales({"outlier_values": w.outlier_values * 20000})
    laid = lay_out(large)
    assert laid.outlier_exponent > 0
    assert torch.allclose(values_in(laid), large.dequantize(torch.float64), rtol=1e-12, atol=1e-12)


def test_bytes_are_close_to_those_of_the_format() -> None:
    w = random_mixed(256, 4096, 16, 0.25, 0.002)
    bits = 8 * lay_out(w).nbytes / (256 * 4096)
    assert bits < 1.02 * 8 * nbytes(w) / (256 * 4096)


def test_matrices_of_the_same_groups_are_joined() -> None:
    parts = [random_mixed(n, 512, 16, 0.25, 0.01, seed=0) for n in (32, 64, 33)]
    laid = [lay_out(w) for w in parts]
    for w, like in zip(laid[1:], parts[1:], strict=True):  # random_mixed has drawn the same groups
        assert same_inputs(laid[0], w), like
    joined = join(laid)
    assert joined is not None
    whole, pieces = joined
    dense = [w.dequantize(torch.float64) for w in parts]
    assert torch.allclose(values_in(whole), torch.cat(dense), rtol=1e-12, atol=1e-12)
    for piece, wanted in zip(pieces, dense, strict=True):
        assert torch.allclose(values_in(piece), wanted, rtol=1e-12, atol=1e-12)
        assert piece.tiles.untyped_storage().data_ptr() == whole.tiles.untyped_storage().data_ptr()
    again = join([pieces[1], pieces[0], pieces[2]])
    assert again is not None
    assert torch.allclose(values_in(again[0]), torch.cat([dense[1], dense[0], dense[2]]), rtol=1e-12, atol=1e-12)


def test_matrices_of_other_groups_are_not_joined() -> None:
    a, b = (lay_out(random_mixed(32, 512, 16, 0.25, 0.01, seed=seed)) for seed in (0, 1))
    assert not same_inputs(a, b)
    assert join([a, b]) is None
