"""docs/guide/threat-model.md: every line of its tables names a test, and each of those exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "threat-model.md"
CLAIM = re.compile(r"^\| (can|cannot) \| (.+) \| (.+) \|$", re.MULTILINE)
REFERENCE = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")

CLAIMS = CLAIM.findall(PAGE.read_text(encoding="utf-8"))


def test_page_speaks_of_everybody() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for who in ("unauthenticated client", "client with a key", "author of a checkpoint", "web page", "beside OUT"):
        assert re.search(rf"^## .*{who}", text, re.MULTILINE), who
    assert len(CLAIMS) > 40


@pytest.mark.parametrize(("what", "shown"), [claim[1:] for claim in CLAIMS], ids=range(len(CLAIMS)))
def test_every_line_has_a_test(what: str, shown: str) -> None:
    assert REFERENCE.fullmatch(shown), f"'{what}' names no test but '{shown}'"


def test_every_test_that_is_named_exists() -> None:
    named = REFERENCE.findall(PAGE.read_text(encoding="utf-8"))
    assert named
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file()
        or not re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []
