"""Which problems the CUDA kernel of four-bit floats takes, and the layout of its weights."""

from dataclasses import replace

import pytest
import torch
from fp4_weights import FORMATS, extreme_fp4, random_fp4
from torch import Tensor

from crelle.formats.fp4 import LEVELS, Fp4Tensor
from crelle.kernels import cuda
from crelle.kernels.base import Problem
from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.fp4 import fp4_gemm, fp4_gemv
from crelle.kernels.cuda.fp4.fp4_kernel import CudaFp4
from crelle.kernels.cuda.fp4.fp4_layout import BLOCK, CODES, ROWS, Fp4Weight, join, lay_out

HALF = torch.float16


def values_in(w: Fp4Weight) -> Tensor:
    """Read the values f64 [N, K] back out of the layout, by its description alone."""
    size = w.blocks * w.block_bytes
    blocks = w.data[:, :size].view(w.tiles, w.blocks, w.block_bytes)
    row_scale = w.data[:, size : size + 64].contiguous().view(torch.float32).view(-1, 1).double()
    words = blocks[..., :CODES].contiguous().view(torch.int32).view(w.tiles, w.blocks, 4, 8, 4, 4)
    lanes = 4 if w.format == "nvfp4" else 2
    scales = blocks[..., CODES:].contiguous().view(torch.int32).view(w.tiles, w.blocks, 8, lanes, 2)
    bits, top = (7, 14) if w.format == "nvfp4" else (8, 15)
    found = torch.zeros(w.tiles, ROWS, w.blocks, BLOCK, dtype=torch.float64)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    for high in range(2):
        half = scales >> 16 * high & 0xFFFF
        for chunk in range(4):
            field = (half[..., chunk // 2] << 7 * (chunk % 2)) & (1 << top) - (1 << bits)  # tile, block, g, lane
            scale = field.to(torch.int16).view(torch.float16).double()
            for t in range(4):
                for i in range(16):
                    word = words[:, :, chunk, :, t, i // 4]
                    at = i % 4 + 4 * high
                    sign = word >> ((8 * (i % 4) + 7) if high == 0 else (8 * (i % 4) + 3)) & 1
                    value = levels[(word >> 4 * at & 7).long()] * (1 - 2 * sign) * scale[..., t * lanes // 4]
                    found[:, 8 * high : 8 * high + 8, :, chunk * 64 + t * 16 + i] = value.permute(0, 2, 1)
    return (found.view(w.tiles * ROWS, -1) * row_scale)[: w.N, : w.K]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (16, 256), (37, 300), (40, 777)])
def test_layout_holds_the_values_of_the_format(kind: str, N: int, K: int) -> None:
    for w in (random_fp4(N, K, kind), random_fp4(N, K, kind, seed=1, divides=False), extreme_fp4(N, K, kind)):
        assert torch.allclose(values_in(lay_out(w)), w.dequantize(torch.float64), rtol=2e-7, atol=0)


@pytest.mark.parametrize("kind", FORMATS)
def test_layout_does_not_depend_on_slabs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_fp4(70, 600, kind)
    whole = lay_out(w)
    monkeypatch.setattr("crelle.kernels.cuda.fp4.fp4_layout._SLAB", 1)
    assert torch.equal(lay_out(w).data, whole.data)


def test_scales_of_mxfp4_are_relative_to_those_that_count() -> None:
    """Any power of two can be the largest; groups of zeros do not count, those 2^30 smaller vanish."""
    w = random_fp4(3, 96, "mxfp4")
    w.packed[:, 32:48] = 0  # the last group
    w.scale[0] = torch.tensor([254, 240, 1])
    w.scale[1] = torch.tensor([0, 29, 254])
    w.scale[2] = torch.tensor([100, 131, 0])
    wanted = w.dequantize(torch.float64)
    found = values_in(lay_out(w))
    assert torch.equal(found[:2], wanted[:2])
    assert torch.equal(found[2, 32:], wanted[2, 32:])
    assert not bool(found[2, :32].any())
    assert float(wanted[2, :32].abs().max()) <= 2.0**-29 * float(wanted[2].abs().max()) * 12


def test_takes_both_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: None)
    kernel = CudaFp4()
    for kind in FORMATS:
        problem = replace(Problem.of(random_fp4(64, 96, kind), HALF), device="cuda")
        assert kernel.supports(problem) is None
        assert kernel.supports(replace(problem, dtype=torch.bfloat16)) is None
        assert "a GPU" in str(kernel.supports(replace(problem, device="cpu")))
        assert "float32" in str(kernel.supports(replace(problem, dtype=torch.float32)))
        assert "not 'bcq'" in str(kernel.supports(replace(problem, format="bcq")))
        assert "float activations" in str(kernel.supports(replace(problem, activation="8 bits")))


def test_whole_tiles_are_joined() -> None:
    sizes = (16, 48, 5)
    weights: list[Fp4Tensor] = [random_fp4(n, 300, "nvfp4", seed=n) for n in sizes]
    joined = join([lay_out(w) for w in weights])
    assert joined is not None
    whole, parts = joined
    assert torch.equal(values_in(whole)[:69], torch.cat([values_in(lay_out(w)) for w in weights]))
    for part, w in zip(parts, weights, strict=True):
        assert (part.N, torch.equal(values_in(part), values_in(lay_out(w)))) == (w.shape[0], True)
        assert part.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
    laid = [lay_out(w) for w in weights]
    assert join(laid[::-1]) is None  # a tile that is not whole
    assert join([laid[0], lay_out(random_fp4(16, 300, "mxfp4"))]) is None
    assert join([laid[0], lay_out(random_fp4(16, 304, "nvfp4"))]) is None


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("room", [227 * 1024, 99 * 1024])
def test_tile_configs_fit(kind: str, room: int) -> None:
    for N, K in ((1, 1), (1024, 4096), (4096, 4096), (12288, 12288), (49152, 12288), (8192, 28672)):
        w = Fp4Weight(N, K, kind, torch.empty(-(-N // ROWS), 0))
        c = fp4_gemv.choose(w, 132, room)
        assert c.occupancy * (fp4_gemv.shared_bytes(w, 1, c) + 1024) <= room + 1024
        most = fp4_gemv.tokens_at_once(w, c, room)
        assert most >= 1
        assert fp4_gemv.shared_bytes(w, most, c) + 1024 <= room
        assert most == 8 or fp4_gemv.shared_bytes(w, 2 * most, c) + 1024 > room
        for tokens in (1, 9, 33, 128, 300, 5000):
            s = fp4_gemm.choose(w, tokens, 132, (9, 0))
            assert isinstance(s, fp4_gemm.GemmTileConfig)
            assert fp4_gemm.shared_bytes(w, s) * s.occupancy <= 227 * 1024
            assert fp4_gemm.sm80_shared_bytes(w, fp4_gemm._choose_sm80(w, tokens, 99 * 1024)) <= 99 * 1024
            own = fp4_gemm.invariant_config(w, min(tokens, dispatch.INVARIANT_ROWS))
            assert fp4_gemm.shared_bytes(w, own) <= 227 * 1024


def test_a_few_rows_take_the_gemv() -> None:
    assert [dispatch.fp4_route(rows) for rows in (1, 8, 9, 3000)] == ["gemv", "gemv", "gemm", "gemm"]
