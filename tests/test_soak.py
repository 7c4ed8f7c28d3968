"""A minute of the long run (`make soak`) through the real server: mixed traffic, with faults in the runner."""

import importlib.util
import sys
from pathlib import Path

from conftest import DATA, ROOT

from crelle import quantize

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
    nested, plain = f"bcq-nested:bits=4,group={group},lowest=3,refine=0,data=false", f"rtn:bits=4,group={group}"
    # One nested layer is enough for answers that differ with the precision; six take ten seconds to make.
    quantize(source, tmp_path / "model", nested, overrides={"model.layers.[1-9].*": plain}, head=plain, device="cpu")
    row = soak.soak(tmp_path / "model", "4", clients=12, seconds=SECONDS, faults=True, folder=tmp_path)
    assert not row["wrong"], row
