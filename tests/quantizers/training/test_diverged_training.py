"""A training whose loss is not finite ends at once with a sentence, and takes nothing with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_runs import fresh_run
from in_process import run
from torch import Tensor

from crelle.errors import NumericsError
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers.training.blockwise import Losses, Training
from crelle.quantizers.training.end_to_end import EndToEnd

TEXT = "Tales of the north wind and the sun, told by the fire. " * 60
RATE = 1e30


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tune") / "q"
    text = CalibrationData(text=TEXT, rows=6, length=32)
    quantize(tiny_model, out, "auto:bits=2.9,tune=none", text=text, device="cpu")
    return out


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    take = EndToEnd.take

    def counting(self: EndToEnd, step: int) -> Tensor:
        taken.append(step)
        return take(self, step)

    monkeypatch.setattr(EndToEnd, "take", counting)
    return taken


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("train", ["scales", "all"])
@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.sample(2)
def test_the_command_stops_and_out_is_as_before(
    train: str, low_memory: bool, checkpoint: Path, steps_taken: list[int], tmp_path: Path
) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(TEXT)
    options = ["--text", text, "--length", 32, "--batch", 2, "--train", train, "--device", "cpu", "--overwrite"]
    options += ["--low-memory"] if low_memory else []
    assert run("tune", checkpoint, out, "--steps", 1, *options).code == 0
    before, taken = contents(out), len(steps_taken)
    done = run("tune", checkpoint, out, "--steps", 500, "--rate", RATE, *options)
    said = " ".join(done.err.split())
    assert done.code == 2
    assert f"after step {len(steps_taken) - taken - 1} of 500 the loss is not finite, at a rate of 1e+30" in said
    assert "choose a smaller --rate" in said
    assert len(steps_taken) - taken < 5
    assert contents(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "text"]  # the next rate needs no --overwrite


def test_a_saved_state_stays(
    checkpoint: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of steps whose losses were finite."""
    state = tmp_path / "state"
    training = Training(steps=20, batch=2, half=False)
    broken = fresh_run(checkpoint, tiny_model, training)
    take = broken.take
    monkeypatch.setattr(broken, "take", lambda step: take(step) * (torch.nan if step == 13 else 1))
    with pytest.raises(NumericsError, match="after step 13 of 20"):
        broken.run(state, save_every=0)
    assert state.exists()
    whole, resumed = (fresh_run(checkpoint, tiny_model, training) for _ in range(2))
    assert resumed.run(state) == pytest.approx(whole.run(), rel=1e-5)


def test_a_model_that_is_broken_before_is_not_called_diverged(checkpoint: Path, tiny_model: Path) -> None:
    broken = fresh_run(checkpoint, tiny_model, Training(steps=20, batch=2, half=False))
    with torch.no_grad():
        for p in broken.coders[0].parameters():
            p.fill_(torch.nan)
    with pytest.raises(NumericsError, match="before the first step"):
        broken.run()


def test_block_by_block(tiny_model: Path, tmp_path: Path) -> None:
    text = CalibrationData(text=TEXT, rows=4, length=32)
    with pytest.raises(NumericsError, match=r"after step \d of 300 .* at a rate of 1e\+30"):
        quantize(
            tiny_model, tmp_path / "q", f"mixed:four=0.25,tune=short,steps=300,rate={RATE:g}", text=text, device="cpu"
        )


def test_losses_of_a_gpu_are_read_every_tenth_step() -> None:
    losses = Losses(Training(steps=25), torch.device("cuda"))
    found: list[Any] = [losses.add(torch.tensor(1.0 if i < 23 else torch.inf)) for i in range(24)]
    assert [i for i, known in enumerate(found) if known] == [9, 19]
    with pytest.raises(NumericsError, match="after step 23 of 25"):
        losses.add(torch.tensor(1.0))
    assert losses.known == [1.0] * 20
