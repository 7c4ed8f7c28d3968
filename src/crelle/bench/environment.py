"""What a measurement was made on and with: goes into every result file, together with the command."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from crelle.formats.storage.io import to_json, write_whole, writing
from crelle.kernels import cpu
from crelle.kernels.threads import available_cores
from crelle.version import __version__


def cpu_name() -> str:
    """Return the processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment() -> dict[str, Any]:
    """Return machine, versions, commit and command."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["crelle", *(_without_place(a) for a in sys.argv[1:])]),
        "commit": _commit(),
        "machine": {
            "cpu": cpu_name(),
            "cores": available_cores(),
            "system": platform.platform(terse=True),
            "instruction_set": cpu.core().isa() if cpu.available() is None else None,
        },
        "versions": {"crelle": __version__, "python": platform.python_version(), **_versions("torch", "numpy")},
    }


def write_result(path: Path, measured: dict[str, Any]) -> None:
    """Write NAME.json: what was measured, after machine, versions, commit and command."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.with_suffix(".json"), to_json({**environment(), **measured}))


def _without_place(argument: str) -> str:
    """Leave out where on this machine a file lies: a result file is for others to read."""
    return Path(argument).name if argument.startswith(("/", "~")) else argument


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _commit() -> str:
    """Return the commit of the source tree we run from, with a + when it was changed since; '' outside of one."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", ":/src"], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
