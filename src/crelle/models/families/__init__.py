"""Model families: each module of this package describes one, and is found by its `FAMILY`."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from crelle.models.families.base import Family


@cache
def families() -> dict[str, Family]:
    """Return the family of each model type of a Hugging Face config."""
    modules = (import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__) if m.name != "base")
    return {kind: module.FAMILY for module in modules for kind in module.FAMILY.model_types}
