"""Scripts in bench/ that time a kernel without some of its parts: the source still has what they replace."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from crelle.kernels.cuda import jit


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    monkeypatch.delitem(sys.modules, "integer_gemm", raising=False)


@pytest.mark.usefixtures("scripts")
def test_the_sources_have_what_is_replaced() -> None:
    sources: Any = import_module("edited_sources")
    parts, splits = import_module("integer_parts"), import_module("attention_splits")
    original = jit.SOURCES
    for edits in (*parts.PARTS.values(), [splits.NO_ADDING], [splits.LOADS_ONLY]):
        with sources.edited(edits):
            for file, old, new in edits:
                assert new in (jit.SOURCES / file).read_text()
                assert old not in (jit.SOURCES / file).read_text().replace(new, "")
    assert original == jit.SOURCES
