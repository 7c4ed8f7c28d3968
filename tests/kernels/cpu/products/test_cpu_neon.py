"""The Arm files compile, wherever a cross-compiler is installed (Debian: g++-aarch64-linux-gnu).

Two of them with `make test`, the others, which take minutes, with `make test-slow`. A file that compiled is compiled
again only if the compiler or any of the sources changes: $CRELLE_CACHE/compiled.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from crelle.cache import cache_directory

COMPILER = "aarch64-linux-gnu-g++"
CSRC = Path(__file__).parents[4] / "src" / "crelle" / "kernels" / "cpu" / "csrc"
FLAGS = {"isa_dotprod": ["-march=armv8.2-a+dotprod"]}  # as in CMakeLists.txt
PORTABLE = (
    *FLAGS,
    "isa_neon",
    "isa_generic",
    "ops_generic",
    "f32_gemm_generic",
    "ops",
    "isa",
    "matmul",
    "weight",
    "mixed_weight",
    "integer_weight",
    "trellis_weight",
    "pool",
    "decoder",
    "prefill",
)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} here: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.parametrize(
    "name", [name if name in ("matmul", "pool") else pytest.param(name, marks=pytest.mark.slow) for name in PORTABLE]
)
def test_compiles_for_arm(name: str, tmp_path: Path) -> None:
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-c", *FLAGS.get(name, [])]
    command = [COMPILER, *flags, f"-I{CSRC}", str(next(CSRC.glob(f"*/{name}.cpp"))), "-o", str(tmp_path / "out.o")]
    passed = cache_directory() / "compiled" / key([*flags, name])
    if passed.is_file():
        return
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()


def key(options: list[str]) -> str:
    """A hash of the compiler, all the sources, these options and this file."""
    said = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    files = [file.read_bytes() for file in (Path(__file__), *sorted(CSRC.glob("*/*")))]
    return hashlib.sha256(b"\0".join([said, *files, *map(str.encode, options)])).hexdigest()[:32]
