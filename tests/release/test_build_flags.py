"""A wheel runs on all machines of its architecture: only what is chosen at run time uses special instructions."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

AVX2 = {"-mavx2", "-mfma", "-mf16c"}
AVX512 = AVX2 | {"-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"}
AMX = AVX512 | {"-mavx512vbmi", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"}
SPECIAL = {
    "x86_64": {
        "isa_avx2.cpp": AVX2,
        "isa_avxvnni.cpp": AVX2 | {"-mavxvnni"},
        "ops_avx2.cpp": AVX2,
        "f32_gemm_avx2.cpp": AVX2,
        "isa_avx512.cpp": AVX512,
        "isa_avx512vnni.cpp": AVX512 | {"-mavx512vnni"},
        "ops_avx512.cpp": AVX512,
        "f32_gemm_avx512.cpp": AVX512,
        "isa_vbmi.cpp": AVX512 | {"-mavx512vbmi", "-mavx512vnni"},
        "isa_amx.cpp": AMX,
        "stats_amx.cpp": AMX,
        "bf16_gemm_amx.cpp": AMX,
        "bf16_attention_amx.cpp": AMX,
        "i16_gemm_avx2.cpp": AVX2,
        "i16_gemm_avxvnni.cpp": AVX2 | {"-mavxvnni"},
        "i16_gemm_avx512.cpp": AVX512,
        "i16_gemm_avx512vnni.cpp": AVX512 | {"-mavx512vnni"},
    },
    "arm64": {"isa_dotprod.cpp": {"-march=armv8.2-a+dotprod"}},  # macOS's name for aarch64
}
CSRC = ROOT / "src" / "crelle" / "kernels" / "cpu" / "csrc"
INSTRUCTIONS = re.compile(r"-m(?:arch=|cpu=|sse|avx|amx|fma|f16c|bmi|sve|fpu=)")


@pytest.mark.skipif(not (shutil.which("c++") or os.environ.get("CXX")), reason="there is no C++ compiler here")
@pytest.mark.parametrize("processor", SPECIAL)
def test_special_instructions_stay_in_their_files(processor: str, tmp_path: Path) -> None:
    """CMake is asked what it would run; nothing is compiled, so the other architectures need no compiler.

    Flags that a packager gives to all files (here -mtune) and that nanobind has for its own on x86-64 (-mtls-dialect)
    do not matter, as long as they choose no instructions.
    """
    pytest.importorskip("nanobind")
    tools = Path(sys.executable).parent
    env = {k: v for k, v in os.environ.items() if k not in ("CXXFLAGS", "CFLAGS")}
    env["CXXFLAGS"] = "-mtune=generic"
    env["PATH"] = f"{tools}{os.pathsep}{env['PATH']}"
    # A system name makes it a cross-compilation, which keeps the processor that is given.
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command += ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={processor}"]
    command += ["-DNB_HAS_MTLS_GNU2=1"]  # as nanobind finds on x86-64, whatever the machine
    command += [f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ours, others = dict[str, set[str]](), set[str]()  # flags by file of ours, those of all other files
    for entry in json.loads((tmp_path / "compile_commands.json").read_text()):
        found, file = {f for f in entry["command"].split() if re.match(r"-m[a-z]", f)}, Path(entry["file"])
        if file.parent.parent == CSRC:
            ours[file.name] = found
        else:
            others |= found
    common, special = set.intersection(*ours.values()), SPECIAL[processor]
    assert "-mtune=generic" in common
    assert not [f for f in common | others if INSTRUCTIONS.match(f)]
    assert {name: found - common for name, found in ours.items() if found > common} == special
    # The linker keeps the first copy of an inline function: plain files first, then ever larger instruction sets.
    ninja = (tmp_path / "build.ninja").read_text()
    linked = re.search(r"^build _core\S*: CXX_MODULE_LIBRARY\S* ([^|\n]*)", ninja, re.M)
    archived = re.search(r"^build lib_core_special\S*: CXX_STATIC_LIBRARY\S* ([^|\n]*)", ninja, re.M)
    assert linked, "what the module is linked from"
    assert archived, "what is archived, and linked behind it"
    first, last = ([Path(o).stem for o in found[1].split()] for found in (linked, archived))
    assert "isa_generic.cpp" in first
    assert not set(first) & set(special)
    assert [name for name in last if name in special] == list(special)


def test_nothing_is_built_for_this_machine_alone() -> None:
    for name in ("CMakeLists.txt", "pyproject.toml", "Makefile"):
        flags = [line.partition("#")[0] for line in (ROOT / name).read_text().splitlines()]
        assert not any("=native" in line for line in flags), name
