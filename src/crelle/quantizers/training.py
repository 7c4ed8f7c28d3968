"""Training a quantized model: block by block against the full-precision block, then end to end.

Block-wise   min over a block's parameters of  mean_t |B̂(x̂_t) - y_t|² / |y_t|²     x̂ from the quantized prefix, y from
             the full-precision model. Divided by |y_t|², since the next norm divides by it: otherwise the few tokens
             with huge activations would dominate. One block is in memory.
End to end   min over all parameters of  mean_t KL(p_t ‖ p̂_t)     p the full-precision model's next-token distribution;
             or the plain language-model loss where there is no teacher (AlphaTuning on a task's text).

Both are deterministic for a seed; end to end saves its state and resumes from it.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crelle.errors import FormatError
from crelle.formats.io import whole_file
from crelle.quantizers.layer_api import Block, CalibrationModel, Progress, half_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Hyperparameters. Learning rates are in units of a group's initial step size (see crelle.quantizers.ste)."""

    steps: int
    batch: int = 8  # sequences
    rate: float = 2e-3  # of weights
    scale_rate: float = 1e-3  # of scales, lows, alphas
    warmup: int = 20
    seed: int = 0
    half: bool = True  # bf16 products where the machine has them; parameters and sums stay f32


_CHUNK = 512  # tokens whose logits are in memory at one time on a CPU


def parameter_groups(coders: Iterable[nn.Module], t: Training) -> list[dict[str, Any]]:
    """Return optimizer groups: weights at one learning rate, scales at the other."""
    weights: list[nn.Parameter] = []
    scales: list[nn.Parameter] = []
    for coder in coders:
        for name, p in coder.named_parameters():
            (weights if name == "w" else scales).append(p)
    groups = [{"params": weights, "lr": t.rate}, {"params": scales, "lr": t.scale_rate}]
    return [g for g in groups if g["params"]]


def _rate(step: int, t: Training) -> float:
    """Linear warm-up, then cosine decay to 1% of the rate."""
    if step < t.warmup and t.steps > 2 * t.warmup:
        return (step + 1) / t.warmup
    return 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, step / t.steps))) / 2


