"""Runs vLLM in processes of its own, for the tests; these need an environment that has it: `make test-vllm`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
Job = dict[str, Any]  # model, prompts, tokens, options, adapter: see serve_many.py


def environment(**changes: str) -> dict[str, str]:
    """Return the variables of a process that runs vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("these tests need vLLM, which has an environment of its own: make test-vllm")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **quiet, **changes}


def run_jobs(jobs: list[Job], timeout: float = 300, **changes: str) -> list[Job]:
    """Run jobs in vLLM, one after the other in one process; return {"tokens": …} or {"error": …} of each."""
    done = subprocess.run(
        [sys.executable, str(HERE / "serve_many.py")],
        input=json.dumps(jobs),
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(jobs), done.stderr[-4000:]
    return [{**answer, "log": done.stderr} for answer in answers]


def tokens_of(answer: Job) -> list[list[int]]:
    """Return the tokens of a job, or fail with what vLLM said."""
    if "error" in answer:
        pytest.fail(f"{answer['error']}\n{answer['log'][-4000:]}")
    found: list[list[int]] = answer["tokens"]
    return found
