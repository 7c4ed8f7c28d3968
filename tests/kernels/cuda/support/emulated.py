"""Runs CUDA kernels on the CPU: their own source, compiled by the host's C++ compiler with emulator/*.cuh.

A thread block is as many fibers; blocks run one after the other, in shared memory full of NaN. What it checks is the
arithmetic, the indices and the barriers, by the code path before Hopper; speed and races of the hardware it cannot.
Kernels whose name says sm90 take Hopper's path, last cluster first: a stream-K block waits for later ones. Blocks of a
cluster run side by side. What cp.async.bulk and wgmma do out of order it does not have.
"""

import contextlib
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from crelle.cache import cache_directory
from crelle.kernels.cuda import jit

EMULATOR = Path(__file__).parents[1] / "emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")

_MAIN = """
#include "{file}"
extern "C" void run(int gx, int gy, int gz, int threads, int bytes{parameters}) {{
  gridDim = {{(unsigned)gx, (unsigned)gy, (unsigned)gz}}, blockDim = {{(unsigned)threads, 1, 1}};
  for (unsigned n = gx * gy * gz, k = 0; k < n; k += {cluster}) {{
    const unsigned i = {last_first} ? n - {cluster} - k : k;
    blockIdx = {{i % gx, i / gx % gy, i / gx / gy}};
    memset(crelle::shared, 0xff, {cluster} * crelle::SHARED);
    run_block(threads, [&] {{ {expression}({arguments}); }}, {cluster});
    for (size_t k = 0; k < {cluster} * crelle::SHARED; k++) {{
      if (k % crelle::SHARED < (size_t)bytes) continue;
      if ((unsigned char)crelle::shared[k] != 0xff) fprintf(stderr, "shared memory was overrun\\n"), abort();
    }}
  }}
}}
"""


_OPTIONS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC"]
_HEADERS = ("cmath", "cstdint", "cstdio", "cstdlib", "cstring", "functional", "ucontext.h", "vector")


@cache
def _precompiled_headers(cache: Path) -> Path:
    """Compile once what the emulator includes of the host: a third of the time that a kernel takes."""
    key = hashlib.sha256(repr((_OPTIONS, _HEADERS, COMPILER)).encode()).hexdigest()[:24]
    folder = cache / f"host-{key}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as new:
            header = Path(new) / "host" / "host.h"
            header.parent.mkdir()
            header.write_text("".join(f"#include <{name}>\n" for name in _HEADERS))
            command = [str(COMPILER), *_OPTIONS, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
            subprocess.run(command, check=True)
            with contextlib.suppress(OSError):  # another process was first
                header.parent.rename(folder)
    return folder / "host.h"


class EmulatedKernel:
    """What crelle.kernels.cuda.launch.load returns, on the CPU."""

    def __init__(self, file: str, expression: str, truncates: bool = False) -> None:
        """Truncates: tensor instructions truncate their sums, as those of an H200 do."""
        self.file, self.expression, self.truncates = file, expression, truncates

    def __call__(self, grid: tuple[int, int, int], block: int, *args: Any, shared: int = 0, pdl: bool = False) -> None:
        assert min(grid) > 0, f"{self.expression} was launched with the empty grid {grid}"
        kinds, values = "", list[Any]()
        for a in args:
            if a is None or isinstance(a, Tensor):
                kinds += "p"
                values.append(ctypes.c_void_p(0 if a is None else a.data_ptr()))
            elif isinstance(a, bytes):  # a struct by value
                kinds += "b"
                values.append(ctypes.c_char_p(a))
            else:
                kinds += "f" if isinstance(a, float) else "i"
                values.append(ctypes.c_float(a) if isinstance(a, float) else ctypes.c_int(a))
        _built(self.file, self.expression, kinds, self.truncates).run(*grid, block, shared, *values)


@cache
def _built(file: str, expression: str, kinds: str, truncates: bool) -> ctypes.CDLL:
    names = {"p": "Pointer", "b": "Struct", "i": "int", "f": "float"}
    arguments = ", ".join(f"a{i}" for i in range(len(kinds)))
    parameters = "".join(f", {names[k]} a{i}" for i, k in enumerate(kinds))
    anything = "struct Pointer { void *p; template <typename T> operator T *() const { return (T *)p; } };\n"
    anything += "#include <cstring>\nstruct Struct { const void *p; template <typename T> operator T() const"
    anything += " { T v; memcpy(&v, p, sizeof v); return v; } };\n"
    hopper = "sm90" in expression
    found = re.search(r"\b(\d+), [\w:]+>$", expression) if hopper else None  # the last number before the type
    cluster, last_first = int(found[1]) if found else 1, str(hopper).lower()
    main = _MAIN.format(
        file=file,
        expression=expression,
        arguments=arguments,
        parameters=parameters,
        last_first=last_first,
        cluster=cluster,
    )
    sources = {str(p.relative_to(EMULATOR)): p.read_text() for p in EMULATOR.rglob("*.cuh")}
    for name in jit._sources(file):
        text = (jit.SOURCES / name).read_text()
        if hopper:
            text = text.replace(
                "extern __shared__ __align__(128) char shared[];", "char *const shared = block_shared();"
            )
        sources.setdefault(name, text.replace("extern __shared__", "extern"))
    defined = f"#define TRUNCATES {str(truncates).lower()}\n#define ARCH {900 if hopper else 800}\n"
    sources["main.cpp"] = defined + anything + main
    key = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:24]
    library = cache_directory() / "emulated" / f"{key}.so"
    if not library.exists():
        host = _precompiled_headers(library.parent)
        # A folder of its own: other processes may build the same.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            for name, text in sources.items():
                (Path(folder) / name).parent.mkdir(exist_ok=True)
                (Path(folder) / name).write_text(text)
            made = Path(folder) / "kernel.so"
            paths = ["-include", str(host), f"-I{folder}", "-o", str(made), str(Path(folder) / "main.cpp")]
            subprocess.run([str(COMPILER), *_OPTIONS, "-shared", *paths], check=True)
            made.rename(library)
    return ctypes.CDLL(str(library))
