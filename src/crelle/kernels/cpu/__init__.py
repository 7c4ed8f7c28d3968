"""CPU kernels in C++ (`csrc/`), chosen at run time by instruction set. Optional: without the extension, torch works."""

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from crelle.cgroup import cpu_quota
from crelle.errors import SchemeError

_NAME = "crelle.kernels.cpu._core"


@cache
def _load() -> ModuleType | str:
    try:
        module = _load_from(path) if (path := os.environ.get("CRELLE_CORE")) else import_module(_NAME)
    except ImportError as e:
        return f"is not built here ({e}); reinstall crelle with a C++20 compiler"
    if isa := os.environ.get("CRELLE_ISA"):
        try:
            module.set_isa(isa)
        except ValueError:
            choice = ", ".join(module.isas())
            raise SchemeError(
                f"CRELLE_ISA: this machine has no instruction set '{isa}'; use one of: {choice}"
            ) from None
    if (quota := cpu_quota()) is not None and quota < module.threads():  # its default is the affinity mask
        module.set_threads(quota)
    return module


def _load_from(path: str) -> ModuleType:
    """Load another build of the extension, e.g. one with sanitizers."""
    spec = spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"CRELLE_CORE={path} is not an extension module")
    module = sys.modules[_NAME] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def available() -> str | None:
    """Return None when the extension can be used, or the reason why not."""
    module = _load()
    return module if isinstance(module, str) else None


def core() -> ModuleType:
    """Return the extension; call `available` first."""
    module = _load()
    if isinstance(module, str):
        raise ImportError(f"crelle.kernels.cpu._core {module}")
    return module
