"""A folder of source or tests can be read at a glance."""

import pytest
from conftest import ROOT

MOST = 20  # entries, subfolders and `__init__.py` counted


@pytest.mark.parametrize("top", ["src/crelle", "tests"])
def test_no_folder_has_more_entries_than_fit_on_a_page(top: str) -> None:
    folders = [ROOT / top, *(p for p in (ROOT / top).rglob("*") if p.is_dir() and p.name != "__pycache__")]
    counts = {f.relative_to(ROOT): sum(not made(p.name) for p in f.iterdir()) for f in folders}
    assert not {folder: n for folder, n in counts.items() if n > MOST}


def made(name: str) -> bool:
    """Whether a file is made by Python or by the compiler, or hidden."""
    return name == "__pycache__" or name.startswith(".") or name.endswith((".so", ".pyd"))
