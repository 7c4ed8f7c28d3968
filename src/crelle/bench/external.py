"""External programs timed in the same run: the user names an installed one, nothing is fetched or built here.

llama-bench    measured as it is, on GGUF files, flash attention on (its best)
a GEMV peer    any command that reads CRELLE_N, CRELLE_K, CRELLE_BATCH, CRELLE_THREADS and CRELLE_SET (hot or cold)
               from its environment and prints lines of JSON: {"who": "llama.cpp Q2_K", "microseconds": 338.0}
"""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from crelle.errors import UnsupportedError


def llama_bench(program: Path, model: Path, threads: int, tokens: int, prompt: int) -> tuple[float, float]:
    """Return the best tokens per second of (decode, prefill) of an installed llama-bench."""
    command = [program, "-m", model, "-t", threads, "-n", tokens, "-p", prompt, "-fa", 1, "-r", 5, "-o", "json"]
    rows: list[dict[str, Any]] = json.loads(_output([str(c) for c in command]))
    best = {("decode" if r["n_gen"] else "prefill"): max(r["samples_ts"]) for r in rows}
    return best["decode"], best["prefill"]


def gemv_peer(command: str, N: int, K: int, batch: int, threads: int, working_set: str) -> dict[str, float]:
    """Run a GEMV peer once and return its microseconds by name."""
    problem = {"N": N, "K": K, "BATCH": batch, "THREADS": threads, "SET": working_set}
    lines = _output(shlex.split(command), {f"CRELLE_{k}": str(v) for k, v in problem.items()}).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    if not found:
        raise UnsupportedError(f"the peer '{command}' printed no line of JSON")
    return {row["who"]: float(row["microseconds"]) for row in found}


def _output(command: list[str], extra: dict[str, str] | None = None) -> str:
    """Return what a program prints. Our own wait policy is taken out of its environment: peers choose theirs."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | (extra or {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except OSError as e:
        raise UnsupportedError(f"cannot run {command[0]}: {e.strerror}") from e
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnsupportedError(f"{command[0]} failed with code {done.returncode}: {last}")
    return done.stdout
