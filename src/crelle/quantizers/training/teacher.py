"""What a student is distilled from: the full-precision model's last hidden states, computed once, before training.

A sequence is drawn several times in a training, and the full-precision model says the same of it each time. Its layers
are needed only here, as many at a time as fit; training then has the memory, and a step does not run two models. What
is kept is what the output head reads, in the precision that its product has: bf16 where products are. It is kept on the
device if it is small, in host memory if that is large enough, and else in a file.
"""

import os
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from crelle.errors import CapacityError
from crelle.quantizers.calibration.layer_api import Block, CalibrationModel, Progress, half_products, has_half_products
from crelle.quantizers.device_limit import total_memory

_LAYERS = 0.7  # of the device's memory, for layers
_ON_DEVICE = 1 / 16  # of the device's memory: states up to this size stay there
_ON_HOST = 1 / 2  # of the host's memory: larger states go to a file


@dataclass(frozen=True, slots=True)
class Teacher:
    """The states of sequences that will be drawn, and the model whose output head makes logits of them."""

    model: CalibrationModel
    states: Tensor  # [sequences, T, width]
    index: Tensor  # where a sequence has its states
    seconds: float  # of the forward passes

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: CalibrationModel,
        tokens: Tensor,
        drawn: Tensor,
        device: torch.device,
        *,
        half: bool,
        batch: int = 8,
        memory: int | None = None,
        folder: Path | None = None,
        progress: Progress | None = None,
    ) -> "Teacher":
        """Run those of the sequences [S, T] whose numbers, each once, are `drawn`.

        half: as in training (Training.half); batch: sequences at a time; memory: bytes of the device that may be used;
        folder: where states go that are too large for the host's memory.
        """
        index = torch.full((len(tokens),), -1)
        index[drawn] = torch.arange(len(drawn))
        room = min(total_memory(device), memory or total_memory(device))
        half = half and has_half_products(device)
        dtype = torch.bfloat16 if half else torch.float32
        states = torch.empty(len(drawn), tokens.shape[1], 0, dtype=dtype)
        parts = torch.split(tokens[drawn], batch)
        begun, reading, first = perf_counter(), 0.0, 0

        def through(first: int) -> tuple[Tensor, int]:
            """Run all sequences through the layers from `first` on that fit; return states, and the layer after."""
            nonlocal reading
            before = perf_counter()
            blocks = _blocks(model, first, _LAYERS * room, half)
            reading += perf_counter() - before
            after, end = states, first + len(blocks)
            for i, part in enumerate(parts):
                at = slice(i * batch, i * batch + len(part))
                with half_products(device, half):
                    x = states[at].to(device).float() if first else model.embed(part.to(device))
                    for block in blocks:
                        x = block(x)
                    x = model.finish(x) if end == model.layers else x
                if after.shape[-1] != x.shape[-1]:
                    after = _room((*states.shape[:2], x.shape[-1]), dtype, device, room, folder)
                after[at] = x.to(after.device, dtype)
                if progress:
                    done = first * len(parts) + (i + 1) * len(blocks)
                    progress(done, model.layers * len(parts), "full-precision model")
            after[-1, 0, 0].item()  # waits for the device
            return after, end

        while first < model.layers and len(drawn):
            states, first = through(first)  # whose layers are gone before the next ones are built
        model.drop_tables()
        return cls(model, states, index, perf_counter() - begun - reading)

    def hidden(self, pick: Tensor) -> Tensor:
        """Return what the output head reads, [B, T, width], for the sequences with these numbers."""
        at = self.index[pick]
        assert (at >= 0).all(), "a sequence that was not to be drawn"
        return self.states[at.to(self.states.device)]


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, memory: int, folder: Path | None) -> Tensor:
    """Allocate states where they fit."""
    size = prod(shape) * dtype.itemsize
    if size <= _ON_DEVICE * memory:
        return torch.empty(shape, dtype=dtype, device=device)
    if folder is None or size <= _ON_HOST * total_memory(torch.device("cpu")):
        return torch.empty(shape, dtype=dtype)
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):  # writing to a mapped file on a full disk would end the process
            os.posix_fallocate(handle, 0, size)
        return torch.from_file(name, shared=True, size=prod(shape), dtype=dtype).view(shape)
    except OSError as e:
        raise CapacityError(
            f"the outputs of the full-precision model take {size / 1e9:.3g} GB, more than half of the host memory, and "
            f"cannot be written to {folder} ({e.strerror}); train on less text, or with fewer steps or own sequences"
        ) from e
    finally:
        os.close(handle)
        os.unlink(name)  # what is mapped stays, and is gone with the process, however that ends


def _blocks(model: CalibrationModel, first: int, room: float, half: bool) -> list[Block]:
    """Return the layers from `first` on that fit, at least one."""
    blocks: list[Block] = []
    size = 0
    for i in range(first, model.layers):
        block, before = model.block(i), size
        for linear in block.linears().values():
            if half:
                linear.weight = linear.weight.bfloat16()
            size += linear.weight.nbytes
        blocks.append(block)
        if 2 * size - before > room:  # with one more like this
            break
    return blocks
