"""The Arm files compile, wherever a cross-compiler is installed (Debian: g++-aarch64-linux-gnu)."""

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = "aarch64-linux-gnu-g++"
CSRC = Path(__file__).parents[2] / "src" / "crelle" / "kernels" / "cpu" / "csrc"
FLAGS = {"mixed_dotprod": ["-march=armv8.2-a+dotprod"]}  # as in CMakeLists.txt
PORTABLE = (
    *FLAGS,
    "isa_neon",
    "isa_generic",
    "ops_generic",
    "ops",
    "isa",
    "matmul",
    "weight",
    "mixed_weight",
    "pool",
    "decoder",
    "prefill",
)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} here: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.parametrize("name", PORTABLE)
def test_compiles_for_arm(name: str, tmp_path: Path) -> None:
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-c", *FLAGS.get(name, [])]
    command = [COMPILER, *flags, str(CSRC / f"{name}.cpp"), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
