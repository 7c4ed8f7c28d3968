"""kill -9 in the middle of training on one device: a resumed run ends in the bytes of an undisturbed one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tiny_model

SCRIPT = Path(__file__).with_name("killed_training.py")
BLOCKS = "auto:bits=4,search=false,steps=4"
FULL = f"{BLOCKS},tune=full,own=2,end=14"
IN_BLOCKS = ["step", 6]  # the second step of the second layer
IN_TRAINING = ["step", 4 + 12]  # after the second layer, two steps behind the state that was saved


SMALL = {"hidden_size": 36, "intermediate_size": 50, "head_dim": 6}
FOR_GPUS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def killed(tmp_path: Path, sizes: dict[str, int] = SMALL, **options: Any) -> dict[str, Any]:
    """Return what the script prints, for a model of two layers."""
    model = write_tiny_model(tmp_path / "m", num_hidden_layers=2, max_position_embeddings=512, **sizes)
    (tmp_path / "runs").mkdir()
    given = [str(model), str(tmp_path / "runs"), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *given], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same_bytes(found: dict[str, Any]) -> None:
    assert all(found["same"].values()), found
    assert found["left"] == ["killed", "steps", "whole"]


def test_block_by_block(tmp_path: Path) -> None:
    """A layer that was finished is not trained again."""
    found = killed(tmp_path, scheme=BLOCKS, device="cpu", kills=[IN_BLOCKS])
    same_bytes(found)
    assert found["steps"] == [8, 6, 4]


@pytest.mark.parametrize(
    ("train", "low_memory"), [("all", False), ("scales", False), ("all", True)], ids=["all", "scales", "low memory"]
)
@pytest.mark.slow  # of which test_block_by_block is the first part
def test_block_by_block_then_end_to_end(tmp_path: Path, train: str, low_memory: bool) -> None:
    """Killed in the training of a layer, of the whole model, and while its next state is written."""
    kills = [IN_BLOCKS, IN_TRAINING, ["save", 1]]
    found = killed(tmp_path, scheme=f"{FULL},train={train}", device="cpu", kills=kills, low_memory=low_memory)
    same_bytes(found)
    assert found["steps"] == [8 + 14, 6, 4 + 12, 4, 4]


@pytest.mark.parametrize("kill", [["step", 128 + 60], ["step", 2 * 128 + 12]], ids=["in a layer", "end to end"])
def test_trellis_codes(tmp_path: Path, kill: list[object]) -> None:
    """Killed between two shares of the columns: codes that were found stay, and the others come out the same."""
    scheme = FULL.replace("bits=4", "bits=3.6,prefer=quality").replace("steps=4", "steps=128")
    found = killed(tmp_path, scheme=scheme, device="cpu", kills=[kill])
    same_bytes(found)


@pytest.mark.gpu
@pytest.mark.parametrize("train", ["all", "scales"])
def test_on_a_gpu(tmp_path: Path, train: str) -> None:
    """Most steps are replays of a CUDA graph; sequences are long enough for a backward pass in several tiles."""
    kills = [IN_BLOCKS, IN_TRAINING]
    found = killed(tmp_path, FOR_GPUS, scheme=f"{FULL},train={train}", device="cuda", kills=kills, length=256)
    same_bytes(found)
    assert found["steps"] == [8 + 14, 6, 4 + 12, 4]
