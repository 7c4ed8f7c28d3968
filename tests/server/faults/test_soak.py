"""A part of the long run (`make soak`) through the real server: mixed traffic, with faults in the runner.

And a runner that dies for good: everybody is answered, the process ends with an error, a new one serves again.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, ROOT, quantized_copy

from crelle import quantize


@pytest.fixture(scope="module")
def soak() -> Any:
    spec = importlib.util.spec_from_file_location("serve_soak", ROOT / "bench" / "serving" / "serve_soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_mixed_traffic_with_faults_loses_nothing(soak: Any, seconds: int, tiny_model: Path, tmp_path: Path) -> None:
    real = DATA / "stories15M"
    source, group = (real, 32) if real.is_dir() else (tiny_model, 24)
    nested, plain = f"bcq-nested:bits=4,group={group},lowest=3,refine=0,data=false", f"rtn:bits=4,group={group}"
    # One nested layer is enough for answers that differ with the precision; six take ten seconds to make.
    quantize(source, tmp_path / "model", nested, overrides={"model.layers.[1-9].*": plain}, head=plain, device="cpu")
    row = soak.soak(tmp_path / "model", "4", clients=12, seconds=seconds, faults=True, folder=tmp_path)
    assert not row["wrong"], row


def test_a_server_whose_gpu_dies_answers_everybody_and_a_restart_serves_again(
    soak: Any, tiny_model: Path, tmp_path: Path
) -> None:
    quantized_copy(tiny_model, tmp_path / "model", "rtn:bits=4,group=24")
    row = soak.die_and_restart(tmp_path / "model", "4", clients=8, seconds=2, dies=40, folder=tmp_path)
    assert not row["wrong"], row
