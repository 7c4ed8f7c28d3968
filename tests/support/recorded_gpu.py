"""An H200 as far as the host can tell: the whole CUDA path runs on a CPU, and every launch is recorded, not made.

What it computes means nothing. What it shows: that the host's side runs, which kernels it launches and with which
grids; an empty one is refused, as on the device.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.base import Problem
from crelle.kernels.cuda import executor, launch
from crelle.kernels.cuda.integer import integer_gemm
from crelle.kernels.cuda.step import prefill_graph


class Event:
    """Whatever it is recorded for is done."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Graph:
    """What a replay would do was recorded when it was captured."""

    def replay(self) -> None:
        pass

    def pool(self) -> None:
        return None


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CUDA kernels be chosen for weights on the CPU; run what launches them inside `launch.recording()`."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * 1024, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_most_shared_memory", lambda device: 227 * 1024)
    monkeypatch.setattr(integer_gemm, "tensor_map", lambda *_: bytes(128))
    monkeypatch.setattr(executor.torch.ops.aten, "_flash_attention_forward", lambda q, *_, **__: (q,))
    for module in (executor, prefill_graph):
        monkeypatch.setattr(module, "capture", lambda run, **_: (Graph(), run()))
    monkeypatch.setattr(cuda, "available", lambda: None)
    # torch's own f16 products take a CPU seconds
    monkeypatch.setattr(torch, "addmm", lambda y, *_: y)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, *_: x.new_zeros(*x.shape[:-1], w.shape[0]))
    of = Problem.of
    monkeypatch.setattr(Problem, "of", lambda w, dtype: replace(of(w, dtype), device="cuda"))
