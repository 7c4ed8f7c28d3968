"""Training a whole quantized model end to end, saving its state so that a killed run goes on.

    min over all parameters of  mean_t KL(p_t ‖ p̂_t)     p the full-precision model's next-token distribution
                                                         (crelle.quantizers.training.teacher);
    or the plain language-model loss where there is no teacher (AlphaTuning on a task's text)

Deterministic for a seed. Of several ranks (crelle.quantizers.ranks) each has the whole model and takes its rows of
every batch; the first one saves the state.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crelle.errors import FormatError
from crelle.formats.storage.io import whole_file
from crelle.quantizers.calibration.layer_api import Block, CalibrationModel, Progress, half_products
from crelle.quantizers.ranks import world
from crelle.quantizers.training.adam8 import LowMemoryStep
from crelle.quantizers.training.blockwise import Losses, Training, TrainStep
from crelle.quantizers.training.divergence import kl_divergence
from crelle.quantizers.training.incremental import IncrementalTrellis, encode_in_network, events, free_in_network
from crelle.quantizers.training.teacher import Teacher

_ENCODED = 32768  # tokens whose inputs say what an error of trellis codes does
_CHUNK = 512  # tokens whose logits are in memory at one time, on a CPU and where memory is short


@dataclass(frozen=True, slots=True)
class Network:
    """A whole calibration model in memory."""

    model: CalibrationModel
    blocks: Sequence[Block]
    recompute: bool = False  # blocks in backward (activation checkpointing)

    @classmethod
    def of(
        cls, model: CalibrationModel, prepare: Callable[[int, Block], None] | None = None, recompute: bool = False
    ) -> "Network":
        """Build all blocks; `prepare` is called with each and its number before the next is built, and may drop what
        it holds.
        """
        blocks = []
        for i in range(model.layers):
            blocks.append(model.block(i))
            if prepare is not None:
                prepare(i, blocks[-1])
        return cls(model, blocks, recompute)

    def hidden(self, rows: Tensor) -> Tensor:
        """Return what the output head reads, [B, T, width], for token ids [B, T]."""
        x = self.model.embed(rows)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else block(x)
        return self.model.finish(x)


def picked(step: int, count: int, t: Training) -> Tensor:
    """Return which of `count` sequences this rank has in a step: by the seed and the step alone, so that a resumed run
    sees the same data.
    """
    order = torch.Generator().manual_seed(t.seed * 1_000_003 + step)
    return world().part(torch.randint(0, count, (t.batch,), generator=order))


def drawn(count: int, t: Training) -> Tensor:
    """Return which of `count` sequences this rank has in any step."""
    return torch.tensor(
        sorted({i for step in range(t.steps) for i in picked(step, count, t).tolist()}), dtype=torch.long
    )


class EndToEnd:
    """Trains the coders in a network on token sequences [S, T], by distillation or by the language-model loss."""

    capture: ClassVar[bool] = True  # steps as a CUDA graph

    def __init__(
        self,
        student: Network,
        coders: Sequence[nn.Module],
        teacher: Teacher | None,
        tokens: Tensor,
        t: Training,
        device: torch.device,
    ) -> None:
        self.student, self.coders, self.teacher = student, list(coders), teacher
        self.tokens, self.t, self.device = tokens, t, device
        self.step: TrainStep | LowMemoryStep
        if t.low_memory:
            self.step = LowMemoryStep(self._loss_of, self.coders, t, device)
        else:
            capture = self.capture and all(block.capturable for block in student.blocks)
            self.step = TrainStep(self._loss_of, self.coders, t, device, capture=capture)
        self._losses = Losses(t, device)
        self._events = events(t.steps, self._encode) if any(isinstance(c, IncrementalTrellis) for c in coders) else {}

    @property
    def losses(self) -> list[float]:
        return self._losses.known

    def run(self, state: Path | None = None, progress: Progress | None = None, save_every: float = 60.0) -> list[float]:
        """Train to the end, from `state` if that file is there; returns the losses. It ends at one that is not finite.

        The state is saved after `save_every` seconds, or later where saving would take more than a tenth of the time.
        """
        if state is not None and state.exists():
            self._load(state)
        try:
            self._train(state, progress, save_every)
        finally:
            self.step.close()
        return self.losses

    def _train(self, state: Path | None, progress: Progress | None, save_every: float) -> None:
        saved = time.monotonic()
        while len(self._losses) < self.t.steps:
            known = self._losses.add(self.take(len(self._losses)))
            if not known or (len(self.losses) % 10 and len(self.losses) < self.t.steps):
                continue
            if progress:
                last = self.losses[-10:]
                progress(len(self.losses), self.t.steps, f"training, loss {sum(last) / len(last):.4f}")
            if state is not None and world().first and time.monotonic() - saved > save_every:
                begun = time.monotonic()
                self._save(state)
                saved = time.monotonic()
                save_every = max(save_every, 10 * (saved - begun))

    def take(self, step: int) -> Tensor:
        """Take one step; returns its loss, on the device."""
        if step in self._events:
            self._events[step]()
        pick = picked(step, len(self.tokens), self.t)
        inputs = [self.tokens[pick], *([] if self.teacher is None else [self.teacher.hidden(pick)])]
        return self.step(step, *(t.to(self.device) for t in inputs))

    def _encode(self, share: float) -> None:
        """Encode columns of trellis codes up to a share of all; the first time, free those that are after it."""
        if all(int(c.encoded) == c.inputs for c in self.coders if isinstance(c, IncrementalTrellis)):
            return free_in_network(self.student.blocks, share)
        some = world().part(self.tokens[: max(world().size, _ENCODED // self.tokens.shape[1])])
        with torch.no_grad():
            states = [self.student.model.embed(rows.to(self.device)) for rows in torch.split(some, self.t.batch)]
        return encode_in_network(self.student.blocks, states, share, self.t.half)

    def _loss_of(self, rows: Tensor, soft: Tensor | None = None) -> Tensor:
        with half_products(self.device, self.t.half):
            return self._loss(self.student.hidden(rows), soft, rows)

    def _loss(self, out: Tensor, soft: Tensor | None, rows: Tensor) -> Tensor:
        flat = out[:, :-1].flatten(0, 1)
        goal = rows[:, 1:].flatten() if soft is None else soft[:, :-1].flatten(0, 1)
        of = self._cross_entropy if soft is None else self._divergence
        if self.device.type == "cuda" and not self.t.low_memory:
            return of(flat, goal) / len(flat)
        # Chunk by chunk, recomputed in backward: the logits of a whole batch would fill the memory.
        parts = [
            checkpoint(of, flat[i : i + _CHUNK], goal[i : i + _CHUNK], use_reentrant=False)
            for i in range(0, len(flat), _CHUNK)
        ]
        return torch.stack(parts).sum() / len(flat)

    def _divergence(self, out: Tensor, soft: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            theirs = self.teacher.model.logits(soft)
        return kl_divergence(self.student.model.logits(out), theirs)

    def _cross_entropy(self, out: Tensor, goal: Tensor) -> Tensor:
        return F.cross_entropy(self.student.model.logits(out).float(), goal, reduction="sum")

    def _save(self, path: Path) -> None:
        state = {
            "coders": [c.state_dict() for c in self.coders],
            "optimizer": self.step.state_dict(),
            "losses": self.losses,
        }
        with whole_file(path) as f:
            torch.save(state, f)

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            for coder, old in zip(self.coders, state["coders"], strict=True):
                coder.load_state_dict(old)
            self.step.load_state_dict(state["optimizer"])
            self._losses = Losses(self.t, self.device, state["losses"])
        except (RuntimeError, KeyError, ValueError, EOFError, UnpicklingError) as e:
            raise FormatError(f"{path} is not the state of this training run ({e}); delete it to start over") from e
