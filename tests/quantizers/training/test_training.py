"""Training through the rounding: gradients, falling losses, runs that die and go on, what is written in the end."""

from pathlib import Path

import pytest
import torch
from end_to_end_runs import fresh_run, killed_at_10
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import FormatError, SchemeError
from crelle.formats.affine import AffineTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.models.loader import build
from crelle.quantize_job.data import CalibrationData, rows_of
from crelle.quantize_job.run import quantize
from crelle.quantize_job.tune import tune_checkpoint
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.schemes.bcq import BCQ
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.training.blockwise import Training, relative_error, tune_block
from crelle.quantizers.training.end_to_end import picked
from crelle.quantizers.training.ste import ScaleTuner, STEWeight, trainable

CPU = torch.device("cpu")
TEXT = "Tales of the north wind and the sun, told by the fire. " * 60


def affine(N: int, K: int, bits: int, group: int, seed: int = 0) -> AffineTensor:
    random = torch.Generator().manual_seed(seed)
    C = -(-K // group)
    codes = torch.randint(0, 2**bits, (N, K), generator=random, dtype=torch.uint8)
    scale = (0.1 + torch.rand(N, C, generator=random)).half()
    return AffineTensor.from_codes(codes, bits, scale, torch.randn(N, C, generator=random).half(), group)


@settings(deadline=None)  # the first call loads what it needs
@given(bits=st.integers(1, 5), K=st.integers(1, 40), group=st.integers(1, 40), seed=st.integers(0, 99))
def test_training_begins_at_the_tensor_it_was_given(bits: int, K: int, group: int, seed: int) -> None:
    start = affine(3, K, bits, min(group, K), seed)
    weight = start.dequantize() + torch.randn(3, K)
    for coder in (STEWeight(start), STEWeight(start, weight), ScaleTuner(start)):
        torch.testing.assert_close(coder(), start.dequantize(), rtol=1e-5, atol=1e-5)
        again = coder.export()
        assert torch.equal(again.planes, start.planes)
        torch.testing.assert_close(again.dequantize(), start.dequantize(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantizer", [BCQ(bits=3, group=16), BCQ(bits=2, group=16, bias=False), RTN(bits=3, group=16)])
def test_frozen_codes_stay_and_their_scales_train(quantizer: BCQ | RTN) -> None:
    start = quantizer.fit(torch.randn(4, 40))
    coder = ScaleTuner(start)
    torch.testing.assert_close(coder(), start.dequantize(), rtol=1e-5, atol=1e-5)
    coder().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in coder.parameters())
    with torch.no_grad():
        for p in coder.parameters():
            p *= 0.5
    changed = coder.export()
    assert torch.equal(changed.planes, start.planes)  # type: ignore[attr-defined]
    torch.testing.assert_close(changed.dequantize(), start.dequantize() / 2, rtol=2e-3, atol=2e-3)


def test_the_gradient_is_straight_through_inside_and_nothing_outside() -> None:
    start = AffineTensor.from_codes(torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8), 2, *torch.ones(2, 1, 1).half(), 4)
    coder = STEWeight(start)
    with torch.no_grad():
        coder.w += torch.tensor([-2.0, 0.25, -0.25, 2.0])  # the first and the last leave the grid
    coder().sum().backward()
    assert torch.equal(coder.w.grad.flatten(), torch.tensor([0.0, 1.0, 1.0, 0.0]))  # type: ignore[union-attr]
    # d/dscale: q - v inside (-0.25, +0.25), q outside (0 and 3); d/dlow: 1 for each outside
    assert float(coder.scale.grad) == pytest.approx(3.0)  # type: ignore[arg-type]
    assert float(coder.low.grad) == pytest.approx(2.0)  # type: ignore[arg-type]


def test_what_trains_is_what_is_stored() -> None:
    """After any training the exported tensor dequantizes to exactly the weight that the last step used."""
    coder = STEWeight(affine(6, 50, 3, 16), torch.randn(6, 50))
    with torch.no_grad():
        for p in coder.parameters():
            p += 0.3 * torch.randn_like(p)
    torch.testing.assert_close(coder.export().dequantize(), coder(), rtol=0, atol=1e-6)


def test_a_block_comes_nearer_to_its_target(tiny_model: Path) -> None:
    opened = CalibrationModel(open_weights(tiny_model))
    tokens = torch.randint(0, 256, (12, 24), generator=torch.Generator().manual_seed(0))
    walk = Calibrator(opened, tokens, half=False).begin()
    uniform = RTN(bits=2, group=24)
    coders = []
    for linear in walk.block.linears().values():
        q = uniform.fit(linear.weight)
        low = -(q.scale.float() * q.zeros()).half()
        start = AffineTensor.from_codes(q.codes(), 2, q.scale, low, 24)
        linear.coder = trainable(start, linear.weight, "all")
        coders.append(linear.coder)
    with torch.no_grad():
        before = float(relative_error(walk.block(walk.hidden.quantized), walk.after))
    losses = tune_block(
        walk.block, coders, walk.hidden.quantized, walk.after, Training(steps=40, rate=2e-2, half=False), CPU
    )
    with torch.no_grad():
        after = float(relative_error(walk.block(walk.hidden.quantized), walk.after))
    assert len(losses) == 40
    assert after < 0.8 * before


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tune") / "q"
    quantize(
        tiny_model, out, "auto:bits=2.9,tune=none", text=CalibrationData(text=TEXT, rows=6, length=32), device="cpu"
    )
    return out


@pytest.fixture(scope="module")
def untrained(checkpoint: Path, tiny_model: Path) -> float:
    return divergence(checkpoint, tiny_model)


@pytest.mark.parametrize(("what", "steps"), [("scales", 45), ("all", 90)])  # weights take longer; both with a warm-up
def test_the_whole_model_comes_nearer_to_its_teacher(
    checkpoint: Path, untrained: float, tiny_model: Path, tmp_path: Path, what: str, steps: int
) -> None:
    training = Training(steps=steps, batch=8, rate=3e-2, scale_rate=1e-2, half=False)
    report = tune_checkpoint(
        checkpoint, tiny_model, tmp_path / "t", training, text=TEXT, own=4, length=32, what=what, device="cpu"
    )
    assert len(report.losses) == steps
    assert divergence(tmp_path / "t", tiny_model) < 0.95 * untrained
    before, after = Checkpoint(checkpoint), Checkpoint(tmp_path / "t")
    assert {m: s["format"] for m, s in after.specs.items()} == {m: s["format"] for m, s in before.specs.items()}
    same = [torch.equal(before.matrix(m).planes, after.matrix(m).planes) for m in _affine(before)]
    assert all(same) if what == "scales" else not all(same)
    assert not list((tmp_path / "t").glob("*.tmp"))


def divergence(student: Path, teacher: Path) -> float:
    """Mean over the text's tokens of KL(teacher, student)."""
    rows = rows_of(Tokenizer(teacher), TEXT, 32)
    a, b = (build(open_weights(p), CPU) for p in (teacher, student))
    theirs, mine = (m(rows, m.new_cache(len(rows))).log_softmax(-1) for m in (a, b))
    return float((theirs.exp() * (theirs - mine)).sum(-1).mean())


def _affine(c: Checkpoint) -> list[str]:
    return [m for m, spec in c.specs.items() if spec["format"] == "affine"]


def test_without_a_teacher_the_text_is_the_goal(checkpoint: Path, tmp_path: Path) -> None:
    training = Training(steps=30, batch=4, rate=2e-2, scale_rate=2e-2, half=False)
    report = tune_checkpoint(checkpoint, None, tmp_path / "t", training, text=TEXT, length=32, device="cpu")
    assert sum(report.losses[-5:]) < 0.95 * sum(report.losses[:5])
    with pytest.raises(SchemeError, match="teacher"):
        tune_checkpoint(checkpoint, None, tmp_path / "u", training, text=TEXT, own=3, length=32, device="cpu")


def test_a_training_that_died_goes_on_from_its_state(checkpoint: Path, tiny_model: Path, tmp_path: Path) -> None:
    training, state = Training(steps=20, batch=2, half=False), tmp_path / "state"
    whole, resumed = (fresh_run(checkpoint, tiny_model, training) for _ in range(2))
    losses = whole.run()
    killed_at_10(fresh_run(checkpoint, tiny_model, training), state)
    assert resumed.run(state) == pytest.approx(losses, rel=1e-5)
    for a, b in zip(whole.coders, resumed.coders, strict=True):
        torch.testing.assert_close(a(), b(), rtol=1e-4, atol=1e-5)
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(FormatError, match="delete it to start over"):
        fresh_run(checkpoint, tiny_model, training).run(state)


def test_auto_in_full(tiny_model: Path, tmp_path: Path) -> None:
    scheme = "auto:bits=2.9,tune=full,steps=2,end=4,own=2"
    report = quantize(
        tiny_model, tmp_path / "q", scheme, text=CalibrationData(text=TEXT, rows=4, length=32), device="cpu"
    )
    assert report.bits_per_weight <= 2.9
    assert Checkpoint(tmp_path / "q").scheme == scheme
    assert [f.name for f in tmp_path.iterdir()] == ["q"]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["gptq:bits=3,group=24,free=true", "mixed:group=16,four=0.3,outliers=0.01"])
