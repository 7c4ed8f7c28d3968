"""Tensor parallel over two processes (gloo): every format computes what one rank computes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from two_ranks import CASES, GATHERED, activate, inputs, matrices

from crelle.integrations.vllm.product import Product

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    to, script = tmp_path_factory.mktemp("ranks"), Path(__file__).with_name("two_ranks.py")
    commands = [[sys.executable, str(script), str(rank), str(to / "store"), str(to / f"{rank}.pt")] for rank in (0, 1)]
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    started = [subprocess.Popen(c, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True) for c in commands]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    return [torch.load(to / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_two_ranks_equal_one(ranks: Found, case: str) -> None:
    gate, up, down = matrices(case)
    h = activate(Product([gate, up], torch.float32)(inputs()))
    expected = Product([down], torch.float32)(h)
    for found in ranks:  # kernels round x to 16 bits, by the largest value that a rank sees
        torch.testing.assert_close(found[case]["y"], expected, rtol=1e-3, atol=3e-4)
        torch.testing.assert_close(found[case]["experts"], expected / 2, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_share(ranks: Found, case: str) -> None:
    for found in ranks:
        assert found[case]["gathered"] == (case in GATHERED)
        assert found[case]["held"] < 0.62  # half, the order of all inputs, and all rows' scales


def test_gathered_outputs_have_the_bits_of_one_rank(ranks: Found) -> None:
    """No sum is split: the other rank adds 0."""
    for case in GATHERED:
        gate, up, down = matrices(case)
        h = activate(Product([gate, up], torch.float32)(inputs()))
        assert torch.equal(ranks[0][case]["y"], Product([down], torch.float32)(h)), case
