"""Kernels in .cu files become cubins when they are first needed, by NVRTC; no compiler and no GPU has to be there.

A kernel is a template and a variant is a C++ name expression, `crelle::bmma_gemv<3, 8, 2>`: NVRTC instantiates exactly
that and says under which mangled name. What it made is kept in $CRELLE_CACHE/kernels, under a name that hashes all it
depends on: the .cu, every file of ours that it includes, the expression, the architecture, the options, NVRTC's
version.
So nothing there is ever out of date, and `rm -r` on the directory is always safe. Files are published by a rename,
one process compiles while the others wait at a lock, and a file whose checksum is wrong is compiled again.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from crelle.cache import cache_directory
from crelle.errors import BuildError, UnsupportedError

SOURCES = Path(__file__).parent  # .cu and .cuh, in the folders of the Python that launches them
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")  # what CI compiles for; newer devices get their own plain sm_XY

# -ftz=false: denormal floats carry integers in our kernels, so flushing them to zero would change results.
# Line info costs nothing at run time and lets profilers and compute-sanitizer name the source line.
_OPTIONS: dict[str, Any] = {"std": "c++20", "lineinfo": True, "ftz": False, "use_fast_math": False}
_OPTIONS["device_as_default_execution_space"] = True  # some versions of NVRTC refuse generic lambdas without it

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_log = logging.getLogger(__name__)

# Called with file and expression before a kernel is compiled, which takes a second or more: whoever has a user tells.
on_compile: Callable[[str, str], None] | None = None


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One compiled kernel: the device code and the name under which it holds the function."""

    file: str
    expression: str
    arch: str
    name: str  # lowered (mangled)
    cubin: bytes
    seconds: float  # that NVRTC took; of the first compilation, where this came from the cache
    cached: bool  # read from the disk (or from this process's memory) rather than compiled by this call


def compile(file: str, expression: str, arch: str | None = None) -> CompiledKernel:  # noqa: A001  as in re.compile
    """Return kernel `expression` of `file`, compiled or cached, for `arch` (the current device's by default)."""
    arch = architecture() if arch is None else _checked(arch)
    key = _key(file, expression, arch)
    if (built := _memory.get(key)) or (built := _read(_path(file, arch, key))):
        return _memory.setdefault(key, built)
    with _lock(key):
        if built := _read(_path(file, arch, key)):  # another process was faster
            return _memory.setdefault(key, built)
        if on_compile is not None:
            on_compile(file, expression)
        built = _nvrtc(file, expression, arch, key)
        _publish(_path(file, arch, key), built)
    _memory[key] = _as_cached(built)
    return built


