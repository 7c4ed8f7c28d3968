"""Run-time compilation: it needs no GPU, so all of it is checked everywhere; what launches is marked `gpu`."""

import fcntl
import logging
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from disassembly import disassemble

from crelle.errors import BuildError, CrelleError, UnsupportedError
from crelle.kernels import cuda
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.launch import _Packer

pytestmark = pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))

SCALE = """
#include "inner/deep.cuh"
namespace test {
template <typename T, int TIMES>
__global__ void scale(const T* x, T* y, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = T(deep(float(x[i])) * factor * TIMES);
}
struct Pair { float* at; int n; int value; };
__global__ void fill(Pair p) {
  extern __shared__ int room[];
  room[threadIdx.x] = p.value;
  if (threadIdx.x < p.n) p.at[threadIdx.x] = room[threadIdx.x];
}
template <int WRONG> __global__ void broken() { static_assert(WRONG == 0, "only zero will do"); }
}
"""
DEEP = """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
__device__ inline float deep(float x) { return x; }
"""
KERNEL = ("scale.cu", "test::scale<__half, 3>")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernel sources of the test's own, an empty cache, and a process that has compiled nothing yet."""
    csrc = tmp_path / "csrc"
    (csrc / "inner").mkdir(parents=True)
    (csrc / "scale.cu").write_text(SCALE)
    (csrc / "inner" / "deep.cuh").write_text(DEEP)
    monkeypatch.setattr(jit, "SOURCES", csrc)
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path / "cache"))
    forget(monkeypatch)
    return csrc


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "_warned", threading.Event())


def cubins(sources: Path) -> list[Path]:
    return sorted((sources.parent / "cache" / "kernels").glob("*.cubin"))


# What comes out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [*jit.ARCHITECTURES, "sm_100"])
def test_compiles_for_each_architecture(sources: Path, arch: str) -> None:
    built = jit.compile(*KERNEL, arch)
    assert built.cubin[:4] == b"\x7fELF"
    assert built.name.encode() in built.cubin
    assert b"scale" in built.name.encode()
    assert (built.arch, built.cached) == (arch, False)
    assert built.seconds > 0


def test_line_info_is_kept(sources: Path) -> None:
    assert b".debug_line" in jit.compile(*KERNEL, "sm_90a").cubin


def test_denormals_are_kept(sources: Path) -> None:
    """FTZ in a disassembled multiplication would mean that integers in denormal floats are lost."""
    if (code := disassemble(jit.compile("scale.cu", "test::scale<float, 3>", "sm_90a").cubin)) is None:
        pytest.skip("no disassembler")
    assert "FMUL" in code
    assert "FTZ" not in code


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 7), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_architecture_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert jit.architecture(capability) == arch


def test_a_later_minor_version_takes_the_code_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_supported", lambda: (80, 90, 100, 120))
    assert jit.architecture((12, 9)) == "sm_120"


