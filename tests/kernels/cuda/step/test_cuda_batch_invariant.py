"""Products with one order of sums: against f64, and row by row against themselves in other batches."""

from dataclasses import replace

import pytest
import torch
from plane_weights import KINDS, TOLERANCE, random_weight, relative

from crelle.kernels.cuda.planes import batch_invariant, gemm
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out

HALF, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(("kind", "P", "group"), KINDS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 100, 150, 256])
def test_shapes_hold_all_tokens_and_fit_the_chip(kind: ScaleKind, P: int, group: int, tokens: int) -> None:
    w = lay_out(random_weight(kind, P, 500, 1024, group, torch.float32))
    for dtype in (HALF, BF16):
        s = batch_invariant.tile_config(w, tokens, dtype, 132)
        assert s.tokens >= tokens
        assert s.occupancy * (gemm.shared_bytes(w, s) + 1024 + 256) <= 228 * 1024
        assert s.x_stages >= 2
        assert s.w_stages >= 1


@pytest.mark.parametrize("N", [16, 500, 4096, 12288, 22016])
def test_thread_blocks_that_wait_for_each_other_run_at_once(N: int) -> None:
    w = replace(lay_out(random_weight(ScaleKind.BCQ, 3, 16, 4096, 128)), N=N)
    splits = batch_invariant.split_k(w, 132)
    assert 1 <= splits <= w.blocks
    assert splits == 1 or splits * -(-N // 128) <= 132
    assert 2 * splits * -(-N // 128) > 132 or splits == 8  # and few stand idle


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize(("kind", "P", "group"), [KINDS[i] for i in (1, 2, 5, 8, 10, 13)])
@pytest.mark.parametrize(("N", "K"), [(500, 1024), (4096, 2900), (17000, 300)])
def test_a_row_has_the_same_bits_in_any_batch(
    N: int, K: int, kind: ScaleKind, P: int, group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(N + P)
    stored = random_weight(kind, P, N, K, group, device="cuda")
    w, x, bias = lay_out(stored), torch.randn(300, K, device="cuda").to(dtype), torch.randn(N, device="cuda").to(dtype)
    oracle = x.double() @ stored.dequantize(torch.float64).T + bias.double()
    whole = batch_invariant.matmul(x, w, bias)
    assert relative(whole, oracle) < TOLERANCE[dtype]
    for rows in (slice(0, 1), slice(299, 300), slice(5, 14), slice(3, 20), slice(0, 64), slice(40, 200)):
        assert torch.equal(batch_invariant.matmul(x[rows], w, bias), whole[rows])
    dense = torch.randn(N, K, device="cuda").to(dtype)
    whole = batch_invariant.matmul(x, dense, bias)
    for rows in (slice(0, 1), slice(3, 20), slice(40, 200)):
        assert torch.equal(batch_invariant.matmul(x[rows], dense, bias), whole[rows])
