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
def test_the_integer_gemm_has_all_parts() -> None:
    parts: Any = import_module("integer_parts")
    for edits in parts.PARTS.values():
        with parts.without(edits):
            for file, old, new in edits:
                assert new in (jit.CSRC / file).read_text()
                assert old not in (jit.CSRC / file).read_text().replace(new, "")


@pytest.mark.usefixtures("scripts")
def test_paged_attention_has_all_parts() -> None:
    splits: Any = import_module("attention_splits")
    for old, new in (splits.NO_ADDING, splits.LOADS_ONLY):
        with splits.changed(old, new):
            assert new in (jit.CSRC / "paged_attention.cu").read_text()
