"""Machine instructions (SASS) of what NVRTC made, where a disassembler is installed, and what the tests ask of them.

Disassembling a cubin takes half a second, so `sass_facts` keeps its answers in $CRELLE_CACHE/sass, under a hash of the
cubin, the disassembler's version and this file. A cubin is itself made anew when its source or the compiler changes
(crelle.kernels.cuda), so an answer is never out of date and an empty cache means that everything is really compiled.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from crelle.cache import cache_directory

LOCAL_MEMORY = re.compile(r"\b(LDL|STL)\b")
MATRIX = re.compile(r"\b[BIHQ]G?MMA\b")


@dataclass(frozen=True, slots=True)
class SassFacts:
    """What the tests ask of a kernel's instructions."""

    local_memory: int  # instructions that read or write it
    matrix: bool  # whether there is a matrix instruction
    loads_in_flight: tuple[int, ...]  # see `loads_in_flight`


def sass_facts(cubin: bytes) -> SassFacts | None:
    """Return the facts of a cubin, from the cache where it has them; None where no disassembler is installed."""
    if (tool := _disassembler()) is None:
        return None
    key = hashlib.sha256(b"\0".join((cubin, _version(tool), Path(__file__).read_bytes()))).hexdigest()
    path = cache_directory() / "sass" / f"{key[:32]}.json"
    try:
        return _facts_of(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    code = disassemble(cubin)
    assert code is not None
    facts = SassFacts(len(LOCAL_MEMORY.findall(code)), bool(MATRIX.search(code)), loads_in_flight(code))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
        f.write(json.dumps(asdict(facts)))
    os.replace(f.name, path)
    return facts


def _facts_of(kept: dict[str, object]) -> SassFacts:
    loads = kept.pop("loads_in_flight")
    return SassFacts(**kept, loads_in_flight=tuple(loads))  # type: ignore[arg-type]


def loads_in_flight(code: str) -> tuple[int, ...]:
    """Return the loads from shared memory that may still be under way when the copy engine is told to overwrite it.

    One entry per register that waits, at the worst copy: the constant offset in the address of its load.

    A warp issues in order: a load has come back when an instruction that takes one of its registers has been issued.
    Jumps forward take along what is waited for; behind one that is always taken only those that jump there arrive, and
    a load under a predicate was not made where a jump says that it does not hold.
    """
    waiting: dict[int, tuple[int, str]] = {}  # register: which load, and the predicate that it was made under
    jumps: dict[str, dict[int, tuple[int, str]]] = {}
    offsets: dict[int, int] = {}  # of a load's address

    def came_back(used: set[int]) -> None:
        loads = {waiting[r][0] for r in used & waiting.keys()}
        for r in [r for r, (load, _) in waiting.items() if load in loads]:
            del waiting[r]

    most: tuple[int, ...] = ()
    lines = re.findall(r"^(\.L_\w+):|/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([^;]+);", code, re.MULTILINE)
    for n, (label, predicate, line) in enumerate(lines):
        if label:
            waiting |= jumps.get(label, {})
            continue
        kind, *_ = line.split()
        registers = [int(r) for r in re.findall(r"\bR(\d+)\b", line)]
        if kind.startswith("LDS"):
            width = 4 if ".128" in kind else 2 if ".64" in kind else 1
            came_back(set(registers[1:]))
            offset = re.search(r"\+(0x[0-9a-f]+)\]", line)
            offsets[n] = int(offset[1], 16) if offset else 0
            if registers:  # a load into RZ leaves nothing behind
                waiting |= {registers[0] + i: (n, predicate) for i in range(width)}
        elif kind.startswith("UBLKCP"):
            most = max(most, tuple(sorted(offsets[load] for load, _ in waiting.values())), key=len)
        elif target := re.search(r"BRA.*`\((\.L_\w+)\)", line):
            opposite = predicate.replace("@", "@!").replace("!!", "")
            taken = {r: made for r, made in waiting.items() if not predicate or made[1] != opposite}
            jumps[target[1]] = jumps.get(target[1], {}) | taken
            if kind == "BRA":
                waiting = {r: made for r, made in waiting.items() if predicate and made[1] != predicate}
        else:
            wide = 4 if "MMA" in kind else 1
            came_back({r + i for r in registers for i in range(wide)})
            if written := re.match(r"\S+ (P\d)\b", line) if "P" in kind else None:  # it means something else now
                waiting = {r: (load, "" if p.lstrip("@!") == written[1] else p) for r, (load, p) in waiting.items()}
    return most


def disassemble(cubin: bytes) -> str | None:
    """Return the machine instructions, or None where no disassembler is installed."""
    if (tool := _disassembler()) is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        # Without the dataflow analysis, which only labels the targets of indirect jumps, it takes a third less.
        options = ["--dump-sass"] if "cuobjdump" in Path(tool).name else ["-c", "-ndf"]
        return subprocess.run([tool, *options, f.name], capture_output=True, text=True, check=True).stdout


@cache
def _version(tool: str) -> bytes:
    return subprocess.run([tool, "--version"], capture_output=True, check=True).stdout


@cache
def _disassembler() -> str | None:
    from cuda.pathfinder import find_nvidia_binary_utility

    triton = importlib.util.find_spec("triton")
    inside = [Path(p) / "backends/nvidia/bin" for p in (triton.submodule_search_locations or [])] if triton else []
    for name in ("nvdisasm", "cuobjdump"):
        if found := shutil.which(name) or find_nvidia_binary_utility(name):
            return found
        for directory in inside:
            if (directory / name).exists():
                return str(directory / name)
    return None
