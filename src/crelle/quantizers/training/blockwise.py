"""Training quantized weights: hyperparameters, optimizer steps, and block by block against the full-precision block.

Block-wise   min over a block's parameters of  mean_t |B̂(x̂_t) - y_t|² / |y_t|²     x̂ from the quantized prefix, y from
             the full-precision model. Divided by |y_t|², since the next norm divides by it: otherwise the few tokens
             with huge activations would dominate. One block is in memory.

Deterministic for a seed. End to end: crelle.quantizers.training.end_to_end. Of several ranks (crelle.quantizers.ranks)
each takes its part of every batch; gradients are summed over the ranks before they are clipped.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crelle.errors import NumericsError
from crelle.quantizers.calibration.layer_api import Block, half_products
from crelle.quantizers.ranks import SpreadRows, world


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Hyperparameters. Learning rates are in units of a group's initial step size (see ste.py)."""

    steps: int
    batch: int = 8  # sequences
    rate: float = 2e-3  # of weights
    scale_rate: float = 1e-3  # of scales, lows, alphas
    warmup: int = 20
    seed: int = 0
    half: bool = True  # bf16 products where the machine has them; parameters and sums stay f32
    low_memory: bool = (
        False  # end to end: moments of 8 bits, blocks recomputed in backward (crelle.quantizers.training.adam8)
    )


def parameter_groups(coders: Iterable[nn.Module], t: Training) -> list[dict[str, Any]]:
    """Return optimizer groups: weights at one learning rate, scales at the other."""
    weights: list[nn.Parameter] = []
    scales: list[nn.Parameter] = []
    for coder in coders:
        for name, p in coder.named_parameters():
            (weights if name == "w" else scales).append(p)
    groups = [{"params": weights, "lr": t.rate}, {"params": scales, "lr": t.scale_rate}]
    return [g for g in groups if g["params"]]


def rate_at(step: int, t: Training) -> float:
    """Linear warm-up, then cosine decay to 1% of the rate."""
    if step < t.warmup and t.steps > 2 * t.warmup:
        return (step + 1) / t.warmup
    return 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, step / t.steps))) / 2


class TrainStep:
    """Optimizer steps on a loss. On a GPU the first few run eagerly, then one is captured as a CUDA graph and replayed:
    launching thousands of small kernels from Python takes three times as long as running them. With several ranks there
    are two graphs, and gradients are summed between them.
    """

    EAGER = 3

    def __init__(
        self,
        loss: Callable[..., Tensor],
        coders: Sequence[nn.Module],
        t: Training,
        device: torch.device,
        *,
        capture: bool = True,
    ) -> None:
        self.loss, self.t, self.device = loss, t, device
        self._capturable = capture and device.type == "cuda"
        groups = parameter_groups(coders, t)
        on_gpu = device.type == "cuda"
        for g in groups:  # a captured step can only read a rate that is a tensor
            g["lr"] = torch.tensor(g["lr"], device=device) if on_gpu else g["lr"]
        self.base = [float(g["lr"]) for g in groups]
        self.parameters = [p for g in groups for p in g["params"]]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=on_gpu)
        self.taken = 0  # by this object
        self._world = world()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._inputs: tuple[Tensor, ...] = ()
        self._loss = torch.zeros((), device=device)

    def __call__(self, step: int, *inputs: Tensor) -> Tensor:
        """Take step number `step` of the schedule on this rank's rows of a batch; returns its share of the loss."""
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            rate = base * rate_at(step, self.t)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.taken += 1
        if not self._capturable or self.taken <= self.EAGER:
            return self._eager(*inputs)
        if not self._graphs:
            self._capture(*inputs)
        for mine, new in zip(self._inputs, inputs, strict=True):
            mine.copy_(new, non_blocking=True)
        self._graphs[0].replay()
        if len(self._graphs) == 2:
            self._sum_gradients()
            self._graphs[1].replay()
        return self._loss.clone()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def close(self) -> None:
        """Nothing outlives this object."""

    def _eager(self, *inputs: Tensor) -> Tensor:
        loss = self._backward(*inputs)
        self._sum_gradients()
        self._update()
        return loss

    def _backward(self, *inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*inputs)
        if not self._world.alone:
            loss = loss * share(inputs[0], self.t)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _sum_gradients(self) -> None:
        if self._world.alone:
            return
        for p in self.parameters:
            if p.grad is None:  # not used on this rank's rows
                p.grad = torch.zeros_like(p)
        self._world.add_all(p.grad for p in self.parameters if p.grad is not None)

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def _capture(self, *inputs: Tensor) -> None:
        self._inputs = tuple(t.clone() for t in inputs)
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self.device)
        self._graphs = [torch.cuda.CUDAGraph()]
        mode = "global" if self._world.alone else "thread_local"  # a thread of NCCL's asks for the state of its events
        with torch.cuda.graph(self._graphs[0], capture_error_mode=mode):
            self._loss = self._backward(*self._inputs)
            if self._world.alone:
                self._update()
        if not self._world.alone:  # communication is left out of graphs
            self._graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(self._graphs[1], capture_error_mode=mode):
                self._update()