@pytest.mark.parametrize(
    ("capability", "sentence"), [((7, 5), r"capability 7\.5.*need 8\.0"), ((99, 0), r"99\.0.*NVRTC \d.*does not know")]
)
def test_a_device_out_of_range_gets_a_sentence(capability: tuple[int, int], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        jit.architecture(capability)


@pytest.mark.parametrize("arch", ["sm_75", "sm_81", "sm_9000", "gfx942", "compute_80", ""])
def test_an_unknown_architecture_is_refused(sources: Path, arch: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{arch}'.*sm_80.*sm_90"):
        jit.compile(*KERNEL, arch)


# Errors ------------------------------------------------------------------------------------------------------------


def test_a_compile_error_names_the_kernel_and_its_log(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(BuildError, match=r"test::broken<7> of scale\.cu .* sm_89: .*only zero will do") as e:
        jit.compile("scale.cu", "test::broken<7>", "sm_89")
    found = re.search(r"whole log: (.*)\)", str(e.value))
    assert found
    assert "detected during instantiation" in Path(found[1]).read_text()
    assert jit.compile("scale.cu", "test::broken<0>", "sm_89").cubin  # the lock was given back


def test_a_log_is_never_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary folder others can leave links under names that they guess."""
    shared, victim = tmp_path / "tmp", tmp_path / "victim"
    shared.mkdir()
    victim.write_text("mine")
    name = jit._path("scale.cu", "sm_80", "0" * 32).with_suffix(".log").name
    (shared / name).symlink_to(victim)
    monkeypatch.setattr(jit, "version", lambda: "NVRTC 13.0")
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    for cache in (tmp_path / "victim" / "no folder", tmp_path / "cache"):
        monkeypatch.setenv("CRELLE_CACHE", str(cache))
        if cache.name == "cache":
            (cache / "kernels").mkdir(parents=True)
            (cache / "kernels" / name).symlink_to(victim)
        error = jit._error("scale.cu", "scale<float>", "sm_80", "0" * 32, "scale.cu(3): error: expected a ;")
        assert victim.read_text() == "mine"
        log = Path(str(error).split("whole log: ")[1].rstrip(")"))
        assert "expected a ;" in log.read_text()
        assert not log.is_symlink()


def test_a_log_that_cannot_be_written_hides_no_compile_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "version", lambda: "NVRTC 13.0")
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path / "file"))
    error = jit._error("scale.cu", "scale<float>", "sm_80", "0" * 32, "scale.cu(3): error: expected a ;")
    assert "expected a ; (its log could not be written)" in str(error)


def test_an_unknown_kernel_is_a_build_error(sources: Path) -> None:
    with pytest.raises(BuildError, match=r"test::nothing.*undefined|test::nothing.*no member"):
        jit.compile("scale.cu", "test::nothing", "sm_80")
    with pytest.raises(BuildError, match=r"no kernel source .*absent\.cu"):
        jit.compile("absent.cu", "test::nothing", "sm_80")


# The cache ---------------------------------------------------------------------------------------------------------


def test_the_second_call_is_cached(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile(*KERNEL, "sm_80")
    from_memory = jit.compile(*KERNEL, "sm_80")
    forget(monkeypatch)
    monkeypatch.setattr(jit, "_nvrtc", None)  # nothing may be compiled any more
    from_disk = jit.compile(*KERNEL, "sm_80")
    for again in (from_memory, from_disk):
        assert again.cached
        assert (again.cubin, again.name, again.seconds) == (first.cubin, first.name, first.seconds)


def test_whatever_the_code_depends_on_is_in_the_name(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> bool:
        return not jit.compile(*KERNEL, "sm_80").cached

    assert made()
    assert not made()
    (sources / "inner" / "deep.cuh").write_text(DEEP.replace("return x", "return 2 * x"))
    assert made()
    (sources / "unrelated.cuh").write_text("int x;")
    assert not made()
    monkeypatch.setitem(jit._OPTIONS, "std", "c++17")
    assert made()
    monkeypatch.setattr(jit, "_version", lambda: (99, 0))
    assert made()
    assert len(cubins(sources)) == 4


def test_every_source_in_every_folder_is_in_the_toolchain(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash by which `generate` knows that a model's kernels were compiled before."""
    monkeypatch.setattr(jit, "architecture", lambda: "sm_90a")
    before = jit.toolchain()
    assert jit.toolchain() == before
    (sources / "inner" / "__pycache__").mkdir()
    (sources / "inner" / "__pycache__" / "launch.pyc").write_text("bytecode")
    assert jit.toolchain() == before
    (sources / "inner" / "deep.cuh").write_text(DEEP + "// changed")
    assert jit.toolchain() != before


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_file_is_compiled_again(
    damage: str, sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = jit.compile(*KERNEL, "sm_80")
    (path,) = cubins(sources)
    data = path.read_bytes()
    flipped = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
    path.write_bytes({"cut": data[:-5], "flipped": flipped, "empty": b"", "text": b"[]\nhello"}[damage])
    forget(monkeypatch)
    with caplog.at_level(logging.WARNING):
        again = jit.compile(*KERNEL, "sm_80")
    assert not again.cached
    assert (again.name, len(again.cubin)) == (whole.name, len(whole.cubin))
    assert "damaged" in caplog.text
    forget(monkeypatch)
    assert jit.compile(*KERNEL, "sm_80").cached


@pytest.mark.parametrize("why", ["no directory", "full"])
def test_without_a_cache_it_still_compiles_and_warns_once(
    why: str, sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "no directory":  # root may write anywhere, so a file stands where the directory should be
        (sources.parent / "cache").write_text("in the way")
    else:
        make = tempfile.mkstemp

        def full(*args: Any, **options: Any) -> tuple[int, str]:
            if "dir" in options:
                raise OSError(28, "No space left on device")
            return make(*args, **options)

        monkeypatch.setattr(tempfile, "mkstemp", full)
    with caplog.at_level(logging.WARNING):
        assert jit.compile(*KERNEL, "sm_80").cubin
        assert jit.compile(*KERNEL, "sm_89").cubin
    assert caplog.text.count("cannot be kept") == 1
    assert jit.compile(*KERNEL, "sm_80").cached  # in memory
    with pytest.raises(BuildError, match=r"only zero will do.*whole log: "):
        jit.compile("scale.cu", "test::broken<7>", "sm_89")


def test_a_cache_that_others_filled_may_be_read_only(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.compile(*KERNEL, "sm_80")
    forget(monkeypatch)
    monkeypatch.setattr(jit, "_lock", None)  # a hit takes no lock and writes nothing
    monkeypatch.setattr(jit, "_publish", None)
    assert jit.compile(*KERNEL, "sm_80").cached


CHILD = """
import sys, pathlib
from crelle.kernels.cuda import jit
jit.SOURCES = pathlib.Path(sys.argv[1])
jit.missing()
print("ready", flush=True)
print(jit.compile(*sys.argv[2:4], "sm_80").cached, flush=True)
"""


def test_two_processes_compile_a_kernel_once(sources: Path) -> None:
    locks = sources.parent / "cache" / "kernels" / "locks"
    locks.mkdir(parents=True)
    with open(locks / jit._key(*KERNEL, "sm_80")[:2], "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # so that both arrive before either may begin
        command = [sys.executable, "-c", CHILD, str(sources), *KERNEL]
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "PYTHONPATH": path}
        children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
        for child in children:
            assert child.stdout
            assert child.stdout.readline() == "ready\n"
        assert not cubins(sources)
    outputs = [child.communicate(timeout=120)[0].strip() for child in children]
    assert sorted(outputs) == ["False", "True"]
    assert len(cubins(sources)) == 1
    assert not list((sources.parent / "cache" / "kernels").glob(".*"))  # no temporary file is left


def test_compile_all_keeps_the_order_and_reports_progress(sources: Path) -> None:
    kernels = [("scale.cu", f"test::scale<float, {i}>") for i in range(6)]
    seen: list[tuple[int, int]] = []
    built = jit.compile_all(kernels, "sm_80", lambda done, of: seen.append((done, of)))
    assert [(b.file, b.expression) for b in built] == kernels
    assert seen == [(i, 6) for i in range(1, 7)]


def test_compile_all_raises_what_failed(sources: Path) -> None:
    with pytest.raises(BuildError, match="broken<3>"):
        jit.compile_all([KERNEL, ("scale.cu", "test::broken<3>")], "sm_80")


# Availability ------------------------------------------------------------------------------------------------------


def test_without_the_packages_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(jit, "_version", absent)
    assert re.search(r"No module named 'cuda'.*pip install 'crelle\[cuda\]'", str(jit.missing()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "crelle[cuda]" in str(cuda.available.__wrapped__())


def test_availability_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = cuda.available.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ask() == "sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    assert "need 8.0" in str(ask())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert ask() is None


def test_importing_crelle_imports_no_cuda() -> None:
    code = "import sys, crelle, crelle.kernels.cuda; print([m for m in sys.modules if m.split('.')[0] == 'cuda'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


# Launching ---------------------------------------------------------------------------------------------------------


def test_arguments_lie_where_the_driver_looks() -> None:
    import ctypes

    packer = _Packer(["P", "i", "f", "12s", "q", "?"])
    buffer, pointers = packer.take()
    packer.pack_into(buffer, 0, 2**40, -7, 1.5, b"twelve bytes", -(2**40), True)
    at = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
    read = [ctypes.string_at(at[i], n) for i, n in enumerate((8, 4, 4, 12, 8, 1))]
    assert read == [struct.pack(f, v) for f, v in zip("Pif", (2**40, -7, 1.5), strict=True)] + [
        b"twelve bytes",
        struct.pack("q", -(2**40)),
        b"\1",
    ]
    other, _ = packer.take()
    assert other is not buffer


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pdl", [False, True])
def test_launch_computes(sources: Path, dtype: torch.dtype, pdl: bool) -> None:
    from crelle.kernels.cuda import launch

    launch._load.cache_clear()
    names = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
    kernel = launch.load("scale.cu", f"test::scale<{names[dtype]}, 3>")
    assert launch.load("scale.cu", f"test::scale<{names[dtype]}, 3>") is kernel
    x = torch.arange(1000, device="cuda").to(dtype)
    y = torch.full_like(x, torch.nan)
    kernel((4, 1, 1), 256, x, y, 0.5, 999, pdl=pdl)
    assert torch.equal(y[:999], (x.float() * 1.5).to(dtype)[:999])
    assert y[999].isnan()
    assert launch.attributes(kernel)["local_bytes"] == 0
    assert launch.attributes(kernel)["registers"] > 0
    assert launch.multiprocessors() > 1


@pytest.mark.gpu
def test_launch_in_a_graph_on_another_stream_and_in_another_thread(sources: Path) -> None:
    from crelle.kernels.cuda import launch

    launch._load.cache_clear()
    kernel = launch.load("scale.cu", "test::scale<float, 1>")
    x, y = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel((1, 1, 1), 256, x, y, 2.0, 256)
        kernel((1, 1, 1), 256, y, x, 1.0, 256, pdl=False)
    assert y.sum() == 0  # captured, not run
    for _ in range(3):
        graph.replay()
    assert x[0] == 8

    thread = threading.Thread(target=lambda: kernel((1, 1, 1), 256, x, y, 2.0, 256))  # has no context of its own
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert y[255] == 16


@pytest.mark.gpu
def test_launch_takes_structs_and_much_shared_memory(sources: Path) -> None:
    from crelle.kernels.cuda import launch

    launch._load.cache_clear()
    y = torch.zeros(100, device="cuda")
    for value, shared in ((5, 1024), (6, 100_000), (7, 1024)):
        pair = struct.pack("Pii", y.data_ptr(), 100, value)
        launch.load("scale.cu", "test::fill")((1, 1, 1), 128, pair, shared=shared)
        assert torch.equal(y, torch.full_like(y, value))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((None, None, 1.0), "takes 4 arguments, got 3"),
        ((None, None, "1", 0), "argument 2 is str '1'"),
        ((None, 1.0, 1.0, 0, 0), "takes 4 arguments, got 5"),
        ((None, None, 1.0, 2**31), "does not fit its parameter"),
        ((7, b"123", 1.0, 0), "argument 1 is bytes"),
    ],
)
def test_wrong_arguments_get_a_sentence(sources: Path, args: tuple[object, ...], sentence: str) -> None:
    from crelle.kernels.cuda import launch

    launch._load.cache_clear()
    with pytest.raises(CrelleError, match=sentence):
        launch.load("scale.cu", "test::scale<float, 1>")((1, 1, 1), 256, *args)


@pytest.mark.gpu
def test_a_driver_error_names_itself_and_the_kernel(sources: Path) -> None:
    from crelle.kernels.cuda import launch

    launch._load.cache_clear()
    kernel = launch.load("scale.cu", "test::scale<float, 1>")
    with pytest.raises(CrelleError, match=r"test::scale<float, 1>.*block 4096.*CUDA_ERROR_INVALID_VALUE"):
        kernel((1, 1, 1), 4096, None, None, 1.0, 0)
    with pytest.raises(CrelleError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel((1, 1, 1), 32, None, None, 1.0, 0, shared=1 << 20)
