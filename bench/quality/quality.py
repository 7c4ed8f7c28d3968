"""Quality per bit in one harness: quantize, then perplexity as a ratio to full precision, on seen and unseen text.

    python bench/quality/quality.py smollm2    OUT.json DATA SCHEME …      DATA: a folder with text/ (and stories15M/)
    python bench/quality/quality.py stories15M OUT.json DATA SCHEME …   a SCHEME that is a directory is only evaluated
    python bench/quality/quality.py stories15M OUT.json DATA 'auto:bits=2.6 + tune --train all --steps 1000'

Only the layers' matrices are quantized; their bits per weight count every scale. Calibration sees
text/wikitext2-valid-tokenised.txt (SmolLM2) or text/tinystories-calibration.txt (stories15M), nothing else. Each row is
added to OUT.json when it is done, so a run can be stopped and gone on with.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Row = dict[str, Any]
CASES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "calib": "wikitext2-valid-tokenised.txt",
        "test": ("wikitext2-test.txt", 1024, 20480),
        "unseen": ("tinystories-test.txt", 1024, 20480),
        "rows": 64,
        "length": 512,
    },
    "stories15M": {
        "calib": "tinystories-calibration.txt",
        "test": ("tinystories-test.txt", 256, 10**9),
        "unseen": ("wikitext2-test.txt", 256, 20480),
        "rows": 64,
        "length": 256,
    },
}


def crelle(*args: object) -> dict[str, Any]:
    """Run a command in a process of its own and return its JSON."""
    command = [sys.executable, "-m", "crelle.cli.main", *map(str, args), "--json"]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def layer_bits(directory: Path) -> float:
    """Bits per weight of the layers' matrices alone, every scale counted."""
    from math import prod

    from crelle.formats.base import nbytes
    from crelle.formats.storage.checkpoint import Checkpoint

    c = Checkpoint(directory, verify=False)
    inside = [m for m in c.specs if ".layers." in m]
    return 8 * sum(nbytes(c.matrix(m)) for m in inside) / sum(prod(c.specs[m]["shape"]) for m in inside)


class Results:
    """A result file: rows are added as they are done, by any thread, and what it has need not run again."""

    def __init__(self, path: Path, command: str) -> None:
        self.path, self.command, self.lock = path, command, threading.Lock()
        self.result: Row = json.loads(path.read_text()) if path.exists() else {"rows": []}

    @property
    def rows(self) -> list[Row]:
        return self.result["rows"]  # type: ignore[no-any-return]

    def has(self, **facts: object) -> bool:
        return any(all(row.get(k) == v for k, v in facts.items()) for row in self.rows)

    def add(self, row: Row, *shown: str) -> None:
        """Keep a row, and print some of its values."""
        from crelle.bench.environment import environment
        from crelle.formats.storage.io import write_whole

        with self.lock:
            self.rows.append(row)
            self.complete()
            whole = {**environment(), "command": self.command, **self.result}
            write_whole(self.path, (json.dumps(whole, indent=1) + "\n").encode())
            print(json.dumps({k: row[k] for k in shown if k in row}), flush=True)

    def complete(self) -> None:
        """Fill in what rows say about each other."""


def run_cases(names: Sequence[str], run: Callable[[str], None], jobs: int) -> None:
    """Run cases side by side; one that fails is told of, and the others go on."""
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, name) for name in names]):
            if error := done.exception():
                print(error, flush=True)


def chosen(only: str | None, cases: Iterable[str]) -> list[str]:
    """Return the cases that --only names, or all; an unknown one ends the program."""
    known = list(cases)
    names = only.split(",") if only else known
    if unknown := [n for n in names if n not in known]:
        raise SystemExit(f"there is no case {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what runs of this and other harnesses share."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="calibration sequences; default: by model")
    parser.add_argument("--length", type=int, help="tokens of each; default: by model")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, which share the cores")


def shared(args: argparse.Namespace) -> tuple[object, ...]:
    """Return the options of a command that is one of several at a time."""
    cores = len(os.sched_getaffinity(0))
    return "--device", args.device, "--threads", max(1, cores // args.jobs)


def calibration(args: argparse.Namespace, case: dict[str, Any]) -> tuple[object, ...]:
    sizes = ("--rows", args.rows or case["rows"], "--length", args.length or case["length"])
    return "--head", "none", "--calib", args.data / "text" / case["calib"], *sizes


def main() -> None:
    from crelle.bench.environment import environment
    from crelle.eval.smollm2 import smollm2

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("schemes", nargs="+")
    add_options(parser)
    args = parser.parse_args()
    case, out = CASES[args.model], args.out
    source = smollm2() if args.model == "smollm2" else args.data / "stories15M"
    sizes = f"--rows {args.rows or case['rows']} --length {args.length or case['length']} --device {args.device}"
    command = f"python bench/quality/quality.py {args.model} OUT.json DATA {sizes} --jobs {args.jobs} SCHEME …"
    result = json.loads(out.read_text()) if out.exists() else {"rows": []}
    texts = {what: case[what][0] for what in ("test", "unseen")}
    result = {**environment(), "command": command, "model": args.model, "texts": texts, **result}

    def perplexities(directory: Path) -> dict[str, float]:
        found = {}
        for what in ("test", "unseen"):
            file, context, tokens = case[what]
            options = ("--text", args.data / "text" / file, "--context", context, "--tokens", tokens)
            found[what] = crelle("eval", directory, *options, *shared(args))["perplexity"]
        return found

    def row_of(scheme: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as d:
            made = Path(scheme) if Path(scheme).is_dir() else Path(d) / "out"
            row: dict[str, Any] = {"scheme": scheme, "command": command}
            if not Path(scheme).is_dir():
                recipe, _, tune = scheme.partition(" + tune ")
                report = crelle("quantize", source, made, "--scheme", recipe, *calibration(args, case), *shared(args))
                row["seconds"] = report["seconds"]
                if tune:
                    tuned = Path(d) / "tuned"
                    text = ("--teacher", source, "--text", args.data / "text" / case["calib"])
                    sizes = ("--length", args.length or case["length"])
                    row["tune_seconds"] = crelle("tune", made, tuned, *text, *sizes, *tune.split(), *shared(args))[
                        "seconds"
                    ]
                    made = tuned
                # Children's peak is a maximum over all so far: name the heaviest scheme last.
                row["peak_gigabytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
            else:
                from crelle.formats.storage.checkpoint import Checkpoint

                row["scheme"] = Checkpoint(made, verify=False).scheme
            return row | {"bits_per_weight": layer_bits(made), **perplexities(made)}

    if "fp32" not in result:
        result["fp32"] = perplexities(source)
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(row_of, scheme) for scheme in args.schemes]):
            row = done.result()
            row |= {f"{what}_ratio": row[what] / result["fp32"][what] for what in ("test", "unseen")}
            result["rows"].append(row)
            out.write_text(json.dumps(result, indent=2) + "\n")
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


if __name__ == "__main__":
    main()
