"""Weights too small for f16 scales are named; nothing else is."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import write_tiny_model

from crelle.errors import CrelleError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.models.calibration_model import open_model
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.pipeline import Calibration, quantize
from crelle.quantizers.scheme import parse
from crelle.quantizers.solvers.underflow import underflow

DOWN = "model.layers.1.mlp.down_proj.weight"
PLAIN = [
    "rtn:bits=4,group=8",
    "rtn:bits=4,group=8,symmetric=true",
    "bcq:bits=3,group=8",
    "bcq:bits=2,group=row",
    "fp16",
]
CALIBRATED = [
    "gptq:bits=4,group=8",
    "gptq:bits=3,group=8,free=true",
    "awq:bits=4,group=8",
    "hbcq:bits=2,group=8",
    "bcq-nested:bits=4,group=8",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m", num_hidden_layers=2, hidden_size=24, intermediate_size=16, head_dim=4)


def scaled(model: Path, factor: float, rows: slice = slice(None), name: str = DOWN) -> Path:
    file = model / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors[name][rows] *= factor
    safetensors.torch.save_file(tensors, file)
    return model


def calibration() -> Calibration:
    rows = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    return Calibration(rows, open_model, torch.device("cpu"))


def warnings_of(model: Path, out: Path, scheme: str) -> tuple[str, ...]:
    return quantize(model, out, scheme, calibration=calibration() if scheme in CALIBRATED else None).warnings


@pytest.mark.parametrize("scheme", [*PLAIN, *CALIBRATED])
def test_weights_that_vanish_are_named(model: Path, tmp_path: Path, scheme: str) -> None:
    scaled(model, 1e-8)
    [warning] = warnings_of(model, tmp_path / "out", scheme)
    assert f"'{DOWN}'" in warning
    assert "too small for f16" in warning
    assert "--override 'model.layers.1.mlp.down_proj=bf16'" in warning


@pytest.mark.parametrize("scheme", [*PLAIN, "gptq:bits=4,group=8", "hbcq:bits=2,group=8"])
def test_ordinary_weights_are_not_spoken_of(model: Path, tmp_path: Path, scheme: str) -> None:
    scaled(scaled(model, 0.0, slice(0, 3)), 1e-2, slice(3, 6))  # zeros are no loss
    assert warnings_of(model, tmp_path / "out", scheme) == ()


def test_the_warning_counts_groups(model: Path, tmp_path: Path) -> None:
    scaled(model, 1e-8, slice(0, 2))
    [warning] = warnings_of(model, tmp_path / "out", "rtn:bits=4,group=8")
    assert "4 of 48 groups" in warning  # 24 rows of 16 inputs


def test_the_remedy_of_the_warning_helps(model: Path, tmp_path: Path) -> None:
    scaled(model, 1e-8)
    module = DOWN.removesuffix(".weight")
    report = quantize(model, tmp_path / "out", "rtn:bits=4,group=8", overrides={module: "bf16"})
    assert report.warnings == ()
    stored, source = Checkpoint(report.out).read(DOWN), safetensors.torch.load_file(model / "model.safetensors")[DOWN]
    assert torch.equal(stored, source.bfloat16())


def test_f16_weights_that_stay_f16_are_not_spoken_of(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({n: (t * 1e-6).half() for n, t in tensors.items()}, file)
    assert warnings_of(model, tmp_path / "out", "fp16") == ()


def test_a_resumed_run_repeats_the_warnings(model: Path, tmp_path: Path) -> None:
    scaled(model, 1e-8, name="model.layers.0.mlp.down_proj.weight")

    class StoppedError(Exception): ...

    def stop(done: int, total: int, name: str) -> None:
        if name == "model.layers.1":
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize(model, tmp_path / "out", "rtn:bits=4,group=8", progress=stop)
    report = quantize(model, tmp_path / "out", "rtn:bits=4,group=8", resume=True)
    assert report.resumed_units > 0
    [warning] = report.warnings
    assert "model.layers.0.mlp.down_proj" in warning


@pytest.mark.parametrize("scheme", [*PLAIN[2:], "gptq:bits=4,group=8", "awq:bits=4,group=8", "hbcq:bits=2,group=8"])
@pytest.mark.parametrize("factor", [1e9, float("inf")])
def test_weights_beyond_f16_are_refused_by_name(model: Path, tmp_path: Path, scheme: str, factor: float) -> None:
    scaled(model, factor)
    with pytest.raises(CrelleError, match=r"layers\.1"):
        warnings_of(model, tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


def test_the_command_prints_and_reports_it(model: Path, tmp_path: Path, crelle: object) -> None:
    scaled(model, 1e-8)
    done = crelle("quantize", model, tmp_path / "out", "--scheme", "rtn:bits=4,group=8", "--json")  # type: ignore[operator]
    assert done.returncode == 0
    [warning] = json.loads(done.stdout)["warnings"]
    assert f"warning: {warning}" in done.stderr.splitlines()


def test_integer_groups_are_told_by_rows() -> None:
    w = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    w[2], w[:, 16:32] = 1e-9, 0  # a group of zeros is no loss
    stats = Stats(torch.eye(48), torch.ones(48), 1)
    found = underflow("m.weight", parse("atom:group=16,outliers=16").fit(w, stats), lambda: w)
    assert "1 of 6 rows" in str(found)
