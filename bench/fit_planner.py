"""The planner's constants, fitted to what was measured on an H200, and its estimates beside every measured step.

python bench/fit_planner.py            the constants, for CONSTANTS in src/crelle/bench/planner/step_model.py
python bench/fit_planner.py --table    the table of docs/guide/plan.md
"""

import sys
from pathlib import Path

from crelle.bench.planner.step_fit import fit, measured_steps
from crelle.bench.planner.step_model import milliseconds

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    if "--table" not in sys.argv:
        for name, value in fit(RESULTS).items():
            print(f'    "{name}": {value:.5g},')
        return
    heads = ("file", "shape", "weights", "cache", "batch", "ms measured", "ms estimated", "off", "seen")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for m in measured_steps(RESULTS):
        r, ms = m.row, milliseconds(m.work)
        file = m.file.removeprefix("h200-").removesuffix(".json").split("-llama")[0].split("-opt")[0]
        how = " exact" if m.part == "exact" else f" in {r['memory']}" if r.get("memory") else ""
        cells = [file, r["model"], r["scheme"], r.get("kv", "kv16"), f"{r['batch']}{how}"]
        cells += [f"{m.ms:.2f}", f"{ms:.2f}", f"{ms / m.ms - 1:+.1%}", "yes" if m.seen else ""]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
