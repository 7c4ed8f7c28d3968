"""crelle doctor: check the machine and the installation."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.table import Table
from rich.text import Text

from crelle.cli.common.console import Json, out, print_json
from crelle.version import __version__

NAME = "doctor"


def run(json: Json = False) -> None:
    """Check the installation: which parts are present, which are missing, and what each is for.

    Crelle works without the parts that are listed as absent. The details explain which slower path runs, and why.
    """
    checks = examine()
    if json:
        print_json({"crelle": __version__, "checks": checks})
        return
    table = Table("what", "state", "detail")
    for c in checks:
        colour = {"ok": "green", "absent": "yellow", "problem": "red"}[c["state"]]
        table.add_row(c["what"], Text(c["state"], style=colour), c["detail"])
    out.print(table)


def examine() -> list[dict[str, Any]]:
    """Return one entry per check: what, state (ok, absent, problem), detail."""
    import torch

    from crelle.cache import cache_directory
    from crelle.kernels.threads import available_cores

    cores = available_cores()
    checks = [
        _check("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        _check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads, {cores} available cores"),
        _extension(),
        _cuda(),
        _cuda_kernels(),
        *(_package(name, use) for name, use in _PACKAGES.items()),
        _check("cache", "ok", str(cache_directory())),
    ]
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        spin = "not PASSIVE: waiting torch threads spin, which can be 20 times slower if processes share cores"
        checks.append(_check("OMP_WAIT_POLICY", "problem", spin))
    return checks


_PACKAGES = {
    "transformers": "tokenizers and chat templates",
    "safetensors": "reading and writing weights",
    "gguf": "reading .gguf files",
    "matplotlib": "plots (pip install 'crelle[plots]')",
    "aiohttp": "crelle serve: HTTP (pip install 'crelle[server]')",
    "llguidance": "crelle serve: structured answers and tools (pip install 'crelle[server]')",
    "msgspec": "crelle serve: requests and responses (pip install 'crelle[server]')",
    "prometheus-client": "crelle serve: metrics (pip install 'crelle[server]')",
}


def _check(what: str, state: str, detail: str) -> dict[str, Any]:
    return {"what": what, "state": state, "detail": detail}


def _package(name: str, use: str) -> dict[str, Any]:
    try:
        return _check(name, "ok", f"{version(name)}: {use}")
    except PackageNotFoundError:
        return _check(name, "absent", use)


# By instruction set: what a newer CPU would speed up.
_NEWER = {
    "vbmi": "AMX (Sapphire Rapids) would speed up prompts",
    "avx512-vnni": "VBMI (Ice Lake, Zen 4) would speed up bit-planes, AMX (Sapphire Rapids) prompts",
    "avx512": "VNNI (Cascade Lake, Zen 4) would speed up uniform grids",
    "avx-vnni": "AVX-512 would speed up all products",
    "avx2": "AVX-VNNI (Alder Lake, Zen 5) would speed up uniform grids",
    "neon": "dot products (Armv8.2) would speed up uniform grids",
}


def _extension() -> dict[str, Any]:
    from crelle.kernels import cpu

    if reason := cpu.available():
        return _check("C++ kernels", "absent", f"{reason}; the torch kernels run instead")
    core = cpu.core()
    newer = f"; {_NEWER[core.isa()]}" if core.isa() in _NEWER else ""
    return _check("C++ kernels", "ok", f"instruction set {core.isa()} of {', '.join(core.isas())}{newer}")


def _cuda() -> dict[str, Any]:
    import torch

    from crelle.engine.memory.machine import free_memory, free_on_host
    from crelle.engine.memory.plan import show_bytes

    if not torch.cuda.is_available():
        return _check("CUDA", "absent", "torch sees no device; everything runs on the CPU")
    free, host = (show_bytes(x.size) for x in (free_memory(torch.device("cuda")), free_on_host()))
    room = f"{free} free, and {host} of host memory for experts that do not fit"
    return _check("CUDA", "ok", f"{torch.cuda.get_device_name()}, {room}, torch built for CUDA {torch.version.cuda}")


def _cuda_kernels() -> dict[str, Any]:
    """Compile one kernel and run it on the device; without a GPU compile it for Hopper (NVRTC needs no GPU)."""
    import torch

    from crelle.errors import CrelleError
    from crelle.kernels.cuda import jit

    what, kernel = "CUDA kernels", ("runtime/probe.cu", "crelle::probe<__half>")
    if reason := jit.missing():
        return _check(what, "absent", reason)
    try:
        built = jit.compile(*kernel, None if torch.cuda.is_available() else "sm_90a")
        took = f"{jit.version()} compiled a test kernel for {built.arch} in {built.seconds:.2f} s"
        if built.cached:
            took = f"a test kernel for {built.arch} is in the cache ({took})"
        return _check(what, "ok", f"{took}; it runs on this device" if _ran(kernel) else took)
    except CrelleError as e:
        return _check(what, "problem", str(e))


def _ran(kernel: tuple[str, str]) -> bool:
    """Run the probe kernel if there is a device; return False otherwise."""
    import torch

    if not torch.cuda.is_available():
        return False
    from crelle.errors import CrelleError
    from crelle.kernels.cuda.launch import load

    x = torch.arange(1000, dtype=torch.float16, device="cuda")
    y = torch.full_like(x, torch.nan)
    load(*kernel)((4, 1, 1), 256, x, y, 2.0, 1000)
    if not torch.equal(y, 2 * x):
        raise CrelleError("the test kernel returned wrong values on this device")
    return True
