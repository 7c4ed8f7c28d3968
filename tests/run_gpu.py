"""Run the tests marked `gpu` in several processes side by side, and say what failed.

    python tests/run_gpu.py [--processes 10] [--limit 560] [PATH …]
    python tests/run_gpu.py --acceptance [options of tests/acceptance/acceptance.py]

Most of the time of these tests is compilation of kernels, which the processes share through the cache. Tests are dealt
out one by one, so each process has some of every file. Exit status 1: some failed, or the limit came first.
--acceptance serves a random model of a real shape to 64 clients over HTTP, as users run it, instead of the tests.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "-p", "no:cacheprovider"]


def files(paths: list[Path]) -> list[Path]:
    """Return the files with such tests: others may need packages that a machine with a GPU has not."""
    every = [f for p in paths for f in (sorted(p.rglob("test_*.py")) if p.is_dir() else [p])]
    return [f for f in every if "mark.gpu" in f.read_text()]


def collected(paths: list[Path]) -> list[str]:
    found = subprocess.run([*PYTEST, "--collect-only", *map(str, files(paths))], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(found.stdout + found.stderr)
    return [line for line in found.stdout.splitlines() if "::" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[TESTS])
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--limit", type=float, default=560, help="seconds")
    parser.add_argument("--acceptance", action="store_true", help="serve a model to many clients instead")
    if "--acceptance" in sys.argv[1:]:
        options = [option for option in sys.argv[1:] if option != "--acceptance"]
        script = TESTS / "acceptance" / "acceptance.py"
        raise SystemExit(subprocess.run([sys.executable, str(script), *options]).returncode)
    args = parser.parse_args()
    tests = collected(args.paths)
    cores = max(1, len(os.sched_getaffinity(0)) // args.processes)
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(cores)}
    print(f"{len(tests)} tests in {args.processes} processes", flush=True)
    with tempfile.TemporaryDirectory() as d:
        running = []
        for i in range(min(args.processes, len(tests))):
            ids, log = Path(d) / f"{i}.txt", Path(d) / f"{i}.log"
            ids.write_text("\n".join(tests[i :: args.processes]) + "\n")
            command = ["timeout", str(args.limit), *PYTEST, "-v", "-rfE", f"@{ids}"]
            with log.open("w") as out:
                running.append((log, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)))
        bad = 0
        for log, process in running:
            status = process.wait()
            lines = log.read_text().splitlines()
            if status:
                bad += 1
                told = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
                told += [line for line in lines if " FAILED" in line][:20]  # which the summary lacks after a crash
                if crash := [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]:
                    told += [line for line in lines[: crash[0]] if ".py::" in line][-1:]  # what was running
                    told += [line for line in lines if "what():" in line or "CUDA error" in line][:5]
                    told += lines[max(0, crash[0] - 2) : crash[0] + 40]
                print("\n".join(line[:300] for line in told[:100]), flush=True)
            ended = " (ended by the limit)" if status == 124 else ""
            print(f"{log.stem}: {lines[-1] if lines else 'nothing'}{ended}", flush=True)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
