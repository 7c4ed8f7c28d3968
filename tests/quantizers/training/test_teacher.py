"""What a student is distilled from: the full-precision model's states, whichever layers fit at a time."""

import errno
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import write_random

from crelle.errors import CapacityError
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import open_model
from crelle.quantizers.calibration.layer_api import half_products
from crelle.quantizers.training import teacher
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.end_to_end import Network, drawn, picked
from crelle.quantizers.training.teacher import Teacher

CPU = torch.device("cpu")


def tokens(count: int = 11, length: int = 13) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("Gemma2", {}), ("GPT2", {}), ("OPT", {"word_embed_proj_dim": 64})],  # the last projects its states
)
def test_states_are_those_of_the_whole_model(tmp_path: Path, family: str, changes: dict[str, int]) -> None:
    weights, rows = open_weights(write_random(tmp_path / "model", family, **changes)), tokens()
    chosen = torch.tensor([1, 2, 4, 7, 10])
    found = Teacher.of(open_model(weights), rows, chosen, CPU, batch=2, half=False)
    with torch.no_grad():
        whole = Network.of(open_model(weights)).hidden(rows)
    pick = torch.tensor([10, 2, 2, 7])
    torch.testing.assert_close(found.hidden(pick), whole[pick], rtol=1e-5, atol=1e-6)
    assert len(found.states) == len(chosen)


def test_layers_run_in_groups_where_not_all_fit(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, rows = open_weights(tiny_model), tokens()
    every = torch.arange(len(rows))
    whole = Teacher.of(open_model(weights), rows, every, CPU, half=False)
    sizes, before, blocks = [], [], teacher._blocks

    def counted(*args: object) -> object:
        assert not any(block() for block in before), "layers that have run are still in memory"
        found = blocks(*args)  # type: ignore[arg-type]
        before.extend(map(weakref.ref, found))
        sizes.append(len(found))
        return found

    monkeypatch.setattr(teacher, "_blocks", counted)
    told: list[tuple[int, int, str]] = []
    few = Teacher.of(
        open_model(weights), rows, every, CPU, half=False, memory=1, progress=lambda *about: told.append(about)
    )
    assert sizes == [1] * open_model(weights).layers
    assert len(sizes) > 1
    assert torch.equal(few.hidden(every), whole.hidden(every))
    assert [done for done, _, _ in told] == list(range(1, told[-1][1] + 1))


def test_states_that_memory_does_not_hold_are_in_a_file(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = open_model(open_weights(tiny_model)), tokens()
    every = torch.arange(len(rows))
    kept = Teacher.of(model, rows, every, CPU, half=False, folder=tmp_path)
    monkeypatch.setattr(teacher, "_ON_HOST", 0)
    mapped = []
    from_file = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda name, **sizes: mapped.append(name) or from_file(name, **sizes))
    found = Teacher.of(model, rows, every, CPU, half=False, memory=1, folder=tmp_path)
    assert [Path(name).parent for name in mapped] == [tmp_path]
    assert not list(tmp_path.iterdir())  # nothing is left behind, even by a process that is killed
    assert torch.equal(found.hidden(every), kept.hidden(every))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(CapacityError, match="No space left"):
        Teacher.of(model, rows, every, CPU, half=False, memory=1, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_what_is_drawn_is_run_and_every_step_finds_it(tiny_model: Path) -> None:
    rows, training = tokens(200), Training(steps=5, batch=3)
    numbers = drawn(len(rows), training)
    assert len(numbers) <= 15
    found = Teacher.of(open_model(open_weights(tiny_model)), rows, numbers, CPU, half=True)
    assert len(found.states) == len(numbers)
    for step in range(5):
        assert found.hidden(picked(step, len(rows), training)).shape[:2] == (3, rows.shape[1])
    none = drawn(len(rows), replace(training, steps=0))
    assert none.numel() == 0
    assert not len(Teacher.of(open_model(open_weights(tiny_model)), rows, none, CPU, half=True).states)
    never = next(i for i in range(len(rows)) if i not in numbers.tolist())
    with pytest.raises(AssertionError, match="not to be drawn"):
        found.hidden(torch.tensor([int(numbers[0]), never]))


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [None, 1])
def test_on_a_gpu_states_are_bf16(tiny_model: Path, memory: int | None) -> None:
    device, rows = torch.device("cuda"), tokens()
    weights, every = open_weights(tiny_model), torch.arange(len(rows))
    options = {"half": True, "memory": memory}
    found, again = (Teacher.of(open_model(weights, device), rows, every, device, **options) for _ in range(2))
    assert found.states.dtype == torch.bfloat16
    assert found.states.device.type == ("cuda" if memory is None else "cpu")
    assert torch.equal(found.hidden(every), again.hidden(every))
    with torch.no_grad(), half_products(device):
        whole = Network.of(open_model(weights, device)).hidden(rows.to(device))
    error = (found.hidden(every).to(device).float() - whole).norm() / whole.norm()
    assert error < (0.004 if memory is None else 0.02)
