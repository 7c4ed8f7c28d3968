"""The thread pool: many callers at once, changing sizes, and a forked child."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import crelle
from crelle.formats.bcq import UniformTensor
from crelle.kernels.cpu import available
from crelle.kernels.cpu.kernel import Cpu

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from crelle.kernels.cpu import _core


def test_concurrent_callers_get_their_own_results() -> None:
    kernel = Cpu()
    codes = torch.randint(0, 16, (300, 256), dtype=torch.uint8)
    w = kernel.prepare(UniformTensor.from_codes(codes, 4, torch.full((300, 2), 0.5), None, 128), torch.float32)
    xs = [torch.randn(m, 256) for m in (1, 2, 3, 30)]
    want = [kernel.run(x, w) for x in xs]
    before = _core.threads()
    try:
        for threads in (2, 4, 1):
            _core.set_threads(threads)
            with ThreadPoolExecutor(4) as callers:
                for _ in range(20):
                    for y, expected in zip(callers.map(lambda x: kernel.run(x, w), xs), want, strict=True):
                        assert torch.equal(y, expected)
    finally:
        _core.set_threads(before)


FORK = """
import os, sys, warnings
import numpy as np
from crelle.kernels.cpu import core
warnings.simplefilter("ignore")  # newer Pythons warn of forks with threads: just what is tried here
c = core()
c.set_threads(2)
w = c.prepare_uniform(np.full((4, 96, 8), 0x5a, np.uint8), 64, 64, np.full((96, 1), 0.5, np.float32))
def product():
    y = np.full((1, 96), np.nan, np.float32)
    c.matmul(np.linspace(-1, 1, 64, dtype=np.float32)[None], w, y, "exact")
    return y
want = product()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(product(), want) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


def test_an_error_in_a_worker_reaches_the_caller(tmp_path: Path) -> None:
    """Out of memory in one thread ends neither the process nor the others' wait at a barrier."""
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler")
    csrc, program = Path(crelle.__file__).parent / "kernels/cpu/csrc", tmp_path / "pool_faults"
    sources = [Path(__file__).with_name("pool_faults.cpp"), csrc / "base/pool.cpp"]
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{csrc}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True, timeout=120)
