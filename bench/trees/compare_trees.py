"""Speeds of two trees in turns on one machine, by the same `crelle bench` commands: did a change cost any?

    python bench/trees/compare_trees.py cpu|cuda OLD NEW OUT.json [--rounds 2] [--threads 2] [--only gemv]

OLD and NEW are checkouts; for `cpu` each needs its C++ core at TREE/build/dev (cmake -S TREE -B TREE/build/dev -G
Ninja). Every command runs in a process of its own, OLD, NEW, NEW, OLD, …; the medians are compared. CPU: SmolLM2's
shape, decoding, prompts of 512 tokens, 16 sequences at once, 1 and 16 clients. CUDA: gemv, Llama-2-7B, serving within
24 GB, OPT-175B.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from crelle.bench.environment import write_result

Row = dict[str, Any]
# An editable install of one tree would come before PYTHONPATH.
DROP_EDITABLE = (
    "import runpy, sys; sys.meta_path[:] = [m for m in sys.meta_path if 'Redirecting' not in type(m).__name__]; "
)
RUN_CRELLE = "runpy.run_module('crelle.cli.main', run_name='__main__')"
RTN, BCQ = "rtn:bits=4,group=64", "bcq:bits=3,group=64"


def commands(kind: str, threads: int) -> Iterator[tuple[str, str, Callable[[Row], dict[str, float]]]]:
    """Yield (a name, arguments of `crelle bench`, what a row of its answer gives)."""
    if kind == "cpu":
        on = f"--shape smollm2-135m --device cpu --threads {threads}"
        serve = f"serve {on} --scheme {RTN}"
        yield (
            "decode",
            f"decode {on} --scheme {RTN} --scheme {BCQ} --no-baseline --rounds 2 --tokens 48",
            lambda r: {
                f"{r['scheme']} tokens/s": r["tokens_per_second"],
                f"{r['scheme']} prefill of 128, tokens/s": 128e3 / r["prefill_milliseconds"],
            },
        )
        for kv in (16, 4):
            yield (
                f"kv {kv}",
                f"{serve} --kv {kv} --batch 1,16 --context 128 --tokens 24",
                lambda r: {f"{r['batch']} sequences, tokens/s": r["tokens_per_second"]},
            )
        yield (
            "prompts of 512",
            f"{serve} --kv 16 --clients 1 --prompt 512 --tokens 1 --seconds 20",
            lambda r: {"prompt tokens/s": 512 / r["first_token"]["p50"]},
        )
        yield (
            "prompts of 128, answers of 64",
            f"{serve} --kv 16 --clients 1,16 --prompt 128 --tokens 64 --seconds 30 --max-batch 16",
            lambda r: {f"{r['clients']} clients, tokens/s": r["tokens_per_second"]},
        )
        return
    schemes = " ".join(f"--scheme bcq:bits={bits},group=128" for bits in (4, 3, 2))

    def step(r: Row) -> dict[str, float]:
        return {f"{r['scheme']} ms/token": r["milliseconds_per_token"]}

    yield (
        "gemv",
        "gemv --device cuda --no-energy --shape 4096x4096,11008x4096,12288x12288",
        lambda r: {f"{r['shape']} {r['scheme']} us": r["microseconds"]},
    )
    yield "llama2-7b", f"decode --device cuda --shape llama2-7b {schemes} --rounds 1 --no-energy", step
    yield (
        "24 GB serving",
        "serve --shape llama2-7b --scheme fp16 --scheme rtn:bits=4,group=128 --kv 16 --kv 4 --batch 16 --memory 24GB"
        " --context 1024 --tokens 24 --device cuda",
        lambda r: {f"{r['scheme']} {r['kv']} batch {r['batch']}, tokens/s": r["tokens_per_second"]},
    )
    opt = "decode --device cuda --shape opt-175b --scheme bcq:bits=3,group=128 --rounds 1 --tokens 48"
    yield "opt-175b", f"{opt} --no-baseline --no-energy", step


def environment_of(tree: Path, kind: str) -> dict[str, str]:
    """Return the environment in which Python finds a tree's modules and its C++ core; packages stay where they are."""
    path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}
    if kind == "cuda":
        return environment
    core = next((tree / "build/dev").glob("_core*.so"), None)
    if core is None:
        sys.exit(f"{tree}/build/dev has no _core*.so; build it with cmake first")
    return environment | {"CRELLE_CORE": str(core)}


def run(tree: Path, kind: str, arguments: str) -> list[Row]:
    command = [sys.executable, "-c", DROP_EDITABLE + RUN_CRELLE, "bench", *arguments.split(), "--json"]
    done = subprocess.run(command, env=environment_of(tree, kind), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: crelle bench {arguments}: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return list(found.get("rows", [found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["cpu", "cuda"])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="a regular expression for names of commands")
    args = parser.parse_args()
    rows: list[Row] = []
    for name, arguments, pick in commands(args.kind, args.threads):
        if not re.search(args.only, name):
            continue
        found: dict[str, dict[str, list[float]]] = {}
        for turn in range(args.rounds):
            trees = ("old", args.old), ("new", args.new)
            for label, tree in trees if turn % 2 == 0 else trees[::-1]:
                for row in run(tree.resolve(), args.kind, arguments):
                    for key, value in pick(row).items():
                        found.setdefault(key, {"old": [], "new": []})[label].append(value)
        for key, each in found.items():
            ratio = median(each["new"]) / median(each["old"]) if each["old"] and each["new"] else None
            print(f"{name}, {key}: {each}, new / old {ratio and round(ratio, 3)}", flush=True)
            rows.append(
                {"name": name, "of": key, "command": f"crelle bench {arguments}", **each, "new_over_old": ratio}
            )
        command = f"python bench/trees/compare_trees.py {args.kind} OLD NEW {args.out.name} --rounds {args.rounds}"
        command += f" --only '{args.only}'" if args.only else ""
        write_result(args.out, {"command": command, "rows": rows})


if __name__ == "__main__":
    main()
