"""Experts in host memory: where they go while a model is loaded that is larger than the GPU, and who runs them there.

    offload = ExpertOffload(room, device, ...)      room: bytes of GPU memory for weights and slots
    offload.add(layer, linears)                     an expert's prepared linears, one expert after the other
    offload.finish()                                all layers are built: allocates the slots of each layer

A model that fits is not touched. Its experts stay where `prepare` put them until the GPU holds more than `fits`; then
all of them, and those that follow, move to pinned host memory, each as one block:

    block    uint8 [bytes]    the tensors of gate, up and down one after the other, each at a multiple of 256 bytes

The kernels read a block over PCIe through the table of addresses, or from a slot of the GPU after it was copied there
(streaming.py). Biases stay on the GPU. `HostKernel` serves everything that multiplies layer by layer.

With SPILLS, layers for which host memory has no room lie in a file without a name in the cache directory, mapped into
memory; what is read of it may stay in the system's file cache.
"""

import contextlib
import mmap
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.cache import cache_directory
from crelle.errors import CapacityError
from crelle.kernels.base import Encoded, WrappedKernel

ALIGNMENT = 256  # bytes
STAGED = 64 << 20  # bytes of each half of the buffer through which prompts stage experts, or one expert
HUGE_PAGES = False  # of 2 MiB, for blocks: not measured on a GPU yet
SPILLS = False  # whether layers without room in host memory go to disk: not run on a GPU yet
_PAGE, _HUGE = 4096, 2 << 20


def small_pages(size: int) -> Tensor:
    """Return uint8 [size] of host memory that begins with a page."""
    whole = torch.empty(size + _PAGE, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _PAGE :][:size]


def huge_pages(size: int) -> Tensor:
    """Return uint8 [size] of host memory in pages of 2 MiB, where the system has them."""
    memory = mmap.mmap(-1, size + _HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE :][:size]


def pin(block: Tensor) -> None:
    """Let the GPU read a tensor of host memory, at the same addresses; `unpin` ends that.

    torch's own pinned memory is rounded up to a power of two and never given back.
    """
    error = int(_runtime().cudaHostRegister(block.data_ptr(), block.numel(), 3))  # portable, mapped
    if error:
        raise CapacityError(
            f"{block.numel() / 1e9:.3g} GB of host memory cannot be pinned for the GPU (CUDA error {error}): free host "
            "memory, raise the memory limit of the container, or choose fewer bits"
        )


