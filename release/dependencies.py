"""Print what the package needs with some extras, a requirement a line: `python release/dependencies.py plots,server`.

For an installation of them beside the compiler, which `pip install .` would run first.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OWN = re.compile(r"crelle\[(.*)\]")
PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Yield the requirements of a pyproject's table, extras of extras among them."""
    yield from project["dependencies"]
    for extra in extras:
        yield from _of_extra(project["optional-dependencies"], extra)


def _of_extra(groups: dict[str, list[str]], extra: str) -> Iterator[str]:
    if extra not in groups:
        raise SystemExit(f"there is no extra '{extra}'; there are {', '.join(groups)}")
    for requirement in groups[extra]:
        if own := _OWN.fullmatch(requirement):
            for inner in own[1].split(","):
                yield from _of_extra(groups, inner)
        else:
            yield requirement


if __name__ == "__main__":
    found = requirements(tomllib.loads(PROJECT.read_text())["project"], sys.argv[1].split(","))
    print("\n".join(found))
