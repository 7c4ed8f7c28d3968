"""Dot products and look-ups of instruction sets that this machine lacks: Arm's under qemu, AVX-VNNI's by AVX-512's own.

They compile for minutes: `make test-slow`.
"""

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from crelle.kernels import cpu

pytestmark = pytest.mark.slow

CSRC = Path(__file__).parents[4] / "src" / "crelle" / "kernels" / "cpu" / "csrc"
SHARED = (
    "planes/matmul",
    "planes/weight",
    "mixed/mixed_weight",
    "integer/integer_weight",
    "trellis/trellis_weight",
    "base/pool",
    "attention/hadamard",
)
FLAGS = ("-std=c++20", "-O2", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
ARM, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"


def build(folder: Path, compiler: str, files: dict[str, Sequence[str]], main: Sequence[str] = ()) -> Path:
    """Compile sources, each with its own flags, and link them with foreign_products.cpp."""
    sources = [(CSRC / f"{name}.cpp", flags) for name, flags in files.items()]
    sources.append((Path(__file__).with_name("foreign_products.cpp"), main))
    objects = []
    for source, flags in sources:
        objects.append(folder / f"{source.stem}.o")
        command = [compiler, *FLAGS, *flags, f"-I{CSRC}", "-c", str(source), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    subprocess.run([compiler, *map(str, objects), "-o", str(folder / "run"), "-lpthread", "-static"], check=True)
    return folder / "run"


@pytest.mark.skipif(not (shutil.which(ARM) and shutil.which(QEMU)), reason=f"needs {ARM} and {QEMU}")
def test_arm_under_an_emulator(tmp_path: Path) -> None:
    files: dict[str, Sequence[str]] = dict.fromkeys((*SHARED, "isa/isa", "isa/isa_generic", "isa/isa_neon"), ())
    files["tiles/f32_gemm_generic"] = ()
    files["isa/isa_dotprod"] = ["-march=armv8.2-a+dotprod"]
    done = subprocess.run([QEMU, "-cpu", "max", str(build(tmp_path, ARM, files))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "dotprod" in done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="is of x86-64")
@pytest.mark.skipif(
    cpu.available() is not None or not {"avx512-vnni", "vbmi"} & set(cpu.core().isas()), reason="needs AVX-512 VNNI"
)
def test_avx_vnni_by_the_instruction_of_avx512(tmp_path: Path) -> None:
    """The same instruction in its other encoding."""
    shim = tmp_path / "shim.h"
    shim.write_text("#define __AVXVNNI__ 1\n#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32\n")
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    files: dict[str, Sequence[str]] = dict.fromkeys(SHARED, ())
    files["isa/isa_avx2"] = files["tiles/f32_gemm_avx2"] = avx2
    files["isa/isa_avxvnni"] = [*avx2, "-mavx512vl", "-mavx512vnni", "-include", "immintrin.h", "-include", str(shim)]
    done = subprocess.run([build(tmp_path, "g++", files, ["-DONLY=kAvxVnni"])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "avx-vnni" in done.stdout