def tune_block(
    block: Block,
    coders: Sequence[nn.Module],
    x: Tensor,
    target: Tensor,
    t: Training,
    device: torch.device,
    events: Mapping[int, Callable[[], None]] | None = None,
) -> list[float]:
    """Train the coders of one block to give `target` [S, T, width] from `x`; return the losses.

    events: what is done before a step, by its number; it may change parameters and buffers in place. Of several ranks
    each holds its own rows of both; a batch is of the same rows as with one.
    """

    def loss(xb: Tensor, yb: Tensor) -> Tensor:
        with half_products(device, t.half):
            out = block(xb)
        return relative_error(out.float(), yb)

    step = TrainStep(loss, coders, t, device, capture=block.capturable)
    order = torch.Generator().manual_seed(t.seed)
    rows = SpreadRows(world(), x)
    losses = Losses(t, device)
    for i in range(t.steps):
        if events is not None and i in events:
            events[i]()
        pick = torch.randint(0, len(rows), (t.batch,), generator=order)
        parts = (rows.take(states, pick, device).float() for states in (x, target))  # widened there: less to copy
        losses.add(step(i, *parts))
    return losses.known


def share(rows: Tensor, t: Training) -> float:
    """Return what part of a batch this rank has."""
    return len(rows) / t.batch


class Losses:
    """The losses of a training; ends it with a sentence at the first one that is not finite.

    A GPU's are copied to the host every tenth step: the host would wait for each otherwise.
    """

    def __init__(self, t: Training, device: torch.device, known: Sequence[float] = ()) -> None:
        self.t, self.known = t, list(known)
        self._pending: list[Tensor] = []
        self._most = 10 if device.type == "cuda" else 1

    def __len__(self) -> int:
        return len(self.known) + len(self._pending)

    def add(self, loss: Tensor) -> bool:
        """Add the loss of the next step, of this rank's rows; returns whether all losses are known now."""
        self._pending.append(loss)
        if len(self._pending) < self._most and len(self) < self.t.steps:
            return False
        found, first = whole_losses(self._pending), len(self.known)
        self._pending.clear()
        for step, value in enumerate(found, start=first):
            if not math.isfinite(value):
                raise NumericsError(_diverged(step, self.t))
        self.known += found
        return True


def _diverged(step: int, t: Training) -> str:
    if step == 0:
        return "the loss is not finite before the first step: the model's outputs contain NaN or infinity"
    return (
        f"training diverged: after step {step} of {t.steps} the loss is not finite, at a rate of {t.rate:g}; "
        "choose a smaller `rate`"
    )


def whole_losses(losses: Sequence[Tensor]) -> list[float]:
    """Return the losses of whole batches."""
    return world().add(torch.stack(list(losses))).tolist() if losses else []


def relative_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens of the squared error divided by the squared norm."""
    return ((out - target).square().mean(-1) / target.square().mean(-1).clamp(min=1e-12)).mean()
