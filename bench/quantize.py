"""Time and peak memory of quantizing SmolLM2-135M, one process a scheme: `python bench/quantize.py [OUT.json]`."""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SCHEMES = ("rtn:bits=4,group=64", "bcq:bits=2,group=64", "bcq:bits=3,group=64", "bcq:bits=4,group=64")


def main(out: Path | None) -> None:
    from crelle.bench.environment import environment
    from crelle.eval.smollm2 import smollm2

    source, rows = smollm2(), []
    for scheme in SCHEMES:
        with tempfile.TemporaryDirectory() as d:
            command = [
                sys.executable,
                "-m",
                "crelle.cli.main",
                "quantize",
                source,
                f"{d}/out",
                "--scheme",
                scheme,
                "--json",
            ]
            env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
            done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True, check=True, env=env)
        report = json.loads(done.stdout)
        # Children's peak is a maximum over all so far, so schemes are listed from the lightest to the heaviest.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        row = {"scheme": scheme, "seconds": report["seconds"], "peak_gigabytes": peak}
        rows.append({**row, "bits_per_weight": report["bits_per_weight"]})
        print(f"{scheme:24} {row['seconds']:6.1f} s   {peak:.2f} GB   {report['bits_per_weight']:.3f} bits per weight")
    if out:
        result = {**environment(), "command": "python bench/quantize.py", "rows": rows}
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.json")
    main(**vars(parser.parse_args()))