class TrainStep:
    """Optimizer steps on a loss. On a GPU the first few run eagerly, then one is captured as a CUDA graph and replayed:
    launching thousands of small kernels from Python takes three times as long as running them.
    """

    EAGER = 3

    def __init__(
        self, loss: Callable[..., Tensor], coders: Sequence[nn.Module], t: Training, device: torch.device
    ) -> None:
        self.loss, self.t, self.device = loss, t, device
        groups = parameter_groups(coders, t)
        on_gpu = device.type == "cuda"
        for g in groups:  # a captured step can only read a rate that is a tensor
            g["lr"] = torch.tensor(g["lr"], device=device) if on_gpu else g["lr"]
        self.base = [float(g["lr"]) for g in groups]
        self.parameters = [p for g in groups for p in g["params"]]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=on_gpu)
        self.taken = 0  # by this object
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._loss = torch.zeros((), device=device)

    def __call__(self, step: int, *inputs: Tensor) -> Tensor:
        """Take step number `step` of the schedule; returns the loss before it."""
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            rate = base * _rate(step, self.t)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.taken += 1
        if self.device.type != "cuda" or self.taken <= self.EAGER:
            return self._eager(*inputs)
        if self._graph is None:
            self._capture(*inputs)
        for mine, new in zip(self._inputs, inputs, strict=True):
            mine.copy_(new, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()

    def _eager(self, *inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()

    def _capture(self, *inputs: Tensor) -> None:
        self._inputs = tuple(t.clone() for t in inputs)
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._eager(*self._inputs)


def tune_block(
    block: Block, coders: Sequence[nn.Module], x: Tensor, target: Tensor, t: Training, device: torch.device
) -> list[float]:
    """Train the coders of one block to give `target` [S, T, width] from `x`; return the losses."""

    def loss(xb: Tensor, yb: Tensor) -> Tensor:
        with half_products(device, t.half):
            out = block(xb)
        return relative_error(out.float(), yb)

    step = TrainStep(loss, coders, t, device)
    order = torch.Generator().manual_seed(t.seed)
    losses: list[Tensor] = []
    for i in range(t.steps):
        pick = torch.randint(0, len(x), (t.batch,), generator=order)
        losses.append(step(i, x[pick].to(device, torch.float32), target[pick].to(device, torch.float32)))
    return [float(one) for one in losses]


def relative_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens of the squared error divided by the squared norm."""
    return ((out - target).square().mean(-1) / target.square().mean(-1).clamp(min=1e-12)).mean()


@dataclass(frozen=True, slots=True)
class Network:
    """A whole calibration model in memory."""

    model: CalibrationModel
    blocks: Sequence[Block]

    @classmethod
    def of(cls, model: CalibrationModel) -> "Network":
        return cls(model, [model.block(i) for i in range(model.layers)])

    def hidden(self, rows: Tensor) -> Tensor:
        """Return what the output head reads, [B, T, width], for token ids [B, T]."""
        x = self.model.embed(rows)
        for block in self.blocks:
            x = block(x)
        return self.model.finish(x)


class EndToEnd:
    """Trains the coders in a network on token sequences [S, T], by distillation or by the language-model loss."""

    def __init__(
        self,
        student: Network,
        coders: Sequence[nn.Module],
        teacher: Network | None,
        tokens: Tensor,
        t: Training,
        device: torch.device,
    ) -> None:
        self.student, self.coders, self.teacher = student, list(coders), teacher
        self.tokens, self.t, self.device = tokens, t, device
        self.step = TrainStep(self._loss_of, self.coders, t, device)
        self.losses: list[float] = []

    def run(self, state: Path | None = None, progress: Progress | None = None, save_every: float = 60.0) -> list[float]:
        """Train to the end, from `state` if that file is there; returns the losses."""
        if state is not None and state.exists():
            self._load(state)
        saved = time.monotonic()
        pending: list[Tensor] = []
        while len(self.losses) + len(pending) < self.t.steps:
            pending.append(self._take(len(self.losses) + len(pending)))
            if (
                len(pending) == 10 or len(self.losses) + len(pending) == self.t.steps
            ):  # losses are copied to the host every tenth step
                self.losses += [float(loss) for loss in pending]
                pending.clear()
                if progress:
                    progress(len(self.losses), self.t.steps, f"loss {sum(self.losses[-10:]) / 10:.4f}")
                if state is not None and time.monotonic() - saved > save_every:
                    self._save(state)
                    saved = time.monotonic()
        return self.losses

    def _take(self, step: int) -> Tensor:
        # The batch of a step depends on the seed and the step alone, so that a resumed run sees the same data.
        order = torch.Generator().manual_seed(self.t.seed * 1_000_003 + step)
        pick = torch.randint(0, len(self.tokens), (self.t.batch,), generator=order)
        return self.step(step, self.tokens[pick].to(self.device))

    def _loss_of(self, rows: Tensor) -> Tensor:
        with half_products(self.device, self.t.half):
            soft = None
            if self.teacher is not None:
                with torch.no_grad():
                    soft = self.teacher.hidden(rows)
            return self._loss(self.student.hidden(rows), soft, rows)

    def _loss(self, out: Tensor, soft: Tensor | None, rows: Tensor) -> Tensor:
        flat = out[:, :-1].flatten(0, 1)
        goal = rows[:, 1:].flatten() if soft is None else soft[:, :-1].flatten(0, 1)
        of = self._cross_entropy if soft is None else self._divergence
        if self.device.type == "cuda":
            return of(flat, goal) / len(flat)
        # Chunk by chunk, recomputed in backward: the logits of a whole batch would fill the memory.
        parts = [
            checkpoint(of, flat[i : i + _CHUNK], goal[i : i + _CHUNK], use_reentrant=False)
            for i in range(0, len(flat), _CHUNK)
        ]
        return torch.stack(parts).sum() / len(flat)

    def _divergence(self, out: Tensor, soft: Tensor) -> Tensor:
        assert self.teacher is not None
        mine = self.student.model.logits(out).float().log_softmax(-1)
        with torch.no_grad():
            theirs = self.teacher.model.logits(soft).float().log_softmax(-1)
        return F.kl_div(mine, theirs, log_target=True, reduction="sum")

    def _cross_entropy(self, out: Tensor, goal: Tensor) -> Tensor:
        return F.cross_entropy(self.student.model.logits(out).float(), goal, reduction="sum")

    def _save(self, path: Path) -> None:
        state = {
            "coders": [c.state_dict() for c in self.coders],
            "optimizer": self.step.optimizer.state_dict(),
            "losses": self.losses,
        }
        with whole_file(path) as f:
            torch.save(state, f)

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            for coder, old in zip(self.coders, state["coders"], strict=True):
                coder.load_state_dict(old)
            self.step.optimizer.load_state_dict(state["optimizer"])
            self.losses = list(state["losses"])
        except (RuntimeError, KeyError, ValueError, EOFError, UnpicklingError) as e:
            raise FormatError(f"{path} is not the state of this training ({e}); delete it to start anew") from e
