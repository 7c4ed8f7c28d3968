"""Fuzzes every loader with many processes, and writes what was found as JSON.

    python tests/hostile/run_fuzz.py OUT.json --inputs 200000 --processes 16 [--targets gguf,plan] [--seed 1]

The inputs of a loader are split into shards of SHARD, each with a seed of its own and a process of its own. A finding
ends neither the shard nor the run. An input that ends its process (an abort in foreign code, or one that no signal can
interrupt) is a finding too, and the rest of its shard goes on with another seed. Finished shards are kept in
OUT.json.parts: the same command again goes on where it was stopped. The exit code is 1 if there are findings.
"""

# ruff: noqa: E402  (the paths and the environment come first)
import argparse
import json
import marshal
import mmap
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", RUST_BACKTRACE="0", TOKENIZERS_PARALLELISM="false")

import torch
from fuzz import MEGABYTES, SECONDS, fuzz, show
from targets import TARGETS

SHARD = 25_000
KILL_AFTER = 30.0  # seconds with one input, after which its process is killed
_NOTE = 1 << 20  # bytes of the file in which a process says which input it is at
_HEAD = struct.Struct("<qdq")  # number, time, length of the input


@dataclass
class Shard:
    """A part of a loader's inputs; a process runs it."""

    target: str
    index: int
    seed: int
    count: int
    part: Path
    findings: list[str] = field(default_factory=list)  # of processes that ended early
    done: int = 0  # inputs of those processes
    tries: int = 0
    process: BaseProcess | None = None
    note: mmap.mmap | None = None

    def start(self, context: Any) -> None:
        self.note = mmap.mmap(-1, _NOTE)
        arguments = (self.target, self.seed + 100_003 * self.tries, self.count - self.done, self.part, self.note)
        self.process = context.Process(target=_work, args=arguments)
        assert self.process is not None
        self.process.start()

    @property
    def input(self) -> tuple[int, float, Any]:
        """Return the number, the time and the value of the input that the process is at."""
        assert self.note is not None
        i, began, length = _HEAD.unpack_from(self.note)
        data = self.note[_HEAD.size : _HEAD.size + length]
        try:
            return i, began, marshal.loads(data) if length else "an input too large to be noted"
        except (EOFError, TypeError, ValueError):  # the process writes it at this moment
            return i, began, "an input that was being noted"

    def stuck(self) -> bool:
        assert self.note is not None
        began = _HEAD.unpack_from(self.note)[1]
        return bool(began) and time.time() - began > KILL_AFTER

    def give_up(self, why: str) -> None:
        """Note the input at which the process ended; the rest of the shard is another process's."""
        i, _, value = self.input
        self.findings.append(f"input {i}: {why} for {show(value)}")
        self.done, self.tries = self.done + i + 1, self.tries + 1


def _work(name: str, seed: int, count: int, part: Path, note: mmap.mmap) -> None:
    """Run a shard and leave its report in `part`."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust tells of each panic there
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="crelle-fuzz-", dir=memory if memory.is_dir() else None))

    def before(i: int, value: Any) -> None:
        data = marshal.dumps(value)
        data = data if len(data) <= _NOTE - _HEAD.size else b""
        note[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(note, 0, i, time.time(), len(data))

    try:
        target = TARGETS[name](scratch)
        report = fuzz(target.run, target.seeds, count, seed, target.words, stop=False, before=before)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _write(part, {**asdict(report), "lines": sorted(report.lines)})


def _write(path: Path, value: Any) -> None:
    made = path.with_name(path.name + ".new")
    made.write_text(json.dumps(value, indent=1, default=str) + "\n", errors="replace")
    made.replace(path)


def _finish(shard: Shard) -> None:
    """Add to a shard's report what happened to processes before the last one."""
    found: dict[str, Any] = {"inputs": 0, "findings": [], "lines": []}
    if shard.part.exists():
        found = json.loads(shard.part.read_text())
    found["inputs"] += shard.done
    found["findings"] = shard.findings + found["findings"]
    _write(shard.part, {**found, "finished": True})


