"""The C++ core is there where it can be, and is not missed where it cannot."""

import os
import shutil
import subprocess
import sys

from crelle.kernels import cpu


def test_core_is_built_where_a_compiler_is() -> None:
    """Other tests skip without the core; this one makes sure that a broken build cannot hide behind that."""
    if shutil.which("c++"):
        assert cpu.available() is None


def test_everything_runs_without_the_core() -> None:
    script = (
        "import sys; sys.modules['crelle.kernels.cpu._core'] = None\n"  # what a failed import looks like
        "import torch\n"
        "from crelle.kernels import cpu, ops\n"
        "from crelle.quantizers.scheme import parse\n"
        "assert 'not built' in cpu.available(), cpu.available()\n"
        "w = parse('bcq:bits=2,group=32').fit(torch.randn(40, 64))\n"
        "prepared = ops.prepare(w, torch.float32)\n"
        "print(prepared.kernel.name, tuple(ops.matmul(torch.randn(3, 64), prepared).shape))\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "CRELLE_CORE"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "dequantized (3, 40)"
