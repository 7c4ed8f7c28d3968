"""CRELLE_ISA chooses the instruction set of every command; what a user sees of it."""

import pytest
from conftest import Run

from crelle.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason="the extension is not built")


def test_environment_chooses_the_instruction_set(crelle_process: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    last = cpu.core().isas()[-1]
    monkeypatch.setenv("CRELLE_ISA", last)
    assert f"instruction set {last} of " in crelle_process("doctor", "--json").stdout


def test_unknown_instruction_set_is_a_sentence(crelle_process: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRELLE_ISA", "mmx")
    done = crelle_process("bench", "gemv", "--shape", "8x8", "--scheme", "rtn:bits=4,group=8", "--device", "cpu")
    assert done.returncode == 2
    assert "no instruction set 'mmx'; use one of: " in done.stderr
    assert "Traceback" not in done.stderr
