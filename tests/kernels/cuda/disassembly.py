"""Machine instructions of what NVRTC made, where a disassembler is installed."""

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path


def disassemble(cubin: bytes) -> str | None:
    """Return the machine instructions, or None where no disassembler is installed."""
    if (tool := _disassembler()) is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [tool, "--dump-sass", f.name] if "cuobjdump" in Path(tool).name else [tool, "-c", f.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
