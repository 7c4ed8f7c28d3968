"""Run every CUDA kernel on small shapes under compute-sanitizer, and write what it reports as JSON.

    PYTHONPATH=src python3 tests/kernels/cuda/racecheck/racecheck.py OUT.json [--families integer-clusters,gemv]
    PYTHONPATH=src python3 tests/kernels/cuda/racecheck/racecheck.py OUT.json --stress 120 [--loads 2] [--mps]

Each family of kernels (racecheck_cases.py) has a process: first without the tool, which compiles the kernels and checks
their results, then under racecheck, and those of MEMCHECK under memcheck. `control` has kernels whose races are known:
what the tool reports of the correct ones there it would report of any kernel with their pattern.
Exit status 1: a result was wrong, or a case did not run, or the tool did not see the race of `control`. Hazards alone
are what the JSON is for.
--stress reruns stream-K products of few tokens while other processes load the GPU (racecheck_stress.py).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATHS = [*sorted(HERE.parent.glob("*/")), HERE.parent, HERE.parents[2], HERE.parents[2] / "support"]
MEMCHECK = ("integer-clusters", "integer-stream-k", "gemm-sm90", "mixed-gemm", "attention", "step")
_CASE = re.compile(r"^CASE (begin|ok|failed) (.*)$")
_RACE = re.compile(r"^=+ +(Error|Warning|Info): (?:Potential )?(\w+ hazard|Race reported) (.*)$")
_ACCESS = re.compile(r"(Write|Read|Atomic|\w+) access at (.*?)(?: \[(\d+) hazards?\])?$")
_PLACE = re.compile(r"^(.*?)\+(0x[0-9a-f]+)(?: in (\S+):(\d+))?$")


def run_cases(family: str) -> int:
    """Run the cases of a family in this process; the lines that say which one run stand between the tool's reports."""
    sys.path[:0] = map(str, PATHS)
    import torch
    from racecheck_cases import FAMILIES

    bad = 0
    for name, case in FAMILIES[family]().items():
        torch.manual_seed(0)
        print(f"CASE begin {name}", flush=True)
        try:
            case()
            torch.cuda.synchronize()
            print(f"CASE ok {name}", flush=True)
        except Exception as e:
            bad += 1
            last = traceback.extract_tb(e.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            print(f"CASE failed {name}\n  {type(e).__name__} at {where}: {' '.join(str(e).split())[:500]}", flush=True)
            if "CUDA error" in str(e) or "CUDA_ERROR" in str(e):
                break  # the context is lost
    return 1 if bad else 0


def place(text: str) -> dict[str, Any]:
    """Split `void crelle::f<…>(…)+0x10 in /a/src/crelle/kernels/cuda/b/c.cuh:12` into kernel and source line."""
    found = _PLACE.match(text.strip())
    if found is None:
        return {"at": text.strip()}
    kernel, offset, file, line = found.groups()
    name = re.search(r"crelle::.*>(?=\()|crelle::\w+", kernel)
    at: dict[str, Any] = {"kernel": name.group(0) if name else kernel, "offset": offset}
    if file:
        at["line"] = f"{'/'.join(Path(file).parts[-2:])}:{line}"
    return at


def reports(output: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return the cases, the hazards with the case they were reported in, and other lines of the tool."""
    cases: list[dict[str, Any]] = []
    hazards: list[dict[str, Any]] = []
    rest: list[str] = []
    for line in output.splitlines():
        if case := _CASE.match(line):
            if case[1] == "begin":
                cases.append({"case": case[2], "result": "did not end"})
            elif cases:
                cases[-1]["result"] = case[1]
        elif line.startswith("  ") and cases and cases[-1]["result"] == "failed":
            cases[-1].setdefault("error", line.strip())
        elif race := _RACE.match(line):
            first = _ACCESS.search(race[3])
            now = {"severity": race[1], "case": cases[-1]["case"] if cases else None, "count": 0}
            now["first"] = {"access": first[1], **place(first[2])} if first else {"at": race[3]}
            hazards.append({**now, "others": []})
        elif line.startswith("=====") and hazards and (access := _ACCESS.search(line)) and " and " in line:
            count = int(access[3] or 1)
            hazards[-1]["others"].append({"access": access[1], **place(access[2]), "count": count})
            hazards[-1]["count"] += count
        elif line.startswith("=====") and line.strip("= "):
            rest.append(line.strip("= "))
    return cases, hazards, rest


def per_kernel(hazards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join reports of the same two source lines of a kernel template."""
    joined: dict[str, dict[str, Any]] = {}
    instances: dict[str, set[str]] = {}
    for hazard in hazards:
        for other in hazard["others"] or [{}]:
            first, kernel = hazard["first"], str(hazard["first"].get("kernel", "?"))
            where = [f"{a.get('access', '?')} {a.get('line', a.get('offset', '?'))}" for a in (first, other)]
            key = f"{hazard['severity']} {kernel.partition('<')[0]} {' / '.join(sorted(where))}"
            row = joined.setdefault(
                key,
                {"severity": hazard["severity"], "kernel": kernel.partition("<")[0], "between": where, "hazards": 0},
            )
            row["hazards"] += other.get("count", 1)
            row.setdefault("cases", [])
            if hazard["case"] not in row["cases"]:
                row["cases"].append(hazard["case"])
            instances.setdefault(key, set()).add(kernel)
    return [{**row, "instances": len(instances[key])} for key, row in joined.items()]


def sanitized(tool: str, limit: int) -> list[str]:
    """Return the command line of compute-sanitizer for a tool, with the options that its version has."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        raise SystemExit("compute-sanitizer is not on PATH: it is part of the CUDA toolkit")
    options = subprocess.run([path, "--help"], capture_output=True, text=True).stdout
    command = [path, "--tool", tool, "--print-limit", str(limit), "--error-exitcode", "0"]
    if "--kernel-regex" in options:
        command += ["--kernel-regex", "kns=crelle"]
    if tool == "racecheck":
        command += ["--racecheck-report", "analysis"]
    elif "--report-api-errors" in options:
        command += ["--report-api-errors", "no"]  # of cuda.bindings, which asks for functions that may not be there
    if "--show-backtrace" in options:
        command += ["--show-backtrace", "no"]
    return command


def child(family: str, before: list[str], seconds: float) -> tuple[str, float, int]:
    command = [*before, sys.executable, str(Path(__file__)), "--run", family]
    start = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # to a file: what was written before the limit must not be lost, nor a full pipe stop anybody
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = 124
        out.seek(0)
        return out.read(), time.perf_counter() - start, status


def one(family: str, tool: str | None, args: argparse.Namespace) -> dict[str, Any]:
    before = [] if tool is None else sanitized(tool, args.print_limit)
    output, seconds, status = child(family, before, args.limit)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
        (args.logs / f"{family}-{tool or 'plain'}.txt").write_text(output)
    cases, hazards, rest = reports(output)
    not_ok = [c for c in cases if c["result"] != "ok"]
    found = {"seconds": round(seconds, 1), "status": status, "cases": len(cases), "not_ok": not_ok}
    if not cases or (status not in (0, 1)):
        found["output_tail"] = output[-2000:]
    if tool == "racecheck":
        found["hazards"] = per_kernel(hazards)
    if tool is not None:
        found["tool"] = rest[-40:] if tool != "racecheck" else [r for r in rest if "SUMMARY" in r or "rror" in r][-20:]
    said = f"{len(found['hazards'])} kinds of hazards" if tool == "racecheck" else ""
    print(
        f"{family:18} {tool or 'plain':10} {seconds:6.1f} s  {len(cases)} cases, {len(not_ok)} not ok  {said}",
        flush=True,
    )
    return found


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    names = args.families.split(",") if args.families else all_families()
    families: dict[str, dict[str, Any]] = {name: {} for name in names}
    with ThreadPoolExecutor(args.processes) as pool:
        plain = {name: pool.submit(one, name, None, args) for name in names}
        jobs = []
        for name in names:  # as soon as its kernels are compiled
            families[name]["plain"] = plain[name].result()
            for tool in ("racecheck", *(("memcheck",) if name in MEMCHECK else ())):
                jobs.append((name, tool, pool.submit(one, name, tool, args)))
        for name, tool, job in jobs:
            families[name][tool] = job.result()
    fine = all(not run["not_ok"] and run["cases"] for family in families.values() for run in family.values())
    if "control" in families:
        seen = [c for h in families["control"]["racecheck"]["hazards"] for c in h["cases"]]
        fine &= "race (must be reported)" in seen and "barrier (must not)" not in seen
    return {"families": families}, fine


def all_families() -> list[str]:
    listed = subprocess.run(
        [sys.executable, str(Path(__file__)), "--list"], capture_output=True, text=True, env=os.environ
    )
    if listed.returncode:
        raise SystemExit(listed.stderr)
    return listed.stdout.split()


def about(args: argparse.Namespace) -> dict[str, Any]:
    from crelle.bench.environment import environment

    found = environment()
    given = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    found["command"] = " ".join(["python3 tests/kernels/cuda/racecheck/racecheck.py", *given])
    if path := shutil.which("compute-sanitizer"):
        said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        found["versions"]["compute-sanitizer"] = next((x for x in said.splitlines() if "ersion" in x), said.strip())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--families", help="names with commas; all of them without it")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--limit", type=float, default=150, help="seconds for each process")
    parser.add_argument("--print-limit", type=int, default=100, help="reports of a process")
    parser.add_argument("--logs", type=Path, help="a folder for the tool's own output")
    parser.add_argument("--stress", type=float, help="seconds of reruns instead")
    parser.add_argument("--loads", type=int, default=2, help="processes that load the GPU meanwhile")
    parser.add_argument("--mps", action="store_true", help="let them share the GPU by MPS")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the families")
    args = parser.parse_args()
    sys.path[:0] = map(str, PATHS)
    if args.run:
        return run_cases(args.run)
    if args.list:
        from racecheck_cases import FAMILIES

        print("\n".join(FAMILIES))
        return 0
    if args.out is None:
        parser.error("where to write the result: OUT.json")
    if args.stress:
        from racecheck_stress import stress

        found, fine = stress(args.stress, args.loads, args.mps)
    else:
        start = time.perf_counter()
        found, fine = measure(args)
        found["seconds"] = round(time.perf_counter() - start, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about(args), **found}, indent=1) + "\n")
    print(f"{args.out}: {'as it should be' if fine else 'NOT as it should be'}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
