"""Which errors cost the process its CUDA context, by the messages of CUDA's documentation."""

import pytest
import torch

from crelle.errors import CrelleError, FormatError
from crelle.kernels.cuda.runtime.context_errors import context_error

LOST = [
    "an illegal memory access was encountered",
    "unspecified launch failure",
    "device-side assert triggered",
    "misaligned address",
    "an illegal instruction was encountered",
    "operation not supported on global/shared address space",
    "uncorrectable ECC error encountered",
    "the launch timed out and was terminated",
    "context is destroyed",
    "no CUDA-capable device is detected",
    "all CUDA-capable devices are busy or unavailable",
    "unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`",
]
USABLE = [
    "out of memory",
    "invalid argument",
    "invalid configuration argument",
    "invalid device ordinal",
    "too many resources requested for launch",
    "no kernel image is available for execution on the device",
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "operation not supported",
    "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
]


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_messages_of_torch(kind: type[RuntimeError]) -> None:
    more = "\nSearch for `cudaError…' in the documentation.\nCompile with `TORCH_USE_CUDA_DSA`.\n"
    for said in LOST:
        assert context_error(kind(f"CUDA error: {said}{more}")) == said
        assert context_error(kind(f"Triton Error [CUDA]: {said}")) == said
    for said in USABLE:
        assert context_error(kind(f"CUDA error: {said}{more}")) is None
    assert context_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) is None


NAMES = pytest.mark.parametrize(
    ("name", "lost"),
    [
        *((name, True) for name in ("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "CONTEXT_IS_DESTROYED", "INVALID_CONTEXT")),
        *((name, True) for name in ("ASSERT", "ECC_UNCORRECTABLE", "NO_DEVICE", "UNKNOWN", "MPS_SERVER_NOT_READY")),
        *((name, True) for name in ("INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_TIMEOUT", "NOT_INITIALIZED")),
        *((name, False) for name in ("INVALID_VALUE", "OUT_OF_MEMORY", "LAUNCH_OUT_OF_RESOURCES", "NOT_READY")),
        *((name, False) for name in ("STREAM_CAPTURE_INVALIDATED", "NO_BINARY_FOR_GPU", "INVALID_HANDLE")),
    ],
)


@NAMES
def test_messages_of_our_launches(name: str, lost: bool) -> None:
    error = CrelleError(f"test::scale<float> of scale.cu: CUDA_ERROR_{name} (in words)")
    assert context_error(error) == (f"CUDA_ERROR_{name}" if lost else None)


@NAMES
def test_messages_of_cuda_core(name: str, lost: bool) -> None:
    core = pytest.importorskip("cuda.core._utils.cuda_utils")
    error = core.CUDAError(f"CUDA_ERROR_{name}: In words, which may speak of invalid values.")
    assert context_error(error) == (f"CUDA_ERROR_{name}" if lost else None)


def test_messages_of_the_runtime_in_cuda_core() -> None:
    core = pytest.importorskip("cuda.core._utils.cuda_utils")
    for name in ("IllegalAddress", "Assert", "ECCUncorrectable", "LaunchFailure", "DevicesUnavailable", "Unknown"):
        assert context_error(core.CUDAError(f"cudaError{name}: in words")) == f"cudaError{name}"
    for name in ("MemoryAllocation", "InvalidValue", "InvalidConfiguration", "StreamCaptureInvalidated", "NotReady"):
        assert context_error(core.CUDAError(f"cudaError{name}: in words")) is None


def test_what_the_error_was_raised_from_counts() -> None:
    lost = RuntimeError("CUDA error: unspecified launch failure")
    outer = ValueError("cannot sample")
    outer.__cause__ = lost
    assert context_error(outer) == "unspecified launch failure"
    inner = KeyError("while it was handled")
    inner.__context__ = outer
    assert context_error(inner) == "unspecified launch failure"


def test_what_a_client_writes_is_no_cuda_error() -> None:
    """Messages of these classes may quote a prompt."""
    for kind in (FormatError, ValueError, TypeError, OSError):
        assert context_error(kind("CUDA error: unspecified launch failure")) is None
        assert context_error(kind("x: CUDA_ERROR_LAUNCH_FAILED (y)")) is None
    assert context_error(RuntimeError("the text 'CUDA error: unspecified launch failure' is wrong")) is None
    assert context_error(None) is None
