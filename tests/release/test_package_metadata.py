"""What pyproject.toml promises and what the documentation says of it."""

import re
import tomllib
from typing import Any

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
INSTALL = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")


def documented() -> dict[str, str]:
    """Return the packages of each extra in the guide's table."""
    section = INSTALL.partition("## Extras")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", section, re.MULTILINE))


def test_guide_lists_exactly_the_extras_that_exist() -> None:
    assert documented().keys() == EXTRAS.keys()


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))
def test_guide_lists_the_packages_of_an_extra(extra: str) -> None:
    assert documented()[extra] == ", ".join(Requirement(r).name for r in EXTRAS[extra])


def test_every_extra_that_a_page_or_a_message_names_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        (name, p.relative_to(ROOT))
        for p in pages
        for names in re.findall(r"(?:crelle|')\[([a-z,]+)\]", p.read_text(encoding="utf-8"))
        for name in names.split(",")
        if re.search(rf"(?:crelle|'\.)\[[a-z,]*{name}", p.read_text(encoding="utf-8"))
    }
    assert {(name, p) for name, p in named if name not in EXTRAS} == set()


def test_dev_has_all_that_users_can_choose() -> None:
    (own,) = [r for r in map(Requirement, EXTRAS["dev"]) if r.name == "crelle"]
    assert own.extras == EXTRAS.keys() - {"dev"}


def test_wheels_are_tested_and_built_for_supported_pythons() -> None:
    wheels: dict[str, Any] = PYPROJECT["tool"]["cibuildwheel"]
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"
    assert wheels["build"][0] == "cp311-*"
    assert any("first_token.py" in command for command in wheels["test-command"])
    pin = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin
    assert pin[0] in wheels["linux"]["before-test"]
    assert pin[0] in INSTALL
