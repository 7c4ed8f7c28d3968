"""Training in less memory: moments of 8 bits against exact Adam, the whole model, and runs that die and go on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from end_to_end_runs import fresh_run, killed_at_10
from torch import nn

from crelle.errors import FormatError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantize_job.tune import tune_checkpoint
from crelle.quantizers.training import finetune
from crelle.quantizers.training.adam8 import LowMemoryStep, Moments
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.finetune import fast_bytes, too_large_for

CPU = torch.device("cpu")
SCALES = "auto:bits=2.9,tune=full,steps=2,end=4,own=2,train=scales"
TEXT = "Tales of the north wind and the sun, told by the fire. " * 60


class _Weights(nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)
        self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("size", [1, 255, 1000])
def test_moments_of_8_bits_follow_exact_adam(size: int) -> None:
    """Gradients of two decades of sizes in a block, with noise: the same place but for a few percent of the way."""
    chance = torch.Generator().manual_seed(0)
    scale = 10 ** (2 * torch.rand(size, generator=chance) - 5)
    drift = torch.randn(size, generator=chance)
    p = nn.Parameter(torch.zeros(size))
    exact = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    mine, moments = torch.zeros(size), Moments(torch.zeros(size))
    for step in range(60):
        g = scale * (drift + torch.randn(size, generator=chance))
        p.grad = g.clone()
        exact.step()
        moments.update(mine, g, 0.01, step + 1, chance)
    off = (mine - p.detach()).norm() / p.detach().norm()
    assert off < 0.1
    assert sum(t.nbytes for t in moments.tensors.values()) <= 2.1 * (size + 256)


def test_a_moment_shrinks_when_gradients_stop() -> None:
    """With the nearest code it would stay: 0.95 of a small code rounds to the same code."""
    chance = torch.Generator().manual_seed(0)
    p, moments = torch.zeros(256), Moments(torch.zeros(256))
    g = torch.full((256,), 1e-3)
    g[0] = 1.0
    moments.update(p, g, 0.0, 1, chance)
    before = moments.tensors["second"].float().mean()
    quiet = torch.zeros(256)
    quiet[0] = 1.0  # the block's maximum stays, the others decay
    for step in range(80):
        moments.update(p, quiet, 0.0, step + 2, chance)
    assert moments.tensors["second"][:, 1:].float().mean() < 0.55 * before


def test_gradients_do_not_outlive_their_step() -> None:
    coder = _Weights(torch.randn(4, 300))
    step = LowMemoryStep(lambda: coder.w.square().sum() * coder.scale.sum(), [coder], Training(steps=10), CPU)
    first = float(step(0))
    assert coder.w.grad is None
    assert coder.scale.grad is None
    assert float([step(i) for i in range(1, 10)][-1]) < first


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tune") / "q"
    text = CalibrationData(text=TEXT, rows=6, length=32)
    quantize(tiny_model, out, "auto:bits=2.9,tune=none", text=text, device="cpu")
    return out


@pytest.mark.parametrize("what", ["scales", "all"])
@pytest.mark.sample(2)
def test_the_loss_falls_as_it_does_the_fast_way(checkpoint: Path, tiny_model: Path, tmp_path: Path, what: str) -> None:
    training = Training(steps=40, batch=8, rate=3e-2, scale_rate=1e-2, half=False)
    losses = {}
    for low in (False, True):
        options = {"text": TEXT, "length": 32, "what": what, "device": "cpu", "low_memory": low}
        losses[low] = tune_checkpoint(checkpoint, tiny_model, tmp_path / f"{low}", training, **options).losses  # type: ignore[arg-type]
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.02)  # the teacher's weights are bf16
    fell = {low: sum(of[:5]) - sum(of[-5:]) for low, of in losses.items()}
    assert fell[True] > 0.7 * fell[False] > 0


def test_a_training_that_died_goes_on_to_the_same_weights(checkpoint: Path, tiny_model: Path, tmp_path: Path) -> None:
    training, state = Training(steps=20, batch=2, half=False, low_memory=True), tmp_path / "state"
    whole, resumed = (fresh_run(checkpoint, tiny_model, training) for _ in range(2))
    whole.run()
    killed_at_10(fresh_run(checkpoint, tiny_model, training), state)
    resumed.run(state)
    for a, b in zip(whole.coders, resumed.coders, strict=True):
        torch.testing.assert_close(a(), b(), rtol=1e-5, atol=1e-6)
    with pytest.raises(FormatError, match="not the state of this training"):
        fresh_run(checkpoint, tiny_model, replace(training, low_memory=False)).run(state)


def test_scales_alone_by_the_scheme(tiny_model: Path, tmp_path: Path) -> None:
    text = CalibrationData(text=TEXT, rows=4, length=32)
    quantize(tiny_model, tmp_path / "q", SCALES, text=text, device="cpu")
    assert Checkpoint(tmp_path / "q").scheme == SCALES


def test_large_models_take_the_way_with_less_memory(checkpoint: Path) -> None:
    weights = 26 * sum(N * K for N, K in _shapes(checkpoint))
    assert weights < fast_bytes(Checkpoint(checkpoint), 8 * 512) < 100 * weights

    need = fast_bytes(Checkpoint(checkpoint), 8 * 512)
    assert not too_large_for(CPU, Checkpoint(checkpoint), 8, 512)
    assert not too_large_for(CPU, Checkpoint(checkpoint), 8, 512, memory=need)
    assert too_large_for(CPU, Checkpoint(checkpoint), 8, 512, memory=need - 1)


def test_a_limit_on_memory_is_one_on_training_too(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(finetune, "too_large_for", lambda *_, memory: seen.append(memory) or True)
    text = CalibrationData(text=TEXT, rows=2, length=32)
    quantize(tiny_model, tmp_path / "out", SCALES, text=text, memory=10**9, device="cpu")
    assert seen == [10**9]


def _shapes(path: Path) -> list[tuple[int, int]]:
    return [tuple(s["shape"]) for m, s in Checkpoint(path).specs.items() if ".layers." in m]
