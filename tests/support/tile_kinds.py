"""Kinds of bf16 tiles to test a kernel with: emulated in plain C++ everywhere, and AMX where there is."""

import pytest
import torch

from crelle.kernels.cpu.tiles import usable

AMX = usable(torch.device("cpu"))
TILES = [
    pytest.param(True, id="emulated"),
    pytest.param(False, id="amx", marks=pytest.mark.skipif(not AMX, reason="needs AMX")),
]
