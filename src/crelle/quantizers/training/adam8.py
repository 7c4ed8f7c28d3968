"""Training in less memory: Adam with moments of 8 bits, taken weight by weight inside the backward pass.

A weight costs 6 bytes instead of 16: its f32 value and two codes. Blocks of 256 neighbours share an f32 maximum, and
codes are companded, because what lies far below a block's maximum matters too:
    first moment    m = most (c/127) |c/127|      c int8
    second moment   v = most (c/255)⁴             c uint8
Rounding is stochastic, and keeps the mean of the moment: with the nearest code one that shrinks by a few percent a step
would stay where it is. No gradient outlives the step of its weight, so norms of all gradients are not known: an update
is at most one learning rate in each weight instead, which Adam with exact moments hardly ever exceeds. Several ranks
(crelle.quantizers.ranks) sum the gradients weight by weight too, from the last one to the first: where a weight is used
on the rows of some ranks alone, as an expert's may be, backward reaches it at another time or never.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crelle.quantizers.ranks import world
from crelle.quantizers.training.blockwise import Training, rate_at, share

_BLOCK = 256
_PIECE = 1 << 24  # weights that are updated at a time: bounds the temporaries
_BETAS = 0.9, 0.95
_EPS = 1e-8


class Moments:
    """Both moments of one parameter."""

    def __init__(self, p: Tensor) -> None:
        blocks = -(-p.numel() // _BLOCK)
        self.tensors = {
            "first": torch.zeros(blocks, _BLOCK, dtype=torch.int8, device=p.device),
            "second": torch.zeros(blocks, _BLOCK, dtype=torch.uint8, device=p.device),
            "first_most": torch.zeros(blocks, 1, device=p.device),
            "second_most": torch.zeros(blocks, 1, device=p.device),
        }

    def update(self, p: Tensor, g: Tensor, lr: float, step: int, chance: torch.Generator) -> None:
        """Take step number `step` (from 1 on) of Adam on p, in place."""
        flat, grad = p.view(-1), g.reshape(-1)
        for begin in range(0, p.numel(), _PIECE):
            self._update(flat[begin : begin + _PIECE], grad[begin : begin + _PIECE], begin, lr, step, chance)

    def _update(self, p: Tensor, g: Tensor, begin: int, lr: float, step: int, chance: torch.Generator) -> None:
        at = slice(begin // _BLOCK, -(-(begin + len(p)) // _BLOCK))
        first, second, first_most, second_most = (t[at] for t in self.tensors.values())
        g = nn.functional.pad(g.float(), (0, first.numel() - len(g))).view(first.shape)
        b1, b2 = _BETAS
        root = first.float() / 127
        m = (root * root.abs() * first_most).lerp_(g, 1 - b1)
        v = ((second.float() / 255).pow_(4) * second_most).mul_(b2).addcmul_(g, g, value=1 - b2)
        change = (v / (1 - b2**step)).sqrt_().add_(_EPS)
        change = torch.div(m, change, out=change).div_(1 - b1**step).clamp_(-1, 1)
        p.sub_(change.view(-1)[: len(p)], alpha=lr)
        first_most.copy_(m.abs().amax(1, keepdim=True))
        second_most.copy_(v.amax(1, keepdim=True))
        first.copy_(_codes(m.abs() / first_most.clamp(min=1e-38), 127, 2, chance).mul_(m.sign()))
        codes = _codes(v / second_most.clamp(min=1e-38), 255, 4, chance)
        second.copy_(torch.where(v > 0, codes.clamp(min=1), codes))  # at 0 the next update would be as large as it may


def _codes(part: Tensor, top: int, power: int, chance: torch.Generator) -> Tensor:
    """Return c or c + 1, the codes around part = (c/top)^power, by chance, so that the mean of `part` stays."""
    low = part.clamp_(max=1).pow(1 / power).mul_(top).floor_().clamp_(max=top - 1)
    below, above = (low / top).pow_(power), ((low + 1) / top).pow_(power)
    up = torch.rand(part.shape, generator=chance, device=part.device) * (above - below) < part - below
    return low.add_(up)


class LowMemoryStep:
    """Optimizer steps on a loss like TrainStep's: weights by 8-bit Adam in the backward pass, scales by AdamW."""

    def __init__(
        self, loss: Callable[..., Tensor], coders: Sequence[nn.Module], t: Training, device: torch.device
    ) -> None:
        self.loss, self.t = loss, t
        named = [(name, p) for c in coders for name, p in c.named_parameters()]
        self.weights = [p for name, p in named if name == "w"]
        self.scales = [p for name, p in named if name != "w"]
        self.moments = [Moments(p) for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.scales, lr=t.scale_rate, betas=_BETAS, weight_decay=0.0, fused=True)
        self.step = 0
        self._chance = torch.Generator(device)
        self._world = world()
        self._next = 0  # of the weights that wait for their turn, the one whose turn it is
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._ready, i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.weights)
        ]

    def close(self) -> None:
        """Take the hooks off the weights: through them the weights hold this object, and it holds the models."""
        for hook in self._hooks:
            hook.remove()

    def __call__(self, step: int, *inputs: Tensor) -> Tensor:
        """Take step number `step` of the schedule on this rank's rows of a batch; returns its share of the loss."""
        self.step, self._next = step, len(self.weights) - 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.t.scale_rate * rate_at(step, self.t)
        loss = self.loss(*inputs)
        if not self._world.alone:
            loss = loss * share(inputs[0], self.t)
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._world.alone:
            self._sum_rest()
        nn.utils.clip_grad_norm_(self.scales, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def _ready(self, i: int, p: Tensor) -> None:
        """Called when backward has the gradient of a weight."""
        if self._world.alone:
            self._update(i, p)
            return
        while self._next >= 0 and (waiting := self.weights[self._next]).grad is not None:
            self._world.add(waiting.grad)
            self._update(self._next, waiting)
            self._next -= 1

    @torch.no_grad()
    def _sum_rest(self) -> None:
        """Take the turns of weights that backward has not reached on this rank, and of those behind them."""
        for p in (*self.weights[: self._next + 1], *self.scales):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self._next >= 0:
            self._ready(self._next, self.weights[self._next])
        self._world.add_all(p.grad for p in self.scales if p.grad is not None)

    def _update(self, i: int, p: Tensor) -> None:
        assert p.grad is not None
        self._chance.manual_seed((self.t.seed * 1_000_003 + self.step) * 65_537 + i)  # the same in a resumed run
        self.moments[i].update(p, p.grad, self.t.rate * rate_at(self.step, self.t), self.step + 1, self._chance)
        p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"scales": self.optimizer.state_dict(), "weights": [m.tensors for m in self.moments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["scales"])
        for mine, old in zip(self.moments, state["weights"], strict=True):
            for name, t in mine.tensors.items():
                t.copy_(old[name])
