"""GPUs as far as the host can tell: Kernel objects whose launches are written down instead of sent to a driver.

    launches = fake_gpus(monkeypatch)           # then run kernels on CPU tensors; `on(1, tensor)` says where one lies

What runs is the Python of crelle.kernels.cuda up to the driver's call, with the arguments that it lays into memory.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from crelle.kernels.cuda import launch
from crelle.kernels.cuda.integer import integer_gemm
from crelle.kernels.cuda.mixed import mixed_config
from crelle.kernels.cuda.planes import bmma_gemv


class Launched(NamedTuple):
    """A launch: where, of what, and its arguments as bytes."""

    device: int
    stream: int
    expression: str
    grid: tuple[int, int, int]
    options: tuple[Any, ...]
    arguments: tuple[bytes, ...]


class FakeKernel(launch.Kernel):
    """A Kernel with the driver's calls left out; parameters have the sizes of the first arguments."""

    def __init__(self, file: str, expression: str, device: int, launches: list[Launched]) -> None:
        self.built: Any = SimpleNamespace(file=file, expression=expression, arch="fake")
        self.device, self._launches = device, launches
        self._configs, self._packers = {}, {}
        self._sizes: list[int] = []
        self._function, self._no_context = None, -1
        self._launch = self._write_down

    def _configure(self, *key: Any) -> Any:
        config = self._configs[key] = SimpleNamespace(key=key)
        return config

    def _pack_for(self, types: tuple[Any, ...], args: Any) -> Any:
        self._sizes = [8 if isinstance(a, Tensor | None) else len(a) if type(a) is bytes else 4 for a in args]
        return super()._pack_for(types, args)

    def _write_down(self, config: Any, function: None, pointers: int, extra: int) -> tuple[int]:
        grid, *options, stream = config.key
        at = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        arguments = tuple(ctypes.string_at(at[i] or 0, n) for i, n in enumerate(self._sizes))
        self._launches.append(Launched(self.device, stream, self.built.expression, grid, tuple(options), arguments))
        return (0,)


def on(device: int, *tensors: Tensor) -> None:
    """Say on which GPU tensors lie."""
    for t in tensors:
        t.fake_device = device  # type: ignore[attr-defined]


def fake_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> list[Launched]:
    """Let this process see GPUs; return the list to which launches are added."""
    launches = list[Launched]()
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    shared = SimpleNamespace(shared_memory_per_block_optin=(227 if capability >= (9, 0) else 163) * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: shared)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7000 + index, raising=False)
    monkeypatch.setattr(Tensor, "get_device", lambda self: getattr(self, "fake_device", -1))
    monkeypatch.setattr(launch, "_multiprocessors", lambda index: 132)
    monkeypatch.setattr(launch, "_load", cache(lambda *which: FakeKernel(*which, launches)))
    monkeypatch.setattr(bmma_gemv, "_pipeline_room", lambda index: 195 * 1024)
    monkeypatch.setattr(mixed_config, "_room_of", lambda index: 227 * 1024)
    monkeypatch.setattr(integer_gemm, "_tensor_map", lambda address, *_: address.to_bytes(8, "little") * 16)
    return launches
