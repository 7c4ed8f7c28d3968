"""Load a compiled kernel into torch's context and launch it on torch's current stream of the GPU that has its tensors.

    kernel = load("planes/bmma_gemv.cu", "crelle::bmma_gemv<3, 8, 2>")
    kernel((blocks, 1, 1), 256, weight, x, y, N, K, shared=4096)

Arguments go to the kernel's parameters in order, and must have the size that the compiled kernel says:
    Tensor      its address                     T*
    None        the null pointer                T*
    int         4 or 8 bytes, signed            int, int64_t (an address, too)
    bool        1 or 4 bytes                    bool, int
    float       4 or 8 bytes                    float, double
    bytes       as they are                     a struct by value (e.g. from struct.pack)
Sizes cannot tell an int from a float: write 1.0 where the kernel takes a float.

The caller keeps tensors alive, as with any asynchronous work on a stream. A launch costs a few microseconds of Python
and no allocation on the device, so it can be captured in a CUDA graph; load the kernel before the capture.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from crelle.errors import CrelleError, UnsupportedError
from crelle.kernels.cuda import jit

_FREE_SHARED = 48 * 1024  # shared memory a block, static and dynamic, that needs no permission
_FORMATS = {(int, 4): "i", (int, 8): "q", (bool, 1): "?", (bool, 4): "i", (float, 4): "f", (float, 8): "d"}


Function = TypeVar("Function", bound=Callable[..., Any])


def load(file: str, expression: str, device: int | None = None) -> "Kernel":
    """Return a kernel of `file`, compiled where the cache has none, loaded on a device (the current one)."""
    if (found := getattr(_recorded, "kernels", None)) is not None:
        found.add((file, expression))
        return _SkippedKernel(expression)
    return _load(file, expression, torch.cuda.current_device() if device is None else device)


@contextmanager
def recording() -> Iterator[set[tuple[str, str]]]:
    """Collect what this thread loads, for `jit.compile_all`; meanwhile nothing is compiled, and launches do nothing.

    What runs inside shows which kernels it needs, for the price of its Python; values that it computes mean nothing.
    """
    before, _recorded.kernels = getattr(_recorded, "kernels", None), set[tuple[str, str]]()
    try:
        yield _recorded.kernels
    finally:
        _recorded.kernels = before


def on_device(tensor_of: Callable[[Any], Tensor]) -> Callable[[Function], Function]:
    """Make function(x, w, …) run with the weight's GPU as the current one: `load` and launches take that.

    `tensor_of`: some tensor of a weight w.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def run(x: Any, w: Any, *args: Any) -> Any:
            device = tensor_of(w).get_device()  # -1: on a CPU, where kernels are emulated
            if isinstance(x, Tensor) and x.get_device() != device:
                raise UnsupportedError(f"x is on {x.device}, but the weight is on {tensor_of(w).device}")
            if device < 0 or device == torch.cuda.current_device():
                return function(x, w, *args)
            with torch.cuda.device(device):
                return function(x, w, *args)

        return run  # type: ignore[return-value]

    return decorate


def is_recording() -> bool:
    """Whether launches of this thread do nothing now (`recording`): what they should compute must not be kept."""
    return getattr(_recorded, "kernels", None) is not None


def can_bind(kernel: object) -> bool:
    """Whether `load` gave a kernel whose launches can be bound: not while recording, nor of an emulator."""
    return isinstance(kernel, Kernel) and not isinstance(kernel, _SkippedKernel)


def multiprocessors(device: int | None = None) -> int:
    """How many multiprocessors the device has: a grid of this many blocks fills it once."""
    return _multiprocessors(torch.cuda.current_device() if device is None else device)


def most_shared_memory() -> int:
    """How many bytes of shared memory a thread block can have on the current device, static and dynamic."""
    return _most_shared_memory(torch.cuda.current_device())


def attributes(kernel: "Kernel") -> dict[str, int]:
    """What the kernel takes: registers and local (spilled) bytes a thread, static shared bytes and threads a block."""
    from cuda.bindings import driver

    names = {"registers": "NUM_REGS", "local_bytes": "LOCAL_SIZE_BYTES", "shared_bytes": "SHARED_SIZE_BYTES"}
    names["max_threads"] = "MAX_THREADS_PER_BLOCK"
    which = driver.CUfunction_attribute
    return {
        ours: kernel._ask(driver.cuFuncGetAttribute(getattr(which, f"CU_FUNC_ATTRIBUTE_{theirs}"), kernel._function))
        for ours, theirs in names.items()
    }


