"""Create the CUDA context of the first device while Python still imports torch.

The driver takes 0.2 to 0.3 s for it and needs no Python meanwhile; torch then finds the device's primary context made.
"""

import ctypes
import sys
import threading

_LIBRARY = "libcuda.so.1"


def start() -> threading.Thread | None:
    """Begin in a thread of its own; None where torch is there already, or there is no driver.

    What fails in it is found again, and told of, by whoever uses the device.
    """
    if "torch" in sys.modules:
        return None
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    thread = threading.Thread(target=_create, args=(driver,), name="cuda-context", daemon=True)
    thread.start()
    return thread


def _create(driver: ctypes.CDLL) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
