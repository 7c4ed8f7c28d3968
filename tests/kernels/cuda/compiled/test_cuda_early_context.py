"""The context that is created beside the import of torch."""

import ctypes
import subprocess
import sys

import pytest

from crelle.kernels.cuda.runtime import early_context


class Driver:
    """Answers as the driver does, and keeps what was called."""

    def __init__(self, fails_at: str = "") -> None:
        self.called: list[str] = []
        self._fails_at = fails_at

    def __getattr__(self, name: str) -> object:
        def call(*_: object) -> int:
            self.called.append(name)
            return 100 if name == self._fails_at else 0

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("fails_at", ["", *CALLS])
def test_it_stops_at_the_first_call_that_fails(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails_at)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = early_context.start()
    assert thread is not None
    thread.join()
    assert driver.called == (CALLS[: CALLS.index(fails_at) + 1] if fails_at else CALLS)


def test_nothing_happens_without_a_driver_or_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with monkeypatch.context() as here:
        here.setattr(ctypes, "CDLL", lambda name: driver)
        here.setitem(sys.modules, "torch", sys)
        assert early_context.start() is None
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(early_context, "_LIBRARY", "libno-such-driver.so")
    assert early_context.start() is None
    assert driver.called == []


def test_the_command_line_does_not_import_torch_for_it() -> None:
    code = "from crelle.kernels.cuda.runtime import early_context; early_context.start()"
    subprocess.run([sys.executable, "-c", f"{code}; import sys; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.gpu
def test_torch_uses_the_same_context() -> None:
    code = """
from crelle.kernels.cuda.runtime import early_context
thread = early_context.start()
import ctypes, torch
assert thread is not None
thread.join()
driver = ctypes.CDLL("libcuda.so.1")
device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 1  # before torch has done anything
assert float(torch.ones(3, device="cuda").sum()) == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True)
