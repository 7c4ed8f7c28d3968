"""How long from the shell to the first token: `crelle generate` in fresh processes, and where that time goes.

The whole is what a person waits for: from the start of the process to the first byte after the prompt. The parts come
from further processes that run the same command under import_timer.py; the tokenizer is read beside the weights, so
parts may add up to more than the whole.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

from crelle.bench import import_timer
from crelle.errors import SchemeError, UnsupportedError

_ENTRY = ["-c", "from crelle.cli.main import main; main()"]  # what the `crelle` script does
_WATCHED = ["-m", "crelle.bench.import_timer", "crelle.cli.main"]


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds, of the quickest run and of the middle one."""

    model: str
    prompt: str
    repeat: int
    starts: tuple[float, ...]  # to the first token, in order: with an empty cache the first one compiles kernels
    first_token_seconds: float
    first_token_seconds_median: float
    process_seconds: float  # until the process was gone
    process_seconds_median: float
    parts: dict[str, float]  # of the quickest watched run


def measure(
    model: Path,
    *,
    prompt: str = "Hello",
    repeat: int = 5,
    progress: Callable[[int, int, str], None] | None = None,
) -> Startup:
    """Start `crelle generate MODEL` `repeat` times plainly, then as often under the watch."""
    if repeat < 1:
        raise SchemeError(f"--repeat must be at least 1, got {repeat}")
    command = ["generate", str(model), "--prompt", prompt, "--max-tokens", "1"]
    runs, watched = [], []
    for i in range(repeat):
        runs.append(_run(_ENTRY, command, len(prompt.encode()))[:2])
        if progress:
            progress(i + 1, 2 * repeat, f"{min(runs)[0]:.2f} s")
    for i in range(repeat):
        watched.append(_parts(*_run(_WATCHED, command, len(prompt.encode()))))
        if progress:
            progress(repeat + i + 1, 2 * repeat, f"{min(runs)[0]:.2f} s")
    first, whole = zip(*runs, strict=True)
    return Startup(
        model=model.name,
        prompt=prompt,
        repeat=repeat,
        starts=first,
        first_token_seconds=min(first),
        first_token_seconds_median=median(first),
        process_seconds=min(whole),
        process_seconds_median=median(whole),
        parts=min(watched, key=lambda parts: sum(parts.values())),
    )


def _run(python: list[str], command: list[str], prompt_bytes: int) -> tuple[float, float, float, str]:
    """Return the seconds to the first byte after the prompt and to the end, when it began, and what was printed."""
    begun, said, first = monotonic(), b"", 0.0
    with subprocess.Popen(
        [sys.executable, *python, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        while piece := os.read(child.stdout.fileno(), 1 << 16):
            said += piece
            if not first and len(said) > prompt_bytes:
                first = monotonic() - begun
        complaints = child.stderr.read().decode(errors="replace").strip()
    if child.returncode:
        last = (complaints.splitlines() or ["no message"])[-1]
        raise UnsupportedError(f"crelle generate failed: {last.removeprefix('crelle: ')}")
    return first, monotonic() - begun, begun, said.decode(errors="replace")


def _parts(first: float, _: float, begun: float, said: str) -> dict[str, float]:
    """Name what the watch saw, without what lies within something else."""
    spent: dict[str, float] = json.loads(said.splitlines()[-1])

    def of(name: str) -> float:
        return spent.get(name, 0.0)

    prepare = of("crelle.kernels.ops.prepare")
    parts = {
        "interpreter": of(import_timer.BEGUN) - begun,
        "command line": of("crelle.cli.main"),
        "torch": of("torch"),
        "open and verify": of("crelle.formats.storage.open.open_weights"),
        "read and build": of("crelle.models.loader.build") - prepare,
        "prepare": prepare,
        "tokenizer": of("crelle.engine.tokenization.tokenizer.Tokenizer.__init__"),
        "first step": of("crelle.models.decoder.DecoderModel.forward"),
    }
    return parts | {"other": max(0.0, first - sum(parts.values()))}
