"""Free changes of a layer before its activations are rounded: it computes the same, and the error falls."""

from pathlib import Path

import pytest
import torch

from crelle.formats.activations import ActivationSpec
from crelle.formats.storage.open import open_weights
from crelle.kernels.cpu import i16_gemm
from crelle.models.calibration_model import open_model
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.scale_folds import rotate_values, signs
from crelle.quantizers.schemes.atom import Atom


@pytest.fixture(autouse=True)
def in_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bf16 (AMX) or of 16-bit integers would hide whether two layers compute the same."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(i16_gemm, "usable", lambda device: False)


def test_large_values_are_negative_where_codes_reach_farther() -> None:
    x = torch.rand(300, 128, generator=torch.Generator().manual_seed(1)).log()  # negative, with a long tail
    spec, found = ActivationSpec(4, 32, clip=0.85), signs(-x)
    assert bool((found == -1).all())
    plain, better = ((spec.round(y) - y).square().sum() for y in (-x, -x * found))
    assert float(better) < 0.8 * float(plain)


def test_values_on_principal_axes_compute_the_same(tiny_model: Path) -> None:
    tokens = torch.randint(0, 90, (4, 24), generator=torch.Generator().manual_seed(0))
    layer = Calibrator(open_model(open_weights(tiny_model)), tokens).begin()
    at = layer.full.value_heads()
    before = layer.stats(at.o).hessian.diagonal().view(at.heads, at.head_size)
    rotate_values(layer)
    assert layer.changed
    after = layer.stats(at.o).hessian.diagonal().view(at.heads, at.head_size)
    torch.testing.assert_close(after.sum(1), before.sum(1), rtol=1e-3, atol=1e-6)
    few = at.head_size // 4
    assert float(after.topk(few).values.sum()) > float(before.topk(few).values.sum())
    with torch.no_grad():
        torch.testing.assert_close(layer.block(layer.hidden.full), layer.after, rtol=1e-4, atol=1e-4)


def test_a_prepared_layer_computes_the_same(tiny_model: Path) -> None:
    tokens = torch.randint(0, 90, (4, 24), generator=torch.Generator().manual_seed(0))
    layer = Calibrator(open_model(open_weights(tiny_model)), tokens).begin()
    with torch.no_grad():
        changed = Atom(group=16, outliers=8).before_layer(layer)
        torch.testing.assert_close(layer.block(layer.hidden.full), layer.after, rtol=1e-4, atol=1e-4)
    assert len(changed) == 2  # both norms
    untouched = Calibrator(open_model(open_weights(tiny_model)), tokens).begin()
    assert not Atom(a=8).before_layer(untouched)
    assert not untouched.changed
