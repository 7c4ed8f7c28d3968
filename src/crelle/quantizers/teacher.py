"""What a student is distilled from: the full-precision model's last hidden states, computed once, before training.

A sequence is drawn several times in a training, and the full-precision model says the same of it each time. Its layers
are needed only here, as many at a time as fit; training then has the memory, and a step does not run two models. What
is kept is what the output head reads, in the precision that its product has: bf16 where products are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from crelle.quantizers.device_limit import total_memory
from crelle.quantizers.layer_api import Block, CalibrationModel, Progress, half_products, has_half_products

_LAYERS = 0.7  # of the memory, for layers
_STATES = 1 / 16  # of the memory: states up to this size stay on the device


@dataclass(frozen=True, slots=True)
class Teacher:
    """The states of sequences that will be drawn, and the model whose output head makes logits of them."""

    model: CalibrationModel
    states: Sequence[Tensor]  # [batch, T, width] each; fewer sequences in the last one
    batch: int
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
        progress: Progress | None = None,
    ) -> "Teacher":
        """Run those of the sequences [S, T] whose numbers, each once, are `drawn`.

        half: as in training (Training.half); batch: sequences at a time; memory: bytes of the device that may be used.
        """
        index = torch.full((len(tokens),), -1)
        index[drawn] = torch.arange(len(drawn))
        room = min(total_memory(device), memory or total_memory(device))
        half = half and has_half_products(device)
        dtype = torch.bfloat16 if half else torch.float32
        size = len(drawn) * tokens.shape[1] * model.shapes()[1] * dtype.itemsize
        place = device if size <= _STATES * room else torch.device("cpu")
        parts = torch.split(tokens[drawn], batch)
        states: list[Tensor] = []
        seconds, first = 0.0, 0
        while first < model.layers and len(drawn):
            blocks = _blocks(model, first, _LAYERS * room, half)
            begun, last = perf_counter(), first + len(blocks) == model.layers
            for i, part in enumerate(parts):
                with half_products(device, half):
                    x = states[i].to(device).float() if first else model.embed(part.to(device))
                    for block in blocks:
                        x = block(x)
                    x = model.finish(x) if last else x
                states[i : i + 1] = [x.to(place, dtype)]
                if progress:
                    done = first * len(parts) + (i + 1) * len(blocks)
                    progress(done, model.layers * len(parts), "full-precision model")
            states[-1][0, 0, 0].item()  # waits for the device
            seconds += perf_counter() - begun
            first += len(blocks)
        model.drop_tables()
        return cls(model, states, batch, index, seconds)

    def hidden(self, pick: Tensor) -> Tensor:
        """Return what the output head reads, [B, T, width], for the sequences with these numbers."""
        return torch.stack([self.states[i // self.batch][i % self.batch] for i in self.index[pick].tolist()])


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
