"""Registers Crelle with transformers: at once where it is imported already, else when it is.

transformers finds quantizers in two tables of transformers.quantizers.auto and knows no entry points. To import it
takes seconds, so `import crelle` leaves that to the user and puts a finder before Python's own: the first import of
that module goes the usual way, and then the tables get our two entries.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any  # importlib.abc has base classes for what follows, and takes longer to import than all of crelle

_TABLES = "transformers.quantizers.auto"


def register() -> None:
    """Make Crelle known to transformers; a second call changes nothing."""
    from transformers.quantizers import auto

    from crelle.integrations.transformers.config import CrelleConfig

    # Not by register_quantizer and register_quantization_config: those raise where the name is known already.
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["crelle"] = CrelleConfig
    auto.AUTO_QUANTIZER_MAPPING["crelle"] = _quantizer  # type: ignore[assignment]
    # A config that is given beside a checkpoint may choose its precision and kernel only if its class is in this list.
    kinds = getattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", ())
    if CrelleConfig not in kinds:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*kinds, CrelleConfig)


def _quantizer(*args: Any, **kwargs: Any) -> Any:
    """Make a CrelleQuantizer; its module needs transformers.quantizers, which may be half imported now."""
    from crelle.integrations.transformers.quantizer import CrelleQuantizer

    return CrelleQuantizer(*args, **kwargs)


def register_when_imported() -> None:
    """Register now, or as soon as transformers is imported."""
    if _TABLES in sys.modules:
        register()
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module, once, by asking the others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads a module as its own loader does, then registers."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._own
        with suppress(ImportError, AttributeError):  # a transformers of long ago still has to be importable
            register()
