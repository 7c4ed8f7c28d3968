"""End-to-end trainings of a small checkpoint, whole and killed."""

from pathlib import Path

import pytest
import torch

from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.end_to_end import EndToEnd, Network, drawn
from crelle.quantizers.training.ste import trainable
from crelle.quantizers.training.teacher import Teacher


def fresh_run(checkpoint: Path, teacher: Path, training: Training, device: str = "cpu", what: str = "all") -> EndToEnd:
    """All weights of a checkpoint, or its scales, on random tokens."""
    tokens = torch.randint(0, 256, (8, 24), generator=torch.Generator().manual_seed(0))
    c, where = Checkpoint(checkpoint), torch.device(device)
    student = Network.of(CalibrationModel(c, where), recompute=training.low_memory)
    coders = []
    for block in student.blocks:
        for name, linear in block.linears().items():
            linear.coder = trainable(c.matrix(name).to(where), None, what)
            coders.append(linear.coder)
    model, numbers = CalibrationModel(open_weights(teacher), where), drawn(len(tokens), training)
    full = Teacher.of(model, tokens, numbers, where, half=training.half)
    return EndToEnd(student, coders, full, tokens, training, where)


def killed_at_10(run: EndToEnd, state: Path) -> None:
    """Train up to the tenth step, whose state is saved, and no further."""

    def dying(done: int, total: int, note: str) -> None:
        if done == 10:
            run._save(state)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(state, dying)
