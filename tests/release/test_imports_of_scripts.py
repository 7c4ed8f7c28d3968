"""Names that scripts, tests and the site's generators import from crelle exist, also those that a function imports."""

import ast
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

FOLDERS = ("bench", "release", "tests", "docs/site")
SCRIPTS = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
NEEDS = {"crelle.integrations.vllm": "vllm", "crelle.integrations.lm_eval": "lm_eval"}  # packages that are not here


def imports(source: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, module and name of every import from crelle, wherever it stands; no name for `import crelle.x`.

    What stands behind `except ImportError` is for other versions of crelle.
    """
    nodes = list(ast.walk(ast.parse(source)))
    others = {
        inner
        for node in nodes
        if isinstance(node, ast.ExceptHandler) and node.type and ast.unparse(node.type) == "ImportError"
        for inner in ast.walk(node)
    }
    for node in nodes:
        if node in others:
            continue
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "crelle":
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names if alias.name.split(".")[0] == "crelle")


@cache
def missing(module: str, name: str | None) -> str | None:
    """Return what does not exist, as a sentence; None where the import works."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        return f"there is no module {module}"
    if name is None:
        return None
    if name in defined(spec.origin) or (
        spec.submodule_search_locations and importlib.util.find_spec(f"{module}.{name}")
    ):
        return None
    # What it makes in other ways, by __getattr__ for one, shows when it is imported.
    package = next((needed for start, needed in NEEDS.items() if module.startswith(start)), None)
    if (package is None or installed(package)) and hasattr(importlib.import_module(module), name):
        return None
    return f"{module} has no {name}"


def installed(package: str) -> bool:
    """Whether it is; other tests of the process may have put a stand-in among the modules."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@cache
def defined(file: str | None) -> set[str]:
    """Return the names that the statements of a Python source bind in its module; none of what is not Python."""
    if file is None or not file.endswith(".py"):
        return set()
    found, left = set[str](), list[ast.AST](ast.parse(Path(file).read_text(encoding="utf-8")).body)
    while left:
        match node := left.pop():
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                found.add(node.name)
                continue  # what stands in it is its own
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Import() | ast.ImportFrom():
                found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        left += ast.iter_child_nodes(node)
    return found


def wrong(path: str, source: str) -> list[str]:
    return [f"{path}:{line}: {said}" for line, module, name in imports(source) if (said := missing(module, name))]


def test_every_name_that_is_imported_exists() -> None:
    assert len(SCRIPTS) > 400
    found = [said for p in SCRIPTS for said in wrong(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f():\n    from crelle.engine.engine import FAILED_STEPS", "crelle.engine.engine has no FAILED_STEPS"),
        ("from crelle.engine.no_such import x", "there is no module crelle.engine.no_such"),
        ("from crelle.no_such.module import x", "there is no module crelle.no_such.module"),
        ("from crelle import NoSuch", "crelle has no NoSuch"),
        ("import crelle.no_such", "there is no module crelle.no_such"),
        ("from crelle.integrations.vllm.config import NoSuch", "crelle.integrations.vllm.config has no NoSuch"),
    ],
)
def test_a_name_that_does_not_exist_is_found(source: str, said: str) -> None:
    assert wrong("x.py", source) == [f"x.py:{source.count(chr(10)) + 1}: {said}"]


@pytest.mark.parametrize(
    "source",
    [
        "from crelle import LLM, kernels",  # by __getattr__; a submodule
        "def f():\n    from crelle.engine.engine import Engine",
        "import crelle.kernels.cpu as cpu",
        "from crelle.integrations.vllm.config import CrelleConfig",
        "from .crelle import anything",
        "try:\n    import crelle.kernels\nexcept ImportError:\n    import crelle.no_such",
    ],
)
def test_a_name_that_exists_is_no_fault(source: str) -> None:
    assert wrong("x.py", source) == []
