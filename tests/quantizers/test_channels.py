"""Free changes of a layer before its activations are rounded: it computes the same, and the error falls."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from crelle.formats.activations import ActivationSpec
from crelle.formats.open import open_weights
from crelle.models.calibration_model import open_model
from crelle.quantizers.atom import Atom
from crelle.quantizers.calibrate import Calibrator
from crelle.quantizers.channels import clustered, smoothing
from crelle.quantizers.scale_folds import rotate_values


def rounding_error(x: Tensor, w: Tensor, perm: Tensor) -> float:
    spec = ActivationSpec(4, 32, 16)
    return float(((spec.round(x, perm) - x) @ w.T).square().sum())


def test_channels_that_are_large_together_share_a_group() -> None:
    random = torch.Generator().manual_seed(0)
    topic = torch.randint(0, 4, (400,), generator=random)
    member = torch.arange(128) % 4
    x = torch.randn(400, 128, generator=random) * torch.where(topic[:, None] == member, 8.0, 1.0)
    order = clustered(x, 32)
    assert sorted(order.tolist()) == list(range(128))
    assert all(len(set(member[part].tolist())) == 1 for part in order.split(32))
    spec = ActivationSpec(4, 32)
    plain, better = ((spec.round(x, p) - x).square().sum() for p in (torch.arange(128), order))
    assert float(better) < 0.5 * float(plain)


@pytest.mark.parametrize("K", [1, 31, 32, 70])
def test_an_order_names_every_channel_once(K: int) -> None:
    x = torch.randn(20, K, generator=torch.Generator().manual_seed(K))
    x[:, K // 2] = 0
    assert sorted(clustered(x, 32).tolist()) == list(range(K))


def test_smoothing_lowers_the_error_of_rounded_inputs() -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(300, 128, generator=random) * torch.exp(torch.randn(128, generator=random))
    w = torch.randn(64, 128, generator=random) * torch.exp(torch.randn(128, generator=random))
    energy = x.square().mean(0)
    s = smoothing(energy, w)
    assert abs(float(s.log().mean())) < 1e-5
    before = rounding_error(x, w, energy.argsort())
    assert rounding_error(x / s, w * s, (energy / s.square()).argsort()) < 0.8 * before
    assert bool(smoothing(torch.zeros(128), torch.zeros(3, 128)).isfinite().all())


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
        changed = Atom(group=16, outliers=8, smooth=True).before_layer(layer)
        torch.testing.assert_close(layer.block(layer.hidden.full), layer.after, rtol=1e-4, atol=1e-4)
    assert len(changed) == 2  # both norms
    untouched = Calibrator(open_model(open_weights(tiny_model)), tokens).begin()
    assert not Atom(a=8).before_layer(untouched)
    assert not untouched.changed
