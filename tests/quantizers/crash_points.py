"""Kill a quantizing run at every step that touches the disk, take it up again, and compare with an undisturbed run.

    python crash_points.py SOURCE DIRECTORY EVERY

A script of its own, because it forks: a process that has only just loaded torch can be copied in no time, so that every
step, or one in EVERY, can have its death. A step is a write (which dies half way), an fsync, a rename or a deletion.
Prints one JSON object for runs into a fresh place and for runs that overwrite: how many steps and deaths there were,
and what was wrong after which.
"""

import builtins
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from crelle.formats.storage import io
from crelle.formats.storage.destination import replaced_copies
from crelle.quantizers.pipeline import quantize

SCHEME, OTHER = "rtn:bits=1,group=24", "rtn:bits=2,group=24"
MODES = ("fresh", "overwrite")


def contents(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


def in_a_child(work: Callable[[], object]) -> int:
    """Run work in a copy of this process; return what it exited with, negative for the signal that killed it."""
    if (pid := os.fork()) == 0:
        try:
            work()
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(step: int) -> None:
    """From here on, count the steps of this process and kill it at one of them."""
    left = step

    def now() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def mortal(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            if now():
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **named)

        return wrapped

    class MortalFile:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "MortalFile":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> None:
            if now():
                self.file.write(data[: len(data) // 2])
                self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            self.file.write(data)

    def mortal_open(path: Any, mode: str = "r") -> Any:
        return MortalFile(builtins.open(path, mode)) if "x" in mode else builtins.open(path, mode)

    for name in ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir"):
        setattr(os, name, mortal(getattr(os, name)))
    io.open = mortal_open  # type: ignore[attr-defined]


def main(source: Path, directory: Path, every: int) -> dict[str, Any]:
    new, old = directory / "new", directory / "old"
    quantize(source, new, SCHEME)
    quantize(source, old, OTHER)
    return {mode: die_everywhere(source, new, old, directory / mode, mode == "overwrite", every) for mode in MODES}


def die_everywhere(source: Path, new: Path, old: Path, directory: Path, overwrite: bool, every: int) -> dict[str, Any]:
    directory.mkdir()
    wanted, before = contents(new), contents(old)
    wrong: list[str] = []
    deaths = 0
    for step in itertools.count(1, every):
        out = directory / f"{step}"
        if overwrite:
            shutil.copytree(old, out)

        def dying(out: Path = out, step: int = step) -> None:
            die_at(step)
            quantize(source, out, SCHEME, overwrite=overwrite)

        if (code := in_a_child(dying)) == 0:
            break
        deaths += 1
        if code != -signal.SIGKILL:
            wrong.append(f"step {step}: the run was to be killed and ended with {code}")
            break
        places = [p for p in (out, *replaced_copies(out)) if p.exists()]
        if overwrite and not any(contents(p) in (before, wanted) for p in places):
            wrong.append(f"step {step}: neither the old nor the new one is there")
        if out.exists() and contents(out) not in ([before, wanted] if overwrite else [wanted]):
            wrong.append(f"step {step}: something unfinished stands under the name")
        finished = out.exists() and contents(out) == wanted
        try:
            if not finished:
                quantize(source, out, SCHEME, resume=True, overwrite=overwrite)
            if contents(out) != wanted:
                wrong.append(f"step {step}: the resumed run gave other bytes")
        except Exception as e:
            wrong.append(f"step {step}: the resumed run ended with {type(e).__name__}: {e}")
        shutil.rmtree(out, ignore_errors=True)
    return {"steps": step, "deaths": deaths, "wrong": wrong}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
