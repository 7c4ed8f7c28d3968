"""Every hostile model ends in one sentence within 5 seconds and 600 MB, and runs no code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corpus import CASES, MARK

SECONDS, BYTES = 5, 600 * 10**6  # beyond what the libraries take


def problems(found: dict[str, Any], words: str | None) -> list[str]:
    """What is wrong with how a case ended."""
    wrong = ["foreign code ran"] if found["code_ran"] else []
    for how, way in found["ways"].items():
        if way["fault"]:
            wrong.append(f"{how}: {way['fault']}")
        if way["seconds"] > SECONDS:
            wrong.append(f"{how} took {way['seconds']:.1f} s")
        if way["length"] > 2000:
            wrong.append(f"{how}: a sentence of {way['length']} characters: {way['said'][:200]}")
    said = found["ways"]["load"]["said"]
    if (said if words is None else not re.search(words, said)) and not wrong:
        wrong.append(f"should say {words!r}, but says {said!r}")
    return wrong


@pytest.mark.parametrize("part", range(3))
@pytest.mark.sample(3)
def test_hostile_models_end_in_one_sentence_and_run_no_code(part: int, tmp_path: Path) -> None:
    """A third of the cases in one process with a limited address space; a process each would take minutes."""
    names = list(CASES)[part::3]
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("run_corpus.py"), *names]
    environment = {**os.environ, MARK: str(tmp_path / "foreign code ran"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, input="y\n" * 100, capture_output=True, text=True, timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(results) == len(names), f"the process ended after {len(results)} cases:\n{done.stderr[-3000:]}"
    wrong = {found["case"]: p for found in results if (p := problems(found, CASES[found["case"]][1]))}
    assert not wrong, json.dumps(wrong, indent=1)
    assert max(found["peak"] for found in results) < BYTES