@cache
def _load(file: str, expression: str, device: int) -> "Kernel":
    return Kernel(jit.compile(file, expression, jit.architecture(torch.cuda.get_device_capability(device))), device)


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _most_shared_memory(device: int) -> int:
    from cuda.bindings import driver

    torch.cuda.init()  # type: ignore[no-untyped-call]
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(_ask(driver.cuDeviceGetAttribute(which, device), f"CUDA device {device}"))


class Kernel:
    """One function on one device. Call it to launch it."""

    def __init__(self, built: jit.CompiledKernel, device: int) -> None:
        from cuda.bindings import driver

        self.built = built
        self.device = device
        self._driver = driver
        self._launch = driver.cuLaunchKernelEx
        self._no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._packers: dict[tuple[Any, ...], _Packer] = {}
        self._context = _primary_context(device)
        with torch.cuda.device(device):
            self._enter()
            library = self._ask(driver.cuLibraryLoadData(built.cubin, [], [], 0, [], [], 0))
            self._library = library  # stays loaded as long as the process lives: `load` caches this object
            kernel = self._ask(driver.cuLibraryGetKernel(library, built.name.encode()))
            self._function = self._ask(driver.cuKernelGetFunction(kernel))  # loads it now, not in the first launch
            self._sizes = self._parameter_sizes()
            self._shared = _FREE_SHARED - attributes(self)["shared_bytes"]
        self._overlaps = torch.cuda.get_device_capability(device) >= (9, 0)

    def __repr__(self) -> str:
        return f"Kernel({self.built.expression!r} of {self.built.file}, {self.built.arch}, device {self.device})"

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: int,
        *args: Any,
        shared: int = 0,
        pdl: bool = False,
        cluster: int = 1,
        policy: int = 0,
    ) -> None:
        """Launch `grid` blocks of `block` threads, with `shared` bytes of dynamic shared memory each.

        An empty grid is refused. It may be a product of no rows, which its caller answers without a launch, or a size
        that was computed wrong; a launch that silently did nothing would leave the output as it was allocated.

        `cluster`: neighbours along x that run at the same time and reach each other's shared memory (sm_90 and later);
        `policy`: how they are placed, a CUclusterSchedulingPolicy.

        With `overlap` this kernel may start before the one ahead of it in the stream has ended (programmatic dependent
        launch): it must wait by itself (griddepcontrol.wait) before it reads what that one writes. Devices before
        sm_90 ignore it and run one after the other.

        Tensors on another GPU than this kernel's: the launch is made there.
        """
        types = tuple(map(type, args))
        packer = self._packers.get(types) or self._pack_for(types, args)
        if packer.tensors and (at := args[packer.tensors[0]].get_device()) != self.device and at >= 0:
            with torch.cuda.device(at):
                there = load(self.built.file, self.built.expression)
                there(grid, block, *args, shared=shared, pdl=pdl, cluster=cluster, policy=policy)
            return
        values: list[Any] = list(args)
        for i in packer.tensors:
            values[i] = args[i].data_ptr()
        for i in packer.nulls:
            values[i] = 0
        if packer.structs:
            packer.check_structs(self, args)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        key = (grid, block, shared, pdl, cluster, policy, stream)
        config = self._configs.get(key) or self._configure(*key)
        buffer, pointers = slot = packer.take()
        try:
            packer.pack_into(buffer, 0, *values)
        except struct.error as e:
            raise CrelleError(f"{self}: an argument does not fit its parameter ({e}): {values}") from e
        self._submit(config, pointers)
        packer.free.append(slot)

    def bind(
        self,
        grid: tuple[int, int, int],
        block: int,
        *args: Any,
        shared: int = 0,
        pdl: bool = False,
        cluster: int = 1,
        policy: int = 0,
    ) -> "Launch":
        """Return this launch with its arguments fixed, but for those that each call gives.

        ADDRESS: an int; VaryingBytes: a memoryview of 8-byte words.
        """
        fixed = [None if arg is ADDRESS else bytes(arg) if type(arg) is VaryingBytes else arg for arg in args]
        types = tuple(map(type, fixed))
        packer = self._packers.get(types) or self._pack_for(types, fixed)
        packer.check_structs(self, fixed)
        return Launch(self, (grid, block, shared, pdl, cluster, policy), packer, args)

    def _submit(self, config: Any, pointers: int) -> None:
        (status,) = self._launch(config, self._function, pointers, 0)
        if status == self._no_context:  # a thread that never used CUDA: enter torch's context, then it works
            self._enter()
            (status,) = self._launch(config, self._function, pointers, 0)
        if status:
            grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
            where = f" with grid {grid}, block {config.blockDimX}, {config.sharedMemBytes} bytes of shared memory"
            self._ask((status,), where)

    # --- what happens once ------------------------------------------------------------------------------------------

    def _configure(
        self, grid: tuple[int, int, int], block: int, shared: int, pdl: bool, cluster: int, policy: int, stream: int
    ) -> Any:
        _refuse_empty(self, grid)
        driver = self._driver
        if shared > self._shared:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._ask(driver.cuFuncSetAttribute(self._function, most, shared))
            self._shared = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        config.hStream = driver.CUstream(stream)
        which, attributes = driver.CUlaunchAttributeID, []
        if pdl and self._overlaps:
            early = driver.CUlaunchAttribute()
            early.id = which.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        if cluster > 1:
            together = driver.CUlaunchAttribute()
            together.id = which.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = together.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            attributes.append(together)
        if cluster > 1 and policy:
            placed = driver.CUlaunchAttribute()
            placed.id = which.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
            placed.value.clusterSchedulingPolicyPreference = driver.CUclusterSchedulingPolicy(policy)
            attributes.append(placed)
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        if len(self._configs) >= 4096:  # many different grids: forget rather than grow
            self._configs.clear()
        self._configs[grid, block, shared, pdl, cluster, policy, stream] = config
        return config

    def _parameter_sizes(self) -> list[int]:
        """Ask the compiled kernel for the sizes of its parameters: a wrong argument must not be read as garbage."""
        sizes: list[int] = []
        while True:
            status, *info = self._driver.cuFuncGetParamInfo(self._function, len(sizes))
            if status:  # CUDA_ERROR_INVALID_VALUE: one past the last
                return sizes
            sizes.append(info[1])

    def _pack_for(self, types: tuple[Any, ...], args: Sequence[Any]) -> "_Packer":
        if len(args) != len(self._sizes):
            raise CrelleError(f"{self} takes {len(self._sizes)} arguments, got {len(args)}")
        formats = []
        for i, (arg, size) in enumerate(zip(args, self._sizes, strict=True)):
            kind = type(arg)
            if isinstance(arg, Tensor) or arg is None:
                form = "P" if size == 8 else None
            elif kind is bytes:
                form = f"{size}s" if len(arg) == size else None
            else:
                form = _FORMATS.get((kind, size))
            if form is None:
                raise CrelleError(f"{self}: argument {i} is {kind.__name__} {arg!r}, its parameter has {size} bytes")
            formats.append(form)
        packer = self._packers[types] = _Packer(formats, args)
        return packer

    def _enter(self) -> None:
        self._ask(self._driver.cuCtxSetCurrent(self._context))

    def _ask(self, answer: tuple[Any, ...], where: str = "") -> Any:
        """Return what a driver function gave, or raise its error with the kernel's name."""
        return _ask(answer, f"{self}{where}")


