"""CUDA kernels, compiled at run time for the device at hand: `jit` compiles, `launch` runs.

A folder holds the kernels of one kind of weight or work: their sources (.cu) and the Python that launches them.

Optional, and nothing here is imported before it is needed: without a device, or without the packages of
`pip install 'crelle[cuda]'`, `available` says so in a sentence and other kernels do the work.
"""

from functools import cache


@cache
def available() -> str | None:
    """Return None when CUDA kernels can be compiled and run on the current device, or the reason why not."""
    import torch

    from crelle.errors import UnsupportedError
    from crelle.kernels.cuda import jit

    if not torch.cuda.is_available():
        return "sees no CUDA device"
    if reason := jit.missing():
        return reason
    try:
        jit.architecture()
    except UnsupportedError as e:
        return str(e)
    return None
