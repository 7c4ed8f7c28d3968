"""A forward pass of all layers and the gradient of the loss back through them, one layer in memory at a time.

Between the two passes the hidden states before the layers are kept; a layer that goes backward is built again and runs
forward once more, so that no activations inside a layer outlive their batch. Time grows in proportion to tokens and
weights: about four forward passes in all. What is kept, and how much at one time, the memory plan says
(crelle.quantizers.search.search_memory, crelle.quantizers.calibration.guidance).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from crelle.quantizers.calibration.hidden_states import Store, allocate, load
from crelle.quantizers.calibration.layer_api import Block, CalibrationModel, TrainableLinear, half_products


class PassMemory(Protocol):
    """What the passes ask of a memory plan."""

    @property
    def batch(self) -> int: ...  # sequences

    @property
    def states(self) -> torch.dtype: ...

    @property
    def states_on_device(self) -> bool: ...

    @property
    def stride(self) -> int: ...  # layers between those whose hidden states are kept

    def tokens_of_logits(self, V: int) -> int: ...


class Place(NamedTuple):
    """Which tokens a linear reads of a batch."""

    begin: int  # tokens before the batch
    root: Tensor  # f32 [B, T, 1], the root of the weight that calibration gives each token of the batch
    rows: Tensor | None  # which of the batch's tokens, in order; None: all

    def roots(self) -> Tensor:
        """Return the roots [tokens, 1] of those that it reads."""
        flat = self.root.flatten(0, -2)
        return flat if self.rows is None else flat[self.rows]


class GradientSink(Protocol):
    """Takes what one linear reads, and the gradient at its outputs, batch by batch."""

    def add(self, x: Tensor, gradient: Tensor, place: Place) -> None:
        """Take inputs [..., K] and gradients [..., N]."""
        ...


class LossPasses:
    """Hidden states of sequences [S, T] on their way forward and backward."""

    def __init__(
        self, model: CalibrationModel, tokens: Tensor, memory: PassMemory, half: bool, device: torch.device
    ) -> None:
        self.model, self.memory, self.device = model, memory, device
        self._tokens, self._half = tokens, half
        self._kept: dict[int, Tensor] = {}  # hidden states before layers

    def _room(self) -> Tensor:
        S, T = self._tokens.shape
        width = self.model.shapes()[1]
        return allocate(S, T, width, self.memory.states, self.device, on_device=self.memory.states_on_device)

    def _batches(self, x: Tensor) -> Iterator[Tensor]:
        return load(x, self.memory.batch, self.device)

    def block(self, i: int, ahead: int) -> Block:
        """Build a layer; the one that comes next is read meanwhile, where a GPU does the work."""
        block = self.model.block(i)
        if self.device.type == "cuda" and 0 <= ahead < self.model.layers:
            self.model.read_ahead(ahead)
        return block

    def _through(self, block: Block, x: Tensor) -> Tensor:
        with half_products(self.device, self._half):
            return block(x).float()

    def _layer(self, i: int, x: Tensor, ahead: int) -> Tensor:
        block, after = self.block(i, ahead), self._room()
        with Store(after, self.device) as store:
            for part in self._batches(x):
                store.put(self._through(block, part))
        return after

    def forward(self, told: Callable[[str], None]) -> Tensor:
        """Run all layers; return the last hidden states."""
        x = self._room()
        with Store(x, self.device) as store:
            for part in torch.split(self._tokens, self.memory.batch):
                store.put(self.model.embed(part.to(self.device)))
        self.model.drop_tables()
        for i in range(self.model.layers):
            if i % self.memory.stride == 0:
                self._kept[i] = x
            x = self._layer(i, x, ahead=i + 1)
            told("forward")
        return x

    @torch.no_grad()
    def before(self, i: int) -> Tensor:
        """Return, for the last time, the hidden states before a layer: as they were kept, or computed again."""
        for j in range(i - i % self.memory.stride, i):
            if j + 1 not in self._kept:
                self._kept[j + 1] = self._layer(j, self._kept[j], ahead=j + 1)
        return self._kept.pop(i)

    def loss_gradient(self, x: Tensor, chances: Tensor) -> Tensor:
        """Return the gradient of the summed loss at the last hidden states.

        Next tokens are sampled from the model, by one random number [tokens, 1] for each.
        """
        pull = self._room()
        begin = 0
        with Store(pull, self.device) as store:
            for part in self._batches(x):
                flat = part.flatten(0, 1)
                size = self._tokens_at_once(flat)
                pulls = [self._logits_gradient(t, chances[begin + i * size :][: len(t)]) for i, t in
                         enumerate(torch.split(flat, size))]  # fmt: skip
                store.put(torch.cat(pulls).reshape(part.shape))
                begin += len(flat)
        self.model.drop_tables()
        return pull

    def _tokens_at_once(self, x: Tensor) -> int:
        with torch.no_grad():
            V = self.model.logits(self.model.finish(x[:1])).shape[-1]
        return self.memory.tokens_of_logits(V)

    def _logits_gradient(self, x: Tensor, at: Tensor) -> Tensor:
        """Return the gradient at hidden states [T, width]: of the logits it is their softmax less the sampled token."""
        here = x.detach().requires_grad_()
        with torch.enable_grad(), half_products(self.device, self._half):
            logits = self.model.logits(self.model.finish(here))
        pull = logits.detach().softmax(-1, dtype=torch.float32)
        sampled = sample_tokens(pull, at)
        pull.scatter_add_(1, sampled[:, None], pull.new_full((len(x), 1), -1.0))
        return torch.autograd.grad(logits, here, pull.to(logits.dtype))[0]

    def backward(
        self,
        block: Block,
        x: Tensor,
        pull: Tensor,
        after: Tensor,
        stats: Mapping[str, GradientSink],
        *,
        wanted: bool,
    ) -> Tensor | None:
        """Backpropagate through a layer, adding to the stats; return the gradient before it, if that is wanted."""
        found = self._room() if wanted else None
        parts, begin = zip(self._batches(x), self._batches(pull), self._batches(after), strict=True), 0
        with nullcontext() if found is None else Store(found, self.device) as store:
            for here, gradient, behind in parts:
                root = behind.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
                below = self._back(block, here, gradient, Place(begin, root, None), stats)
                begin += root.numel()
                if store is not None:
                    store.put(below)
        return found

    def _back(self, block: Block, x: Tensor, pull: Tensor, batch: Place, stats: Mapping[str, GradientSink]) -> Tensor:
        x = x.detach().requires_grad_()

        def hook(linear: TrainableLinear, given: tuple[Tensor], out: Tensor) -> None:
            seen = given[0].detach()
            place = batch._replace(rows=linear.rows)
            out.register_hook(lambda gradient: stats[linear.name].add(seen, gradient, place))  # type: ignore[no-untyped-call]

        watched = [linear for name, linear in block.linears().items() if name in stats]
        handles = [linear.register_forward_hook(hook) for linear in watched]
        try:
            with torch.enable_grad():
                out = self._through(block, x)
        finally:
            for handle in handles:
                handle.remove()
        return torch.autograd.grad(out, x, pull)[0]


def wake_backward(device: torch.device) -> None:
    """Give the thread of backward passes its CUDA context: torch warns where the first that it does is a product."""
    if device.type == "cuda":
        with torch.enable_grad():
            one = torch.ones(1, device=device, requires_grad=True)
            torch.autograd.grad(one.exp(), one)


def sample_tokens(chances: Tensor, at: Tensor) -> Tensor:
    """Sample one of V by the chances [T, V], at one random number a row [T, 1], where torch.multinomial takes V."""
    sums = chances.cumsum(-1)
    return torch.searchsorted(sums, at * sums[:, -1:], right=True)[:, 0].clamp(max=sums.shape[1] - 1)
