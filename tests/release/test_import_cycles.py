"""No module of the package imports itself through others: imports inside functions counted, under TYPE_CHECKING not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import crelle

# Folders that still have a cycle. One that has none any more must leave this list.
KNOWN: frozenset[str] = frozenset()

Graph = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Return the file of each module of a package, by its full name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def runtime_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Walk a tree without the blocks that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from runtime_imports(ast.Module([other], []))
        else:
            yield from runtime_imports(child)


def imported(node: ast.Import | ast.ImportFrom, module: str, is_package: bool, known: dict[str, Path]) -> set[str]:
    """Return the modules that a statement asks for; `from a import b` is a.b where that is a module, else a."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        base = node.module or ""
        if node.level:
            up = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join([*up[: len(up) - node.level + 1], *([node.module] if node.module else [])])
        names = [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]
    return {name for name in names if name in known}


def graph(root: Path) -> Graph:
    """Return which modules each module names in its imports; the packages above those are loaded anyway."""
    known = modules(root)
    edges = {}
    for module, path in known.items():
        found = set[str]()
        for node in runtime_imports(ast.parse(path.read_text(encoding="utf-8"))):
            found |= imported(node, module, path.name == "__init__.py", known)
        edges[module] = found - {module}
    return edges


def cycles(edges: Graph) -> list[list[str]]:
    """Return the strongly connected components of two or more modules (Tarjan), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return found


def folder(component: list[str]) -> str:
    """Return the top folder that holds a cycle, e.g. kernels; '' where it spans several."""
    tops = {module.split(".")[1] if module.count(".") else "" for module in component}
    return tops.pop() if len(tops) == 1 else ""


def test_modules_import_each_other_in_one_direction() -> None:
    found = cycles(graph(Path(crelle.__file__).parent))
    new = [" <-> ".join(c) for c in found if folder(c) not in KNOWN]
    assert not new, "import cycles: " + "; ".join(new)
    mended = KNOWN - {folder(c) for c in found}
    assert not mended, f"no cycle is left in {', '.join(sorted(mended))}: remove it from the list KNOWN"


def write(root: Path, files: dict[str, str]) -> Path:
    """Write a package of modules."""
    for name, text in files.items():
        path = root / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "pack"


CHAIN = {"__init__.py": "", "a/__init__.py": "", "a/x.py": "import os\n", "a/y.py": "from pack.a import x\n"}


def test_a_chain_is_no_cycle(tmp_path: Path) -> None:
    root = write(tmp_path, {**CHAIN, "a/__init__.py": "from pack.a.y import f\n"})
    assert graph(root)["pack.a.y"] == {"pack.a.x"}
    assert cycles(graph(root)) == []


def test_planted_cycles_are_found(tmp_path: Path) -> None:
    ways = (
        "from pack.a import y\n",
        "import pack.a.y\n",
        "from . import y\n",
        "from .y import f\n",
        "def f():\n    from pack.a.y import g\n",
        "class A:\n    def f(self):\n        if self:\n            import pack.a.y as y\n",
        "try:\n    from pack.a.y import f\nexcept ImportError:\n    pass\n",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from pack.a import y\n",
    )
    for i, text in enumerate(ways):
        found = cycles(graph(write(tmp_path / str(i), {**CHAIN, "a/x.py": text})))
        assert found == [["pack.a.x", "pack.a.y"]], text
        assert folder(found[0]) == "a"


def test_a_long_cycle_over_folders_is_found_once(tmp_path: Path) -> None:
    further = {"b/__init__.py": "", "b/z.py": "from pack.a.y import f\n", "a/x.py": "from pack.b import z\n"}
    found = cycles(graph(write(tmp_path, {**CHAIN, **further})))
    assert found == [["pack.a.x", "pack.a.y", "pack.b.z"]]
    assert folder(found[0]) == ""


def test_imports_for_type_checkers_do_not_count(tmp_path: Path) -> None:
    only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.a.y import f\n"
    assert cycles(graph(write(tmp_path, {**CHAIN, "a/x.py": only}))) == []
