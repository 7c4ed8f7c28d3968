"""Forward passes and sums of calibration by 16-bit integers, as on x86-64 CPUs without AMX."""

from functools import partial
from pathlib import Path

import pytest
import torch

from crelle.formats.storage.open import open_weights
from crelle.kernels import cpu
from crelle.kernels.cpu import i16_gemm, tiles
from crelle.models.calibration_model import open_model
from crelle.quantizers.calibration import layer_api
from crelle.quantizers.calibration.layer_api import Tape, half_products, has_half_products
from crelle.quantizers.calibration.stats import StatsCollector

CPU = torch.device("cpu")
if cpu.available() is not None:
    pytest.skip("needs the C++ core", allow_module_level=True)


@pytest.fixture
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_api, "has_half_products", lambda device: False)
    monkeypatch.setattr(i16_gemm, "usable", lambda device: device.type == "cpu")
    monkeypatch.setattr(layer_api, "PackedI16Weight", partial(layer_api.PackedI16Weight, emulate=True))


@pytest.mark.usefixtures("integers")
def test_a_layer_is_nearer_to_f32_than_with_products_of_bf16(tiny_model: Path) -> None:
    model = open_model(open_weights(tiny_model))
    tokens = torch.randint(0, 250, (3, 40), generator=torch.Generator().manual_seed(5))
    block = model.block(0)
    with torch.no_grad():
        x = model.embed(tokens)
        exact = block(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = block(x)
        with half_products(CPU):
            ours = block(x)
        with half_products(CPU, False):
            assert torch.equal(block(x), exact)
    assert ours.dtype == torch.float32
    assert not torch.equal(ours, exact)  # otherwise the kernels were not taken
    assert (ours - exact).norm() <= 0.7 * (half - exact).norm()


@pytest.mark.usefixtures("integers")
def test_a_tape_repeats_what_was_computed(tiny_model: Path) -> None:
    model, tape = open_model(open_weights(tiny_model)), Tape()
    block = model.block(0)
    with torch.no_grad(), half_products(CPU):
        x = model.embed(torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(6)))
        plain = block(x)
        block.use_tape(tape)
        first = block(x)
        tape.rewind()
        assert torch.equal(block(x), first)
        block.use_tape(None)
    assert torch.equal(plain, first)


@pytest.mark.usefixtures("integers")
def test_gradients_take_products_of_torch(tiny_model: Path) -> None:
    model = open_model(open_weights(tiny_model))
    block = model.block(0)
    x = model.embed(torch.randint(0, 250, (1, 8))).requires_grad_()
    with half_products(CPU):
        block(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.skipif(not i16_gemm.usable(CPU), reason="needs AVX2")
def test_a_collector_adds_up_by_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crelle.kernels.cpu.stats.usable", lambda device: False)
    x = torch.randn(500, 70)
    exact, ours = StatsCollector(70, cross=True), StatsCollector(70, cross=True, half=True)
    for collector in (exact, ours):
        collector.add(x, 1.1 * x, torch.ones(500))
    wanted, found = exact.stats(), ours.stats()
    assert not torch.equal(found.hessian, wanted.hessian)
    torch.testing.assert_close(found.hessian, wanted.hessian, rtol=0, atol=1e-3)
    assert wanted.cross is not None
    assert found.cross is not None
    torch.testing.assert_close(found.cross, wanted.cross, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.absmean, wanted.absmean)


@pytest.mark.parametrize(("chosen", "wanted"), [(None, True), ("amx", True), ("amx-int8", True), ("avx2", False)])
def test_a_chosen_instruction_set_without_amx_has_no_bf16(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, wanted: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.delenv("CRELLE_ISA", raising=False)
    if chosen:
        monkeypatch.setenv("CRELLE_ISA", chosen)
    assert tiles.has_tiles() == has_half_products(CPU) == wanted