class _SkippedKernel(Kernel):
    """What `load` returns while kernels are recorded."""

    def __init__(self, expression: str) -> None:
        self._expression = expression

    def __repr__(self) -> str:
        return f"Kernel({self._expression!r}, only recorded)"

    def __call__(self, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        _refuse_empty(self, grid)


_recorded = threading.local()
ADDRESS = object()  # in place of an argument of `Kernel.bind`: an address that each call gives


class VaryingBytes(bytes):
    """In place of an argument of `Kernel.bind`: as many bytes, a multiple of 8, that each call gives."""


class Launch:
    """A launch that `Kernel.bind` fixed: a fraction of the host's time, since only addresses of inputs are written."""

    def __init__(self, kernel: Kernel, options: tuple[Any, ...], packer: "_Packer", args: Sequence[Any]) -> None:
        self._kernel, self._options, self._packer = kernel, options, packer
        self._args = args  # also keeps tensors alive whose addresses are fixed
        self._where: list[Any] = []
        for arg, at in zip(args, packer.offsets, strict=True):
            if arg is ADDRESS:
                self._where.append(at // 8)
            elif type(arg) is VaryingBytes:
                self._where.append(slice(at // 8, (at + len(arg)) // 8))
        self._configs: dict[int, Any] = {}
        self._free: list[tuple[memoryview, int, Any]] = []

    def __call__(self, *given: Any) -> None:
        """Launch with what was left open, in the order of the parameters."""
        stream = torch._C._cuda_getCurrentRawStream(self._kernel.device)
        config = self._configs.get(stream) or self._configure(stream)
        try:
            slot = self._free.pop()  # atomic: threads have slots of their own
        except IndexError:
            slot = self._new_slot()
        words = slot[0]
        for where, value in zip(self._where, given, strict=True):
            words[where] = value
        self._kernel._submit(config, slot[1])
        self._free.append(slot)

    def _configure(self, stream: int) -> Any:
        if len(self._configs) >= 64:
            self._configs.clear()
        config = self._configs[stream] = self._kernel._configure(*(*self._options, stream))
        return config

    def _new_slot(self) -> tuple[memoryview, int, Any]:
        buffer, pointers = self._packer.new()
        values = [0 if a is ADDRESS or a is None else a.data_ptr() if isinstance(a, Tensor) else a for a in self._args]
        self._packer.pack_into(buffer, 0, *values)
        return memoryview(buffer).cast("B").cast("Q"), ctypes.addressof(pointers), pointers


class _Packer:
    """Lays arguments of given types into memory, each in a slot of its own, with an array of the slots' addresses.

    The driver copies them during the call, but lets other Python threads run meanwhile: so a launch takes a piece of
    memory from `free` and gives it back after (list.pop and append are atomic).
    """

    def __init__(self, formats: Sequence[str], args: Sequence[Any] = ()) -> None:
        self.tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        self.nulls = [i for i, arg in enumerate(args) if arg is None]
        self.structs = [(i, len(arg)) for i, arg in enumerate(args) if type(arg) is bytes]
        sizes = [max(8, -(-struct.calcsize(f) // 8) * 8) for f in formats]
        padded = [f"{f}{size - struct.calcsize(f)}x" for f, size in zip(formats, sizes, strict=True)]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._bytes = max(8, sum(sizes))
        self.pack_into = struct.Struct("@" + "".join(padded)).pack_into
        self.free: list[tuple[ctypes.Array[Any], int]] = []
        self._kept: list[Any] = []

    def check_structs(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Refuse bytes of another length than their parameter's, which pack_into would cut or fill."""
        for i, size in self.structs:
            if len(args[i]) != size:
                raise CrelleError(f"{kernel}: argument {i} has {len(args[i])} bytes, its parameter has {size}")

    def take(self) -> tuple["ctypes.Array[Any]", int]:
        try:
            return self.free.pop()
        except IndexError:
            buffer, pointers = self.new()
            self._kept.append(pointers)
            return buffer, ctypes.addressof(pointers)

    def new(self) -> tuple["ctypes.Array[Any]", "ctypes.Array[Any]"]:
        """Return memory for arguments, and the addresses of each in it."""
        buffer = (ctypes.c_char * self._bytes)()
        start = ctypes.addressof(buffer)
        return buffer, (ctypes.c_void_p * max(1, len(self.offsets)))(*[start + o for o in self.offsets])


def _refuse_empty(kernel: Kernel, grid: tuple[int, int, int]) -> None:
    if min(grid) < 1:
        raise CrelleError(f"{kernel}: the grid {grid} has no thread block; the caller must not launch without work")


@cache
def _primary_context(device: int) -> Any:
    from cuda.bindings import driver

    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)  # makes torch create its context: the device's primary one
    who = f"CUDA device {device}"
    return _ask(driver.cuDevicePrimaryCtxRetain(_ask(driver.cuDeviceGet(device), who)), who)


def _ask(answer: tuple[Any, ...], who: str) -> Any:
    from cuda.bindings import driver

    status, *values = answer
    if status:
        name, text = (
            driver_text(status)[1] or b"unknown" for driver_text in (driver.cuGetErrorName, driver.cuGetErrorString)
        )
        error = UnsupportedError if status == driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU else CrelleError
        raise error(f"{who}: {name.decode()} ({text.decode()})")
    return values[0] if values else None
