"""A minute of the long run (`make soak`) through the real server: mixed traffic, with faults in the runner."""

import importlib.util
import sys
from pathlib import Path

from conftest import DATA, ROOT

SECONDS = 60


def test_a_minute_of_mixed_traffic_with_faults_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("serve_soak", ROOT / "bench" / "serve_soak.py")
    assert spec is not None
    assert spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = soak  # dataclasses look their module up
    spec.loader.exec_module(soak)
    real = DATA / "stories15M"
    source, group = (real, 32) if real.is_dir() else (tiny_model, 24)
    model, _ = soak.checkpoint(source, f"bcq-nested:bits=4,group={group},lowest=3,refine=0,data=false", tmp_path)
    row = soak.soak(model, "4", clients=12, seconds=SECONDS, faults=True, folder=tmp_path)
    assert not row["wrong"], row
