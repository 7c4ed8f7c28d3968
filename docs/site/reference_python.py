"""The reference of the Python API: signatures and docstrings of the public names."""

import dataclasses
import inspect
import re
from importlib import import_module
from typing import Any

SECTIONS = {  # title: module, and the names in it; without names, its __all__
    "crelle": ("crelle", None),
    "Many requests at once": ("crelle.engine.engine", ["Engine"]),
    "In an event loop": ("crelle.engine.async_engine", ["AsyncEngine"]),
    "Weights on disk": ("crelle.formats.storage.open", ["open_weights"]),
    "A quantized matrix": ("crelle.formats.base", ["QuantTensor"]),
    "Schemes": ("crelle.quantizers.scheme", ["parse"]),
    "Search": ("crelle.quantizers.search.bit_allocation", ["choose"]),
    "transformers": ("crelle.integrations.transformers", ["quantize", "CrelleCache"]),
    "Errors": ("crelle.errors", None),
}
PREFIX = re.compile(r"\b(?:crelle|collections|pathlib|typing|torch)(?:\.[a-z_]+)*\.(?=[A-Z])")
WIDTH = 84


def text() -> str:
    """Return a section for each group of names."""
    return "\n".join(part for title in SECTIONS for part in _section(title, *SECTIONS[title]))


def _section(title: str, module: str, names: list[str] | None) -> list[str]:
    home = import_module(module)
    if names is None:
        names = getattr(home, "__all__", None) or [
            name for name, o in vars(home).items() if inspect.isclass(o) and o.__module__ == module
        ]
    parts = [f"## {title}\n"] + [f"`{module}`\n"] * (title != module)
    documented = [(name, getattr(home, name)) for name in names if not name.startswith("_")]
    seen: set[int] = set()
    for name, thing in documented:
        if id(thing) not in seen:  # a name of before is not told twice
            parts += _entry(name, thing, "###")
            seen.add(id(thing))
    return parts


def _entry(name: str, thing: Any, depth: str) -> list[str]:
    parts = [f"{depth} {name}\n"]
    if signature := _signature(name.rpartition(".")[2], thing):
        parts.append(f"```python\n{signature}\n```\n")
    parts.append(_prose(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        for inner, member in vars(thing).items():
            if not inner.startswith("_") and _is_method(member):
                parts += _entry(f"{name}.{inner}", getattr(thing, inner), depth + "#")
    return parts


def _is_method(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return f"class {name}({', '.join(base.__name__ for base in thing.__bases__)})"
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    word = "@dataclass\nclass " if dataclasses.is_dataclass(thing) else "class " if inspect.isclass(thing) else "def "
    returned = "" if inspect.isclass(thing) else str(signature).rpartition(" -> ")[2].strip("'")
    plain = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    end = f" -> {returned}" if " -> " in str(signature) and returned else ""
    line = PREFIX.sub("", f"{word}{name}{plain}{end}")
    if max(map(len, line.splitlines())) <= WIDTH:
        return line
    shown = "".join(f"    {part},\n" for part in _arguments(parameters))
    return PREFIX.sub("", f"{word}{name}(\n{shown}){end}")


def _arguments(parameters: list[inspect.Parameter]) -> list[str]:
    shown, starred = [], False
    for p in parameters:
        starred |= p.kind is p.VAR_POSITIONAL
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        shown.append(str(p))
    return shown


def _prose(docstring: str) -> str:
    """Return a docstring as Markdown: examples and aligned lines as code, the rest as text."""
    blocks = []
    for block in re.split(r"\n\s*\n", docstring):
        code = block.startswith((">>>", " ")) or re.search(r"\S {3,}\S", block)
        shown = re.sub(r" *# doctest: \+SKIP", "", block) if code else block.replace("<", "&lt;")
        blocks.append(f"```python\n{shown}\n```" if code else shown)
    return "\n\n".join(blocks) + "\n"