def compile_all(
    kernels: Sequence[tuple[str, str]],
    arch: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
) -> list[CompiledKernel]:
    """Compile many (file, expression) pairs side by side; `progress(done, of)` is called after each.

    Threads are enough: NVRTC lets Python run meanwhile, and compiles in all of them at once. The first error ends it,
    once the kernels that are being compiled at that moment are finished.
    """
    from crelle.kernels.threads import available_cores

    arch = architecture() if arch is None else _checked(arch)
    _program()  # importing it first in several threads at once finds it half made
    with ThreadPoolExecutor(threads or available_cores()) as pool:
        jobs = [pool.submit(compile, file, expression, arch) for file, expression in kernels]
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                if progress:
                    progress(done, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [job.result() for job in jobs]


# --- architectures ----------------------------------------------------------------------------------------------------


def architecture(capability: tuple[int, int] | None = None) -> str:
    """Return what to compile for on a device of this compute capability (the current device's by default).

    Device code runs on its own minor version and on later ones of the same major version, so 8.6 takes sm_80.
    """
    if capability is None:
        import torch

        capability = torch.cuda.get_device_capability()
    major, minor = capability
    if capability < (8, 0):
        raise UnsupportedError(
            f"this device has compute capability {major}.{minor}; the CUDA kernels need 8.0 (Ampere, 2020) or newer"
        )
    if major == 8:
        return "sm_89" if minor >= 9 else "sm_80"
    if major == 9:
        return "sm_90a"
    known = [n for n in _supported() if n // 10 == major and n % 10 <= minor]
    if not known:
        raise UnsupportedError(
            f"this device has compute capability {major}.{minor}, which {version()} does not know; "
            f"install a newer one: pip install --upgrade nvidia-cuda-nvrtc"
        )
    return f"sm_{max(known)}"


def _checked(arch: str) -> str:
    """Refuse what NVRTC or our kernels cannot do, with a sentence."""
    if arch in ARCHITECTURES:
        return arch
    found = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if found is None or int(found[1]) < 80 or int(found[1]) not in _supported():
        could = ", ".join(f"sm_{n}" for n in _supported() if n >= 80)
        raise UnsupportedError(f"cannot compile kernels for '{arch}'; {version()} and Crelle can do: {could}")
    return arch


# --- NVRTC ------------------------------------------------------------------------------------------------------------


def missing() -> str | None:
    """Return None when NVRTC can be used, or the sentence that says what to install."""
    try:
        _version()
        _program()
    except (ImportError, RuntimeError, OSError) as e:  # no package, or a package whose library does not load
        first = (str(e).splitlines() or [""])[0]
        return f"NVRTC, which compiles the CUDA kernels, is not usable ({first}): pip install 'crelle[cuda]'"
    return None


def _nvrtc(file: str, expression: str, arch: str, key: str) -> CompiledKernel:
    program, options_of = _program()
    try:
        start = perf_counter()
        options = options_of(name=file, arch=arch, include_path=[str(SOURCES), *_headers()], **_OPTIONS)
        code = program((SOURCES / file).read_text(), "c++", options).compile("cubin", name_expressions=[expression])
        seconds = perf_counter() - start
    except Exception as e:  # NVRTCError; its class moved between versions of cuda.core
        if "NVRTC_ERROR" not in str(e):
            raise
        raise _error(file, expression, arch, key, str(e)) from None
    name = code.symbol_mapping[expression]
    return CompiledKernel(
        file, expression, arch, name.decode() if isinstance(name, bytes) else name, code.code, seconds, False
    )


def _error(file: str, expression: str, arch: str, key: str, log: str) -> BuildError:
    lines = log.splitlines()
    first = next((line for line in lines if re.search(r"\berror\b\s*[:#]|\bfatal\b", line)), lines[0])
    text = f"{version()}: {file}, {expression}, {arch}, {_OPTIONS}\n\n{log}\n"
    kept = _keep_log(_path(file, arch, key).with_suffix(".log"), text)
    where = f"whole log: {kept}" if kept else "its log could not be written"
    return BuildError(f"kernel {expression} of {file} does not compile for {arch}: {first.strip()} ({where})")


def _keep_log(path: Path, text: str) -> Path | None:
    """Write a log into the cache, else into the temporary folder: never through a link that somebody left there."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, text.encode())
        return path
    with suppress(OSError):
        fd, made = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".log")  # a new file, which only this user can read
        with open(fd, "w") as f:
            f.write(text)
        return Path(made)
    return None


@cache
def _program() -> tuple[Any, Any]:
    """Import cuda.core only when something is compiled; it was `experimental` before 1.0."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:
        from cuda.core.experimental import Program, ProgramOptions
    return Program, ProgramOptions


@cache
def _headers() -> tuple[str, ...]:
    """The directory with cuda_fp16.h and its kin: of NVIDIA's wheels, else of an installed toolkit."""
    places = [Path(p) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if (p := os.environ.get(name))]
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        if found := find_nvidia_header_directory("cudart"):
            places.insert(0, Path(found))
    except ImportError:  # before it could find headers
        import nvidia

        places = [d for p in nvidia.__path__ for d in sorted(Path(p).glob("*/include"))] + places
    for place in places:
        if (place / "cuda_fp16.h").is_file():
            return (str(place),)
    raise UnsupportedError("the headers of the CUDA toolkit (cuda_fp16.h) were not found: pip install 'crelle[cuda]'")


@cache
def _version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status):
        raise RuntimeError(f"nvrtcVersion: {status.name}")
    return major, minor


def version() -> str:
    """Return which compiler this is, e.g. NVRTC 13.4."""
    return "NVRTC {}.{}".format(*_version())


@cache
def _supported() -> tuple[int, ...]:
    """The architectures that this NVRTC knows, e.g. 80, 86, 90."""
    from cuda.bindings import nvrtc

    return tuple(nvrtc.nvrtcGetSupportedArchs()[1])


# --- the cache on disk ------------------------------------------------------------------------------------------------

_memory: dict[str, CompiledKernel] = {}
_warned = threading.Event()


def _key(file: str, expression: str, arch: str) -> str:
    """Hash all that the device code depends on."""
    parts = [expression, arch, _OPTIONS, _version(), sorted(_sources(file).items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def toolchain() -> str:
    """Return a hash of what all device code depends on: compiler, options, this device's architecture, all sources."""
    files = sorted(p for p in SOURCES.rglob("*") if p.suffix in (".cu", ".cuh", ".py"))
    sources = [(p.relative_to(SOURCES).as_posix(), hashlib.sha256(p.read_bytes()).hexdigest()) for p in files]
    return hashlib.sha256(json.dumps([architecture(), _OPTIONS, _version(), sources]).encode()).hexdigest()


def _sources(file: str) -> dict[str, str]:
    """Return {name: hash} for a source and all of our files that it includes, however deep."""
    seen: dict[str, str] = {}
    todo = [file]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        path = SOURCES / name
        if not path.is_file():
            if name == file:
                raise BuildError(f"there is no kernel source {path}")
            continue  # NVRTC will say it better, or the include is in a branch that is never taken
        text = path.read_text()
        seen[name] = hashlib.sha256(text.encode()).hexdigest()
        todo += _INCLUDE.findall(text)
    return seen


def kernel_directory() -> Path:
    """Return where compiled kernels are kept."""
    return cache_directory() / "kernels"


def _path(file: str, arch: str, key: str) -> Path:
    return kernel_directory() / f"{Path(file).stem}-{arch}-{key}.cubin"


def _digest(name: str, cubin: bytes) -> str:
    return hashlib.sha256(name.encode() + b"\0" + cubin).hexdigest()


def _read(path: Path) -> CompiledKernel | None:
    """Return what the cache holds, or None when it is absent or damaged. One line of JSON, then the cubin."""
    try:
        line, _, cubin = path.read_bytes().partition(b"\n")
        head = json.loads(line)
        if head.pop("sha256") == _digest(head["name"], cubin):
            return CompiledKernel(**head, cubin=cubin, cached=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    _log.warning("%s is damaged; compiling the kernel again", path)
    return None


def _publish(path: Path, built: CompiledKernel) -> None:
    head = {k: getattr(built, k) for k in ("file", "expression", "arch", "name", "seconds")}
    head["sha256"] = _digest(built.name, built.cubin)
    write_cached(path, json.dumps(head).encode() + b"\n" + built.cubin)


def write_cached(path: Path, data: bytes) -> None:
    """Write under another name in the same directory, then rename: readers see all of it or nothing.

    A cache that cannot be written is a warning, once.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, data)
    except OSError as e:
        _warn(e)


def _write_whole(path: Path, data: bytes) -> None:
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(fd, "wb") as f:
            f.write(data)
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


@contextmanager
def _lock(key: str) -> Iterator[None]:
    """Hold the lock of this kernel across processes and threads; 256 lock files serve all kernels."""
    try:
        directory = kernel_directory() / "locks"
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / key[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        _warn(e)
        yield
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # given back by close, also when the process dies
        except OSError as e:  # a file system without locks: twice the work, but never a wrong file
            _log.debug("no lock on %s: %s", directory, e)
        yield
    finally:
        os.close(fd)


def _warn(e: OSError) -> None:
    if not _warned.is_set():
        _warned.set()
        _log.warning(
            "compiled kernels cannot be kept in %s (%s); they are compiled anew in every process", kernel_directory(), e
        )


def _as_cached(built: CompiledKernel) -> CompiledKernel:
    return CompiledKernel(built.file, built.expression, built.arch, built.name, built.cubin, built.seconds, True)
