"""The plan of `auto` outlives a kill: a resumed run takes it, and ends in the same bytes."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_model

from crelle.errors import FormatError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers.schemes.auto import Auto

pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul"),  # said once on CPUs without bf16 products
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # its threads are not needed after the fork
]
AUTO = "auto:bits=4.5,steps=2"
FULL = "auto:bits=4.5,tune=full,steps=2,end=2,own=2"
TEXT = CalibrationData(text="It was a small text to calibrate on, and to train on as well. " * 40, rows=4, length=32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m", num_hidden_layers=2)


def run(model: Path, out: Path, scheme: str = AUTO, **options: Any) -> Any:
    return quantize(model, out, scheme, text=TEXT, device="cpu", **options)


def killed(model: Path, out: Path, at: str, scheme: str = AUTO) -> None:
    """Run in a fork of this process, which ends by kill -9 when its progress comes to something."""

    def progress(done: int, total: int, what: str) -> None:
        if what.startswith(at):
            os.kill(os.getpid(), signal.SIGKILL)

    if (pid := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # those of this process are not in its fork
            run(model, out, scheme, progress=progress)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def contents(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


def never(*_: Any, **__: Any) -> dict[str, str]:
    raise AssertionError("searched a second time")


@pytest.mark.parametrize("scheme", [AUTO, FULL])
@pytest.mark.parametrize("at", ["model.layers.0", "model.layers.1"])
@pytest.mark.sample(2)
def test_a_killed_run_does_not_search_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, scheme: str
) -> None:
    out = tmp_path / "out"
    killed(model, out, at, scheme)
    assert (tmp_path / "out.plan.json").is_file()
    with monkeypatch.context() as m:
        m.setattr(Auto, "plan", never)
        run(model, out, scheme, resume=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    if scheme == AUTO:  # threads may change the sums of a training
        run(model, tmp_path / "whole", scheme)
        assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("at", ["search, forward", "search, output head", "search, backward"])
def test_a_run_killed_while_it_searches_begins_anew(model: Path, tmp_path: Path, at: str) -> None:
    killed(model, tmp_path / "out", at)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    run(model, tmp_path / "out", resume=True)
    assert Checkpoint(tmp_path / "out").scheme == AUTO


def test_a_plan_from_something_else_is_not_taken(model: Path, tmp_path: Path) -> None:
    killed(model, tmp_path / "out", "model.layers.0")
    before = (tmp_path / "out.plan.json").read_bytes()
    with pytest.raises(FormatError, match=r"cannot resume: .*plan\.json was written for another"):
        run(model, tmp_path / "out", AUTO.replace("4.5", "5.5"), resume=True)
    assert (tmp_path / "out.plan.json").read_bytes() == before
    run(model, tmp_path / "out", AUTO.replace("4.5", "5.5"), overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]


@pytest.mark.parametrize("what", ["a text", "json", "a folder", "a link"])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_file_of_the_users_is_kept(model: Path, tmp_path: Path, what: str, options: dict[str, bool]) -> None:
    path = tmp_path / "out.plan.json"
    if what == "a folder":
        path.mkdir()
    elif what == "a link":
        (tmp_path / "mine").write_text(json.dumps({"planned_from": {}}))
        path.symlink_to("mine")
    else:
        path.write_text("mine" if what == "a text" else "{}")
    with pytest.raises(FormatError, match="not the plan of an interrupted run"):
        run(model, tmp_path / "out", **options)
    assert path.is_dir() == (what == "a folder")
    assert what == "a folder" or path.read_text() in ("mine", "{}", '{"planned_from": {}}')


def test_a_matrix_that_is_named_keeps_its_scheme(model: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    run(model, tmp_path / "out", overrides={name: "rtn:bits=8,group=32"})
    assert Checkpoint(tmp_path / "out").specs[name]["bits"] == 8
