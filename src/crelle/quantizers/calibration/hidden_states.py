"""Hidden states of all calibration sequences: on the device, or in pinned host memory and copied batch by batch.

    f32     on a CPU: as they were computed
    bf16    on a GPU: the products of the layers round their inputs to bf16 anyway, and the residual stream has two
            orders of magnitude more error from quantization than from this
Computing always reads f32 on the device. From host memory the next batch is copied while one is computed, and results
are copied back beside the batch after them; each on a stream of its own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def allocate(S: int, T: int, width: int, dtype: torch.dtype, device: torch.device, *, on_device: bool) -> Tensor:
    """Return room for hidden states [S, T, width]."""
    if on_device or device.type != "cuda":
        return torch.empty(S, T, width, dtype=dtype, device=device)
    return torch.empty(S, T, width, dtype=dtype, pin_memory=True)


def _in_host_memory(x: Tensor, device: torch.device) -> bool:
    return x.device.type != device.type


def load(x: Tensor, size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the hidden states in batches of `size` sequences, in f32 on the device."""
    parts = torch.split(x, size)
    if not _in_host_memory(x, device):
        yield from (part.float() for part in parts)
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(part: Tensor) -> Tensor:
        with torch.cuda.stream(copies):
            return part.to(device, non_blocking=True)

    ahead = begin(parts[0])
    for after in (*parts[1:], None):
        here, stream = ahead, torch.cuda.current_stream(device)
        stream.wait_stream(copies)  # before the next copy is queued there
        here.record_stream(stream)  # its memory belongs to the other stream, which may not reuse it before
        if after is not None:
            ahead = begin(after)
        yield here.float()


class Store:
    """Takes hidden states batch by batch; what is in host memory is there when the `with` block ends."""

    def __init__(self, into: Tensor, device: torch.device) -> None:
        self._into, self._at = into, 0
        self._copies: torch.cuda.Stream | None = None
        if _in_host_memory(into, device):
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        if self._copies is not None:
            self._copies.synchronize()

    def put(self, y: Tensor) -> None:
        """Take the next batch [B, T, width]."""
        place = self._into[self._at : self._at + len(y)]
        self._at += len(y)
        if self._copies is None:
            place.copy_(y)
            return
        rounded = y.to(self._into.dtype)
        self._copies.wait_stream(torch.cuda.current_stream(y.device))
        with torch.cuda.stream(self._copies):
            place.copy_(rounded, non_blocking=True)
        rounded.record_stream(self._copies)
