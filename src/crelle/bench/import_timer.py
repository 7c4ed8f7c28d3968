"""Time a program's imports and calls: `python -m crelle.bench.import_timer MODULE ARGUMENTS…` runs the module's main().

Prints, as the last line of standard output, JSON of the seconds that each listed import and function took, all calls
together. Functions are wrapped as their modules are loaded, so the program imports in its own order.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from time import monotonic
from types import ModuleType
from typing import Any

IMPORTS = ("crelle.cli.main", "torch", "crelle.engine.llm")
CALLS = {  # module: functions in it
    "crelle.formats.storage.open": ("open_weights",),
    "crelle.models.loader": ("build",),
    "crelle.kernels.ops": ("prepare",),
    "crelle.engine.tokenization.tokenizer": ("Tokenizer.__init__",),
    "crelle.models.decoder": ("DecoderModel.forward",),
}
BEGUN = "begun"  # when this file ran first: monotonic seconds, a clock that all processes of a machine share

spent: dict[str, float] = {}


def timed(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
    """Return `do`, adding the seconds of each call to `spent[name]`."""

    @wraps(do)
    def run(*args: Any, **options: Any) -> Any:
        begun = monotonic()
        try:
            return do(*args, **options)
        finally:
            spent[name] = spent.get(name, 0.0) + monotonic() - begun

    return run


class TimingFinder(MetaPathFinder):
    """Finds modules as the other finders do, and wraps what is listed above in them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in IMPORTS and name not in CALLS:
            return None
        others = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((s for s in others if s is not None), None)
        if spec is not None and spec.loader is not None:
            _wrap_loader(name, spec.loader)
        return spec


def _wrap_loader(name: str, loader: Loader) -> None:
    run = timed(name, loader.exec_module) if name in IMPORTS else loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        for function in CALLS.get(name, ()):
            *owners, last = function.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, last, timed(f"{name}.{function}", getattr(owner, last)))

    loader.exec_module = exec_module  # type: ignore[method-assign]


def main() -> None:
    spent[BEGUN] = monotonic()
    sys.meta_path.insert(0, TimingFinder())
    del sys.argv[0]
    try:
        import_module(sys.argv[0]).main()
    finally:
        print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()
