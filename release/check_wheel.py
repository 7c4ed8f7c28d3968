"""Tries a wheel as a new user would: `make check-wheel`, or `python release/check_wheel.py DIST [--limit SECONDS]`.

An empty virtual environment outside of the tree, no compiler on PATH, no caches: pip installs torch as pinned and then
the wheel, and from there on the clock runs: `python -m crelle --version`, `crelle doctor`, the demo model from PyPI,
the first token. Ends with code 1 if something fails or the token comes later than the limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Environment:
    """A virtual environment and the only programs that can be found in it: its own."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory / "venv", with_pip=True)
        self.bin = directory / "venv" / "bin"
        self._cwd = directory
        kept = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "CRELLE_CORE", "PYTHONPATH")}
        own = {"PATH": str(self.bin), "CRELLE_CACHE": str(directory / "cache"), "PIP_NO_CACHE_DIR": "1"}
        self._env = {**kept, **own}

    def run(self, what: str, *command: str) -> str:
        """Run a program of the environment, say how long it took, and return its output."""
        started = time.perf_counter()
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]], cwd=self._cwd, env=self._env, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}{what}: failed with code {done.returncode}")
        print(f"{time.perf_counter() - started:7.2f} s  {what}", flush=True)
        return done.stdout


def check(wheel: Path, limit: float) -> None:
    with tempfile.TemporaryDirectory(prefix="crelle-wheel-") as d:
        env = Environment(Path(d))
        pins = ROOT / "constraints.txt"
        torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
        env.run(f"pip install {torch}", "python", "-m", "pip", "install", "--quiet", torch)
        install = ("python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--constraint", str(pins))
        env.run(f"pip install {wheel.name}", *install, str(wheel))

        started = time.perf_counter()
        version = env.run("python -m crelle --version", "python", "-m", "crelle", "--version").strip()
        checks = {c["what"]: c for c in json.loads(env.run("crelle doctor", "crelle", "doctor", "--json"))["checks"]}
        if checks["C++ kernels"]["state"] != "ok":
            sys.exit(f"crelle doctor: C++ kernels: {checks['C++ kernels']['detail']}")
        before = time.perf_counter()
        ran = json.loads(env.run("the demo model, 16 tokens", "python", str(ROOT / "release" / "first_token.py")))
        first = before - started + ran["first_token_seconds"]
        print(f"{version}, {checks['C++ kernels']['detail']}; the model's download took {ran['download_seconds']} s")
        print(f"first token {first:.1f} s after pip install ended: {ran['text']!r}")
        if first > limit:
            sys.exit(f"the first token came later than {limit:g} s after pip install ended")


def wheel_in(dist: Path) -> Path:
    """Return the one wheel of a directory."""
    wheels = sorted(dist.glob("crelle-*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{dist} should hold one wheel of crelle, it holds {len(wheels)}")
    return wheels[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="the directory with the wheel, or the wheel")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds from the end of pip install to a token")
    args = parser.parse_args()
    given = args.dist.resolve()
    check(given if given.is_file() else wheel_in(given), args.limit)
