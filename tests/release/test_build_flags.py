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


COMPILER = shutil.which(os.environ.get("CXX", "c++"))


def configured(processor: str, build: Path, *options: str) -> list[dict[str, str]]:
    """Return what CMake would run to compile for a processor, file by file."""
    pytest.importorskip("nanobind")
    tools = Path(sys.executable).parent
    env = {k: v for k, v in os.environ.items() if k not in ("CXXFLAGS", "CFLAGS")}
    env["CXXFLAGS"] = "-mtune=generic"
    env["PATH"] = f"{tools}{os.pathsep}{env['PATH']}"
    # A system name makes it a cross-compilation, which keeps the processor that is given.
    command = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command += ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={processor}"]
    command += ["-DNB_HAS_MTLS_GNU2=1"]  # as nanobind finds on x86-64, whatever the machine
    command += [f"-DPython_EXECUTABLE={sys.executable}", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads((build / "compile_commands.json").read_text())
    return found


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("processor", SPECIAL)
def test_special_instructions_stay_in_their_files(processor: str, tmp_path: Path) -> None:
    """CMake is asked what it would run; nothing is compiled, so the other architectures need no compiler.

    Flags that a packager gives to all files (here -mtune) and that nanobind has for its own on x86-64 (-mtls-dialect)
    do not matter, as long as they choose no instructions.
    """
    ours, others = dict[str, set[str]](), set[str]()  # flags by file of ours, those of all other files
    for entry in configured(processor, tmp_path):
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


LEFT_OUT = {
    "AVX512": ("avx512f avx512vl", ("_avx512", "_vbmi")),
    "AMX": ("amx_bf16 amx_tile amx_int8", ("_amx",)),
    "AVX_VNNI": ("avx_vnni", ("_avxvnni",)),
}


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("lacks", [["AMX"], ["AVX_VNNI"], ["AVX512", "AMX", "AVX_VNNI"], []])
def test_a_native_build_leaves_out_only_what_the_machine_lacks(lacks: list[str], tmp_path: Path) -> None:
    flags = " ".join(["flags : sse2 avx2 fma f16c", *(flag for s, (flag, _) in LEFT_OUT.items() if s not in lacks)])
    built = configured("x86_64", tmp_path, "-DCRELLE_NATIVE=ON", f"-DCRELLE_CPU_FLAGS={flags} sse4_2")
    files = {Path(entry["file"]).name: entry["command"] for entry in built}
    out = {name for name in SPECIAL["x86_64"] for s in lacks for part in LEFT_OUT[s][1] if part in name}
    assert set(SPECIAL["x86_64"]) - set(files) == out
    defined = set(re.findall(r"-DCRELLE_WITHOUT_(\w+)", files.get("left_out.cpp", "")))
    assert defined == set(lacks)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_has_an_empty_table_each(name: str) -> None:
    """Else a build without it does not link: on machines that lack it, not on this one."""
    special = [CSRC / f for f in CSRC.rglob("*.cpp") if any(part in f.name for part in LEFT_OUT[name][1])]
    headers = "\n".join(f.read_text() for f in CSRC.rglob("*.h"))
    declared = {
        n for line in re.findall(r"^extern const \w+ ([^;]*);", headers, re.M) for n in re.findall(r"\bk\w+", line)
    }
    text = "\n".join(f.read_text() for f in special)
    needed = {n for n in declared if re.search(rf"^const \w+ .*\b{n}\b", text, re.M)}
    part = (
        (CSRC / "isa" / "left_out.cpp").read_text().split(f"#if defined(CRELLE_WITHOUT_{name})")[1].split("#endif")[0]
    )
    assert needed, special
    assert needed == set(re.findall(r"\bk[A-Z]\w+(?=\{\})", part))


def test_nothing_is_built_for_this_machine_alone() -> None:
    for name in ("CMakeLists.txt", "pyproject.toml", "Makefile"):
        flags = [line.partition("#")[0] for line in (ROOT / name).read_text().splitlines()]
        assert not any("=native" in line for line in flags), name
