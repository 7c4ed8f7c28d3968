"""Which errors say that the CUDA context of this process is lost.

After an illegal address, a failed launch or a GPU that has left the bus, every later call in the process fails: only a
new process helps. An error that torch, Triton, cuBLAS, cuda.core or our own launches report is taken for such a one
unless it is among those after which the context can still be used: memory that was not there, arguments that a call
refused, a stream that was being captured. (CUDA Runtime API, cudaError: "the process must be terminated and
relaunched".)
"""

import re

import torch

from crelle.errors import CrelleError

_TORCH = re.compile(r"(?:CUDA (?:driver )?error|Triton Error \[CUDA\]): ([^\n]{1,100})")
_OURS = re.compile(r": (CUDA_ERROR_[A-Z_0-9]+) \(")  # crelle.kernels.cuda.launch
_CORE = re.compile(r"(CUDA_ERROR_[A-Z_0-9]+|cudaError[A-Za-z]+)\b")  # cuda.core, of the driver and of the runtime
_USABLE = re.compile(
    r"out of memory|memory allocation|out of resources|too many (?:resources|blocks)|cooperative launch|captur|graph"
    r"|peer access"
    r"|invalid (?:argument|value|configuration|image|resource handle|handle|ptx|device function|device ordinal|device$)"
    r"|no kernel image|no binary|not found|not permitted|not supported(?! on global)|^(?:device )?not ready"
    r"|cublas status (?:alloc failed|not initialized|invalid value|arch mismatch)"
)
_CHAIN = 8  # exceptions that are followed from one to what it was raised from


def context_error(error: BaseException | None) -> str | None:
    """Return what CUDA calls the error that cost the context; None: the error is another one."""
    for _ in range(_CHAIN):
        if error is None:
            return None
        if (name := _name(error)) is not None:
            return name
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _name(error: BaseException) -> str | None:
    """Read one error. Messages of other classes may quote what a client sent, so they are not looked at."""
    if isinstance(error, torch.OutOfMemoryError):
        return None
    if type(error) is CrelleError:
        found = _OURS.search(str(error))
    elif type(error).__name__ == "CUDAError" and type(error).__module__.startswith("cuda.core."):
        found = _CORE.match(str(error))
    elif isinstance(error, torch.AcceleratorError) or type(error) is RuntimeError:
        found = _TORCH.match(str(error))
    else:
        return None
    if found is None:
        return None
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", found[1].removeprefix("cudaError"))
    plain = words.lower().removeprefix("cuda_error_").replace("_", " ")
    return None if _USABLE.search(plain) else found[1]