def unpin(addresses: Sequence[int]) -> None:
    """End what `pin` began."""
    if addresses:
        with contextlib.suppress(RuntimeError):  # a context that is lost reads nothing any more
            torch.cuda.synchronize()
    for address in addresses:
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def tensors_in(data: Any) -> Iterator[Tensor]:
    """Yield the tensors of a prepared weight, whatever its type, in one order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, tuple):
        for part in data:
            yield from tensors_in(part)
    elif is_dataclass(data) and not isinstance(data, type):
        for f in fields(data):
            if f.init:
                yield from tensors_in(getattr(data, f.name))


def with_tensors(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a prepared weight with other tensors in the places of its own."""
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, tuple):
        parts = [with_tensors(part, change) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if is_dataclass(data) and not isinstance(data, type):
        found = {f.name: getattr(data, f.name) for f in fields(data) if f.init}
        found = {k: v for k, v in found.items() if next(tensors_in(v), None) is not None}
        return replace(data, **{k: with_tensors(v, change) for k, v in found.items()})
    return data


class HostKernel(WrappedKernel):
    """A GPU kernel for a weight in host memory: the weight is copied to x's device for each product."""

    def prepare(self, w: Any, dtype: torch.dtype) -> Any:
        return self.kernel.prepare(w, dtype)

    def encode(self, x: Tensor, prepared: Any) -> Encoded:
        return Encoded(x)

    def shares(self, a: Any, b: Any) -> bool:
        return True

    def run(self, x: Tensor | Encoded, prepared: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else x.data
        return self.kernel.run(x, with_tensors(prepared, lambda t: t.to(x.device)))


@dataclass(slots=True)
class HostLayer:
    """The experts of a layer."""

    count: int  # experts that the layer has
    experts: list[list[Any]] = field(default_factory=list)  # the linears of each
    blocks: list[Tensor] = field(default_factory=list)  # of those that are in host memory
    memory: Tensor | None = None  # of all blocks
    on_disk: bool = False  # whether that is a file, which the GPU cannot read
    slots: Tensor | None = None  # uint8 [experts that the GPU has room for, block_bytes], there

    @property
    def block_bytes(self) -> int:
        return _block_bytes(self.experts[0])

    @property
    def slot_count(self) -> int:
        return 0 if self.slots is None else len(self.slots)


class ExpertOffload:
    """Decides where the experts of a model lie, and keeps those that lie in host memory."""

    def __init__(
        self,
        room: int,
        device: torch.device,
        *,
        fits: int | None = None,
        host_free: Callable[[], int],
        disk: Path | None = None,
        used: Callable[[], int] | None = None,
        pins: bool = True,
        reason: str = "",
    ) -> None:
        """room: bytes that weights and slots may take on the GPU; fits: weights up to which a model is not streamed.

        used: bytes that weights take now, by default what torch has allocated since.
        host_free: bytes of host memory that are free now; disk: where a file may lie, default: the cache directory.
        pins: host memory for a GPU; reason: where `room` comes from.
        """
        self._disk = disk or cache_directory()
        self.room, self.fits, self.device, self.reason = room, room if fits is None else fits, device, reason
        self._host_free, self._pins, self._pinned = host_free, pins, list[int]()
        weakref.finalize(self, unpin, self._pinned).atexit = False
        before = torch.cuda.memory_allocated(device) if used is None else 0
        self._used = used or (lambda: torch.cuda.memory_allocated(device) - before)
        self.layers: dict[int, HostLayer] = {}
        self.active = False  # whether experts lie in host memory
        self.staging: Tensor | None = None  # uint8 [2, bytes] on the GPU, where prompts stage experts
        self.streams: Any = None  # their ExpertStreams, once a step was made

    def add(self, layer: int, count: int, linears: Sequence[Any]) -> None:
        """Take note of an expert whose linears were just prepared on the GPU; move it where experts lie in host memory.

        count: experts of the layer.
        """
        known = self.layers.setdefault(layer, HostLayer(count))
        known.experts.append(list(linears))
        if self.active:
            self._move(known, len(known.experts) - 1)
        elif self._used() > self.fits:
            self._start()

    def finish(self) -> None:
        """Count the slots of each layer: all have the same share of what `room` leaves."""
        if not self.active and self.layers and self._used() > self.fits:
            self._start()
        if not self.active:
            return
        sizes = [(layer.count, layer.block_bytes) for layer in self.layers.values()]
        staging, used = max(staged_experts(n, size) * size for n, size in sizes), self._used()
        if (left := self.room - used - 2 * staging) < 0:
            raise CapacityError(
                f"the weights outside the experts take {used / 1e9:.3g} GB and the buffer for streaming experts "
                f"{2 * staging / 1e9:.3g} GB, but only {max(0, self.room) / 1e9:.3g} GB are left for weights "
                f"({self.reason}); allow more memory, or choose fewer bits"
            )
        for layer, n in zip(self.layers.values(), share_slots(left, sizes), strict=True):
            layer.slots = torch.empty(n, layer.block_bytes, dtype=torch.uint8, device=self.device)
        self.staging = torch.empty(2, staging, dtype=torch.uint8, device=self.device)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of slots and of the staging buffer."""
        return self.slot_bytes + (0 if self.staging is None else self.staging.numel())

    @property
    def slot_bytes(self) -> int:
        return sum(layer.slot_count * layer.block_bytes for layer in self.layers.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of experts in host memory, or on disk."""
        return sum(len(layer.blocks) * layer.block_bytes for layer in self.layers.values())

    @property
    def share(self) -> float:
        """Share of the experts that fit the slots."""
        return self.slot_bytes / max(1, self.host_bytes)

    def __str__(self) -> str:
        """Say how many experts fit the GPU."""
        slots, count = [x.slot_count for x in self.layers.values()], max(x.count for x in self.layers.values())
        several = f"{min(slots)} to {max(slots)}" if min(slots) < max(slots) else f"{max(slots)}"
        fit = f"streamed, {several} of {count} experts of each layer fit the GPU ({self.slot_bytes / 1e9:.3g} GB)"
        if not (on_disk := [x for x in self.layers.values() if x.on_disk]):
            return f"{fit}, all lie in pinned host memory ({self.host_bytes / 1e9:.3g} GB)"
        return (
            f"{fit}; host memory has no room for those of {len(on_disk)} of {len(self.layers)} layers, which are read "
            f"from disk ({sum(len(x.blocks) * x.block_bytes for x in on_disk) / 1e9:.3g} GB), without CUDA graphs"
        )

    def _start(self) -> None:
        """Move all experts that there are, and from now on every new one."""
        self.active = True
        for layer in self.layers.values():
            for expert in range(len(layer.experts)):
                self._move(layer, expert)
        if self._pins:
            torch.cuda.empty_cache()  # for other processes on the GPU

    def _allocate(self, size: int) -> Tensor:
        memory = huge_pages(size) if HUGE_PAGES else small_pages(size)
        if self._pins:
            pin(memory)
            self._pinned.append(memory.data_ptr())
        return memory

    def _needs_disk(self, size: int) -> bool:
        """Whether host memory has no room for a layer; without SPILLS that is refused."""
        if size <= (free := self._host_free()):
            return False
        if not SPILLS:
            raise CapacityError(
                f"the experts fit neither the GPU ({self.reason}) nor host memory: those of the next layer take "
                f"{size / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free ({self.host_bytes / 1e9:.3g} GB of experts "
                "have a place already); allow more memory, or choose fewer bits"
            )
        return True

    def _map(self, size: int) -> Tensor:
        """Return memory of a file, which goes with it."""
        self._disk.mkdir(parents=True, exist_ok=True)
        if size > (free := shutil.disk_usage(self._disk).free):
            raise CapacityError(
                f"the experts fit neither the GPU ({self.reason}) nor host memory nor the disk: those of the next "
                f"layer take {size / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free in {self._disk} "
                f"({self.host_bytes / 1e9:.3g} GB of experts have a place already); allow more memory, choose fewer "
                "bits, or set CRELLE_CACHE to a larger disk"
            )
        with tempfile.TemporaryFile(dir=self._disk) as file:
            file.truncate(size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

    def _move(self, layer: HostLayer, expert: int) -> None:
        linears, size = layer.experts[expert], layer.block_bytes
        if layer.memory is None:
            whole = layer.count * size
            layer.on_disk = self._needs_disk(whole)
            layer.memory = self._map(whole) if layer.on_disk else self._allocate(whole)
        if (mine := _block_bytes(linears)) > size:
            raise CapacityError(
                f"experts of a layer that are streamed have the same size, and '{linears[0].name}' is one of {mine} "
                f"bytes beside others of {size}: quantize all experts of a layer to the same bits, or allow more memory"
            )
        block = layer.memory[expert * size : (expert + 1) * size]
        at = 0

        def place(t: Tensor) -> Tensor:
            nonlocal at
            n = t.numel() * t.element_size()
            there = block[at : at + n].view(t.dtype).view(t.shape)
            there.copy_(t)
            at += _aligned(n)
            return there

        for linear in linears:
            p = linear.prepared
            linear.prepared = replace(p, kernel=HostKernel(p.kernel), data=with_tensors(p.data, place))
        layer.blocks.append(block)


def share_slots(left: int, layers: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many experts of each layer [(experts, bytes of one)] fit `left` bytes: the same share of all layers.

    What rounding leaves goes to the first layers, one expert each.
    """
    share = left / sum(count * size for count, size in layers)
    slots = [min(count, int(share * count)) for count, _ in layers]
    left -= sum(n * size for n, (_, size) in zip(slots, layers, strict=True))
    for i, (count, size) in enumerate(layers):
        if slots[i] < count and size <= left:
            slots[i], left = slots[i] + 1, left - size
    return slots


def staged_experts(count: int, block_bytes: int) -> int:
    """Return how many experts of a layer that has `count` half of the staging buffer holds."""
    return max(1, min(count, STAGED // block_bytes))


def _block_bytes(linears: Sequence[Any]) -> int:
    return sum(_aligned(t.numel() * t.element_size()) for x in linears for t in tensors_in(x.prepared.data))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def offload_of(model: Any) -> ExpertOffload | None:
    """Return what keeps a model's experts in host memory; None where all are on the GPU."""
    found: ExpertOffload | None = getattr(getattr(model, "build", None), "offload", None)
    return found if found is not None and found.active else None
