"""Which trellis problems the CUDA kernel takes, and the layout of its weights."""

from dataclasses import replace

import pytest
import torch
from trellis_weights import KINDS, random_trellis

from crelle.formats.trellis import COLUMNS, states_of
from crelle.formats.trellis import ROWS as RING_ROWS
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels import cuda
from crelle.kernels.base import Problem
from crelle.kernels.cuda.trellis import trellis_gemv
from crelle.kernels.cuda.trellis.trellis_gemv import TrellisTileConfig
from crelle.kernels.cuda.trellis.trellis_kernel import CudaTrellis
from crelle.kernels.cuda.trellis.trellis_layout import MOST_INPUTS, join, lay_out

HALF = torch.float16


@pytest.mark.parametrize("block", [0, 32])
def test_takes_trellis_weights_rotated_or_not(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: None)
    problem = replace(Problem.of(random_trellis(64, 96, "pair", 2.0, block), HALF), device="cuda")
    kernel = CudaTrellis()
    assert kernel.supports(problem) is None
    assert "a GPU" in str(kernel.supports(replace(problem, device="cpu")))
    assert "float32" in str(kernel.supports(replace(problem, dtype=torch.float32)))
    assert "inputs" in str(kernel.supports(replace(problem, K=MOST_INPUTS + 4)))
    assert "not 'bcq'" in str(kernel.supports(replace(problem, format="bcq")))
    assert problem.rotated == (block > 0)


@pytest.mark.parametrize(("code", "bits"), KINDS)
def test_a_lane_has_its_ring_in_pieces(code: str, bits: float) -> None:
    """By the description of the layout alone."""
    w = random_trellis(290, 70, code, bits)
    laid = lay_out(w)
    size = 16 if bits % 1 == 0 else 8
    assert laid.units.shape == (2, 8, int(512 * bits))  # 5 units, padded to 8
    pieces = laid.units.view(2, 8, -1, 8, 4, size)
    rings = pieces.permute(0, 3, 1, 4, 2, 5).reshape(16, 32, -1)  # row blocks, column groups
    blocks, groups = -(-290 // RING_ROWS), -(-70 // COLUMNS)
    found = states_of(rings[:blocks, :groups].contiguous(), laid.shift)
    assert torch.equal(found, w.states(slice(None)))  # type: ignore[union-attr]


def test_whole_tiles_of_one_rotation_are_joined() -> None:
    a, b, c = (random_trellis(n, 64, "pair", 2.0, 16, seed=n) for n in (256, 512, 40))
    laid = [lay_out(w) for w in (a, b, c)]  # as a quantizer rotates them, and a random model
    turned = Rotation(Rotation.random(64, torch.Generator().manual_seed(1)).packed, 64, 16)
    joined = join(laid)
    assert joined is not None
    whole, parts = joined
    assert whole.N == 808
    for part, own in zip(parts, laid, strict=True):
        assert (part.N, part.units.tolist(), part.scale.tolist()) == (own.N, own.units.tolist(), own.scale.tolist())
        assert part.units.untyped_storage().data_ptr() == whole.units.untyped_storage().data_ptr()
    assert join([laid[0], lay_out(RotatedTensor(b.inner, turned))]) is None  # type: ignore[union-attr]
    assert join([laid[2], laid[0]]) is None  # a tile that is not whole
    assert join([laid[0], lay_out(random_trellis(256, 64, "pair", 3.0))]) is None  # not rotated


@pytest.mark.parametrize("size", trellis_gemv.TOKENS)
@pytest.mark.parametrize("bits", [1.0, 2.0, 3.5, 4.0])
def test_tile_configs_fit(bits: float, size: int) -> None:
    w = lay_out(random_trellis(256, 64, "pair", bits))
    for tiles, units in ((1, 4), (16, 256), (43, 256), (48, 768), (192, 768), (16, 4096)):
        tall = replace(w, units=w.units[:, :1].expand(tiles, units, -1))
        c = trellis_gemv.choose(tall, 132, True)
        assert c.occupancy * (trellis_gemv.shared_bytes(tall, size, c) + 1024) <= 228 * 1024
        assert c.split == 1 or units >= 8 * c.split
        old = trellis_gemv.choose(tall, 108, False)
        assert trellis_gemv.shared_bytes(tall, size, old) <= 99 * 1024
        assert old == TrellisTileConfig(8, 2, old.run, 1, 0)
