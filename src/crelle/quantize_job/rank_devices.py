"""The devices that work on one model together: what --devices names."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from crelle.errors import SchemeError, UnsupportedError

MOST = 64  # processes
_READS = "`devices` must be GPU indices (0,1), all, or cpu once per process (cpu,cpu)"


@dataclass(frozen=True, slots=True)
class RankDevice:
    """A GPU by its number among those that torch sees, or the CPU."""

    index: int | None = None  # None: the CPU

    @property
    def kind(self) -> str:
        return "cpu" if self.index is None else "cuda"

    def environment(self) -> dict[str, str]:
        """Return variables by which a new process sees this device alone, so that its code need not know of others."""
        if self.index is None:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        name = str(self.index) if visible is None else visible.split(",")[self.index].strip()
        return {"CUDA_VISIBLE_DEVICES": name}

    def __str__(self) -> str:
        return "cpu" if self.index is None else f"cuda:{self.index}"


def parse_devices(text: str) -> tuple[RankDevice, ...]:
    """Return the devices that a text like "0,1" or "cpu,cpu" names, or say what is wrong with it."""
    items = [item.strip() for item in text.split(",")]
    if text.strip() == "all":
        items = [str(i) for i in range(max(1, _visible()))]
    if not all(item == "cpu" or item.removeprefix("cuda:").isdecimal() for item in items):
        raise SchemeError(f"{_READS}; got '{text}'")
    on_cpu = items.count("cpu")
    if 0 < on_cpu < len(items):
        raise SchemeError(f"{_READS}, not both GPUs and cpu; got '{text}'")
    if len(items) > MOST:
        raise SchemeError(f"`devices` must name at most {MOST} devices, got {len(items)}")
    if on_cpu:
        return (RankDevice(),) * on_cpu
    numbers = [int(item.removeprefix("cuda:")) for item in items]
    if (count := _visible()) == 0:
        raise UnsupportedError("torch sees no CUDA device; on a CPU use `devices='cpu,cpu'` or omit `devices`")
    if missing := [n for n in numbers if n >= count]:
        seen = "GPU 0 only" if count == 1 else f"GPUs 0 to {count - 1}"
        raise UnsupportedError(f"GPU {missing[0]} does not exist: torch sees {seen}")
    if twice := [n for n in numbers if numbers.count(n) > 1]:
        raise SchemeError(f"GPU {twice[0]} occurs twice in `devices`; every process needs its own GPU")
    return tuple(RankDevice(n) for n in numbers)


def _visible() -> int:
    return torch.cuda.device_count()


@contextmanager
def chosen(devices: Sequence[RankDevice], device: str) -> Iterator[str]:
    """Make the only one of the devices the current one, where one is named; return what to pass as device."""
    if not devices:
        yield device
    elif devices[0].index is None:
        yield "cpu"
    else:
        with torch.cuda.device(devices[0].index):
            yield "cuda"


def devices_of(devices: str | None, device: str) -> tuple[RankDevice, ...]:
    """Return the devices that were asked for, none where `device` says all."""
    if devices is None:
        return ()
    if device != "auto":
        raise SchemeError(f"`devices='{devices}'` and `device='{device}'` exclude each other; give only one")
    return parse_devices(devices)
