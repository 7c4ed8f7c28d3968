"""Incremental training of trellis codes: gradients, codes found in shares, falling losses, runs that die and go on."""

from pathlib import Path

import pytest
import torch
from end_to_end_runs import fresh_run, killed_at_10
from hypothesis import given
from hypothesis import strategies as st
from problems import correlated, output_error, weight

from crelle.formats.base import QuantTensor
from crelle.formats.storage.open import open_weights
from crelle.formats.trellis import UNIT, TrellisTensor
from crelle.formats.wrappers.rotated import RotatedTensor
from crelle.models.calibration_model import CalibrationModel
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.trained import TrainedConfig
from crelle.quantizers.schemes.trellis import Trellis
from crelle.quantizers.solvers.trellis_solver import best_scales, compensated
from crelle.quantizers.training.blockwise import Training, relative_error
from crelle.quantizers.training.incremental import IncrementalTrellis, events
from crelle.quantizers.training.ste import RowScales, trainable

TEXT = "Tales of the north wind and the sun, told by the fire. " * 60
KINDS = [Trellis(bits=2), Trellis(bits=3), Trellis(bits=1.5, rotate=False), Trellis(bits=2, hadamard="any")]


def fitted(config: Trellis, N: int = 40, K: int = 72) -> tuple[torch.Tensor, QuantTensor, Stats]:
    """Return a weight, its codes and the stats that they were found for; neither 32 nor a power of two divide all."""
    w, stats = weight(N, K), correlated(K)
    return w, config.fit(w, stats), stats


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_it_begins_and_ends_with_the_tensor_that_it_was_given(config: Trellis) -> None:
    _, start, _ = fitted(config)
    coder = IncrementalTrellis(start)  # type: ignore[arg-type]
    for share in (1.0, 0.5, 0.0):
        coder.free(share)
        torch.testing.assert_close(coder(), start.dequantize(), rtol=1e-4, atol=1e-5)
    again = IncrementalTrellis(start).export()  # type: ignore[arg-type]
    assert all(torch.equal(t, start.tensors()[name]) for name, t in again.tensors().items())
    assert isinstance(trainable(start, None, "all"), IncrementalTrellis)
    assert isinstance(trainable(start, None, "scales"), RowScales)


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_gradients_are_those_of_the_equation(config: Trellis) -> None:
    """W = scale (values + step w mask R), R the rotation's matrix: gradients by hand, in f64."""
    _, start, _ = fitted(config)
    coder = IncrementalTrellis(start)  # type: ignore[arg-type]
    coder.free(0.5)
    with torch.no_grad():
        coder.w += 0.1 * torch.randn_like(coder.w)
        coder.scale.fill_(1)
    g = torch.randn(start.shape, generator=torch.Generator().manual_seed(4))
    (coder() * g).sum().backward()
    K, end = start.shape[1], int(coder.encoded)
    R = torch.eye(K, dtype=torch.float64)
    R = R if coder.rotation is None else coder.rotation.undone(R)
    unit, latent = coder.unit.double(), coder.w.detach().double() * coder.step
    latent[:, :end] = 0
    wanted = (g.double() * unit) @ R.T * coder.step
    wanted[:, :end] = 0
    assert coder.w.grad is not None
    torch.testing.assert_close(coder.w.grad.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    whole = coder.values.double() + latent @ R
    by_scale = (g.double() * whole * unit).sum(1, keepdim=True)
    assert coder.scale.grad is not None
    torch.testing.assert_close(coder.scale.grad.double(), by_scale, rtol=1e-3, atol=1e-3)


def test_later_columns_move_to_where_the_error_is_least() -> None:
    """Oracle: the normal equations of the damped Hessian, in f64."""
    K, end, begin = 40, 24, 12
    stats = correlated(K)
    by = Trellis(rotate=False).blocks(stats)
    rows, error = torch.randn(5, K), torch.randn(5, end - begin)
    found = compensated(rows[:, end:], error, by, end) - rows[:, end:]
    H = by.damped.double()
    wanted = torch.linalg.solve(H[end:, end:], H[end:, begin:end] @ error.double().T).T
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_codes_found_in_shares_are_as_good_as_those_found_at_once(config: Trellis) -> None:
    w, start, stats = fitted(config)
    target, by = config.aim(w, stats)
    errors = []
    for shares in ((1.0,), (0.3, 0.6, 0.9, 1.0)):
        coder = IncrementalTrellis(start)  # type: ignore[arg-type]
        coder.free(0.0, target, by)
        torch.testing.assert_close(coder(), w, rtol=1e-2, atol=1e-3)  # nothing is encoded yet
        for share in shares:
            before = coder.rings.clone()
            done = int(coder.encoded) // 4
            coder.encode(share, by)
            assert torch.equal(coder.rings[:, :done], before[:, :done]), "earlier codes stay"
        made = coder.export()
        torch.testing.assert_close(made.dequantize(), coder(), rtol=1e-4, atol=1e-5)
        inner = made.inner if isinstance(made, RotatedTensor) else made
        values = inner.with_scales({"scale": torch.ones_like(inner.scale)}).dequantize() / UNIT
        best = best_scales(target, by.damped, values, inner.scale.float())
        errors.append(output_error(made.with_scales({"scale": best}), w, stats))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    assert errors[0] == pytest.approx(output_error(start, w, stats), rel=0.02)


def test_a_matrix_with_columns_without_codes_is_not_exported() -> None:
    coder = IncrementalTrellis(fitted(Trellis())[1])  # type: ignore[arg-type]
    coder.free(0.5)
    with pytest.raises(RuntimeError, match="columns have no codes"):
        coder.export()


@given(steps=st.integers(1, 5000))
def test_all_columns_have_codes_before_the_last_step(steps: int) -> None:
    shares: list[float] = []
    for step, act in sorted(events(steps, shares.append).items()):
        assert 0 <= step < steps
        act()
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_layer_comes_nearer_to_its_target(tiny_model: Path) -> None:
    tokens = torch.randint(0, 256, (12, 24), generator=torch.Generator().manual_seed(0))
    config = Auto(bits=2.6, search=False, prefer="quality", rate=3e-2)
    errors = {}
    for steps in (0, 200):
        layer = Calibrator(CalibrationModel(open_weights(tiny_model)), tokens, half=False).begin()
        found = layer.fit(lambda name, w, stats: config.fit(w, stats))
        trained = Auto(**{**_settings(config), "steps": steps}).after_layer(layer, found)
        layer.put(trained)
        assert all(isinstance(w, RotatedTensor) and isinstance(w.inner, TrellisTensor) for w in trained.values())
        with torch.no_grad():
            errors[steps] = float(relative_error(layer.block(layer.hidden.quantized), layer.after))
    assert errors[200] < 0.9 * errors[0], errors


def _settings(config: TrainedConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in ("bits", "search", "prefer", "rate")}


@pytest.fixture(scope="module")
def checkpoint(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trellis codes, and affine grids where they fit better."""
    text = CalibrationData(text=TEXT, rows=4, length=32)
    out = tmp_path_factory.mktemp("trellis") / "q"
    scheme = "auto:bits=3.6,prefer=quality,search=false,tune=none"
    quantize(
        small_model, out, scheme, text=text, device="cpu", overrides={"*.o_proj": "gptq:bits=3,group=12,free=true"}
    )
    return out


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_training_that_died_goes_on_from_its_state(
    checkpoint: Path, small_model: Path, tmp_path: Path, low_memory: bool
) -> None:
    """Killed between two shares; codes, weights and scales are those of a run that nothing disturbed."""
    training = Training(steps=18, batch=2, half=False, low_memory=low_memory)
    whole, resumed = (fresh_run(checkpoint, small_model, training) for _ in range(2))
    losses = whole.run()
    killed_at_10(fresh_run(checkpoint, small_model, training), tmp_path / "state")
    assert resumed.run(tmp_path / "state") == losses
    for a, b in zip(whole.coders, resumed.coders, strict=True):
        one, other = a.export().tensors(), b.export().tensors()  # type: ignore[operator]
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_whole_model_trains_to_less_loss_than_its_scales(tiny_model: Path, tmp_path: Path) -> None:
    text = CalibrationData(text=TEXT, rows=4, length=32)
    scheme = "auto:bits=2.6,prefer=quality,search=false,tune=none"
    made = quantize(tiny_model, tmp_path / "q", scheme, text=text, device="cpu").out
    last = {}
    for what in ("scales", "all"):
        training = Training(steps=120, batch=8, rate=2e-2, scale_rate=1e-2, half=False)
        last[what] = sum(fresh_run(made, tiny_model, training, what=what).run()[-10:])
    assert last["all"] < 0.8 * last["scales"]


@pytest.mark.gpu
def test_a_gpu_has_the_gradients_and_codes_of_a_cpu(checkpoint: Path, small_model: Path) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        run = fresh_run(checkpoint, small_model, Training(steps=30, batch=4, half=False), device)
        losses = [float(run.take(step)) for step in range(30)]  # most of them replays of a CUDA graph
        run.step.close()
        found[device] = losses
        for coder in run.coders:
            torch.testing.assert_close(coder.export().dequantize(), coder(), rtol=1e-3, atol=1e-4)  # type: ignore[operator]
    assert found["cuda"][:8] == pytest.approx(found["cpu"][:8], rel=2e-2)
    assert found["cuda"][-1] < 1.3 * found["cpu"][-1]