def test_a_gpu_has_the_gradients_of_a_cpu(tiny_model: Path, tmp_path: Path, scheme: str) -> None:
    text = CalibrationData(text=TEXT, rows=4, length=24)
    made = quantize(tiny_model, tmp_path / "start", scheme, text=text, device="cpu").out
    found: dict[str, tuple[float, list[torch.Tensor]]] = {}
    for device in ("cpu", "cuda"):
        run = fresh_run(made, tiny_model, Training(steps=3, batch=4, half=False), device)
        with torch.no_grad():  # off their levels: on them, the gradients of scales are what rounding leaves
            for coder in run.coders:
                coder.w += 0.3 * torch.arange(coder.w.numel(), device=device).sin().view_as(coder.w)
        pick = picked(0, len(run.tokens), run.t)
        loss = run._loss_of(*(t.to(device) for t in (run.tokens[pick], run.teacher.hidden(pick))))
        loss.backward()
        parameters = [p for coder in run.coders for p in coder.parameters()]
        found[device] = float(loss.detach()), [p.grad.cpu() for p in parameters if p.grad is not None]
    (loss, wanted), (near, grads) = found["cpu"], found["cuda"]
    assert near == pytest.approx(loss, rel=1e-3)
    assert len(grads) == len(wanted) > 0
    for mine, theirs in zip(grads, wanted, strict=True):
        assert float((mine - theirs).norm()) <= 2e-3 * float(theirs.norm()) + 1e-9
