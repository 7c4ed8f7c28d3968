"""The planner's constants, fitted to what was measured on an H200, and its estimate of every measured step.

python bench/tuning/fit_planner.py            print the constants, for CONSTANTS in crelle/bench/planner/step_model.py
python bench/tuning/fit_planner.py OUT.json   write measured and estimated milliseconds of every step
"""

import argparse
import json
from pathlib import Path
from typing import Any

from crelle.bench.planner.step_fit import Measured, fit, measured_steps
from crelle.bench.planner.step_model import milliseconds

RESULTS = Path(__file__).parents[1] / "results"


def row(m: Measured) -> dict[str, Any]:
    """Return a step's measured and estimated time; `seen`: the constants were fitted to it."""
    r, estimated = m.row, milliseconds(m.work)
    return {
        "file": m.file,
        "model": r["model"],
        "scheme": r["scheme"],
        "kv": r.get("kv", "kv16"),
        "batch": r["batch"],
        "memory": r.get("memory") or None,
        "batch_invariant": m.part == "exact",
        "measured_ms": round(m.ms, 2),
        "estimated_ms": round(estimated, 2),
        "off": round(estimated / m.ms - 1, 3),
        "seen": m.seen,
    }


def main(out: Path | None) -> None:
    if out is None:
        for name, value in fit(RESULTS).items():
            print(f'    "{name}": {value:.5g},')
        return
    head = '{\n "command": "python bench/tuning/fit_planner.py OUT.json",\n "rows": [\n  '
    rows = ",\n  ".join(json.dumps(row(m)) for m in measured_steps(RESULTS))
    out.write_text(f"{head}{rows}\n ]\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.json")
    main(**vars(parser.parse_args()))