def _is_finished(shard: Shard) -> bool:
    return shard.part.exists() and json.loads(shard.part.read_text()).get("finished") is True


def _summary(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    slowest = max(parts, key=lambda p: p.get("worst_seconds", 0))
    largest = max(parts, key=lambda p: p.get("worst_megabytes", 0))
    return {
        "loader": name,
        "inputs": sum(p["inputs"] for p in parts),
        "accepted": sum(p.get("accepted", 0) for p in parts),
        "seconds": round(sum(p.get("seconds", 0) for p in parts), 1),
        "lines": len({tuple(line) for p in parts for line in p["lines"]}),
        "worst_seconds": round(slowest.get("worst_seconds", 0), 3),
        "worst_megabytes": largest.get("worst_megabytes", 0),
        "slowest": slowest.get("slowest", ""),
        "largest": largest.get("largest", ""),
        "findings": [f for p in parts for f in p["findings"]],
    }


def _step(running: list[Shard], context: Any) -> None:
    """Look after the processes: finish those that ended, kill those that are stuck."""
    for shard in list(running):
        assert shard.process is not None
        if shard.process.is_alive() and shard.stuck():
            os.kill(shard.process.pid or 0, signal.SIGKILL)
            shard.process.join()
            shard.give_up(f"took more than {KILL_AFTER:g} s and could not be interrupted")
        elif shard.process.is_alive():
            continue
        elif shard.process.exitcode != 0:
            shard.give_up(f"ended its process with code {shard.process.exitcode}")
        else:
            shard.done = shard.done if shard.tries else 0
            _finish(shard)
            running.remove(shard)
            continue
        if shard.done < shard.count and shard.tries < 5:
            shard.start(context)
        else:
            _finish(shard)
            running.remove(shard)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--inputs", type=int, default=20_000, help="for each loader")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    names = asked.targets.split(",")
    parts = asked.out.with_name(asked.out.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    shards: list[Shard] = []
    for index in range(-(-asked.inputs // SHARD)):  # all loaders early: what is stopped has something of each
        for name in names:
            count, seed = min(SHARD, asked.inputs - index * SHARD), asked.seed * 1000 + index
            shards.append(Shard(name, index, seed, count, parts / f"{name}-{seed}-{count}.json"))
    waiting, running = [s for s in shards if not _is_finished(s)], list[Shard]()
    context, begun, told = multiprocessing.get_context("fork"), time.monotonic(), 0.0
    while waiting or running:
        while waiting and len(running) < asked.processes:
            running.append(waiting.pop(0))
            running[-1].part.unlink(missing_ok=True)
            running[-1].start(context)
        time.sleep(0.2)
        before = len(running)
        _step(running, context)
        if len(running) < before or time.monotonic() - told > 30:
            told = time.monotonic()
            _write(asked.out, _result(asked, shards, time.monotonic() - begun))
            now = ", ".join(f"{s.target} {s.done + s.input[0]:,}/{s.count:,}" for s in running)
            left = len(waiting) + len(running)
            print(f"{told - begun:6.0f} s  {len(shards) - left}/{len(shards)} shards  {now}", flush=True)
    result = _result(asked, shards, time.monotonic() - begun)
    _write(asked.out, result)
    for row in result["loaders"]:
        print(
            f"{row['loader']:16} {row['inputs']:9,} inputs  {row['lines']:5} lines  worst {row['worst_seconds']:.2f} s "
            f"{row['worst_megabytes']} MB  {len(row['findings'])} findings"
        )
    return 1 if any(row["findings"] for row in result["loaders"]) else 0


def _result(asked: argparse.Namespace, shards: list[Shard], seconds: float) -> dict[str, Any]:
    rows = []
    for name in dict.fromkeys(s.target for s in shards):
        found = [json.loads(s.part.read_text()) for s in shards if s.target == name and _is_finished(s)]
        if found:
            rows.append(_summary(name, found))
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "limit_seconds": SECONDS,
        "limit_megabytes": MEGABYTES,
        "seed": asked.seed,
        "processes": asked.processes,
        "seconds": round(seconds, 1),
        "loaders": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
