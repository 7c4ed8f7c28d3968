"""What the loss says about every linear: second moments of its inputs and of the gradients at its outputs.

One forward pass, then one backward pass, a layer in memory at a time. The gradient is of one of two losses:

    fisher    the loss of next tokens sampled from the model's own distribution: squares are the Fisher information
    residual  random signs at the layer's output over |y_t|: the layer's relative error, whatever later layers do

Between the passes the hidden states before the layers are kept; where and how many of them, how many sequences run at
one time, and whether a layer goes backward once for all of its Hessians or several times for some of them each, is in
crelle.quantizers.search.search_memory. None of that changes a result beyond the rounding of its sums.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from crelle.kernels.cpu import i16_gemm
from crelle.quantizers.calibration.half_stats import add_upper_half
from crelle.quantizers.calibration.hidden_states import Store, allocate, load
from crelle.quantizers.calibration.layer_api import (
    Block,
    CalibrationModel,
    TrainableLinear,
    bf16_sums,
    half_products,
    has_half_products,
)
from crelle.quantizers.calibration.stats import add_upper, mirror_
from crelle.quantizers.search.search_memory import SearchMemory
from crelle.quantizers.stage_times import SEARCH_HEAD, timed

Measure = Literal["fisher", "residual"]
Stage = tuple[str, ...]  # names of linears that read the same input


class GradientStats:
    """Second moments of one linear's inputs and output gradients; sums over tokens."""

    def __init__(self, linear: TrainableLinear, passed: int, half: bool = False, *, calibrated: bool = True) -> None:
        self._half = half  # bf16 products where the machine has them
        self._passed = passed  # tokens that pass the layer; an expert reads some of them
        N, K = linear.weight.shape
        device = linear.weight.device
        self._squares = torch.zeros(N, device=device)  # of gradients
        self._hessian = torch.zeros(K, K, device=device)  # tokens weighted by their gradients
        # Tokens weighted as in calibration; the same for all linears of an input, so only one of them sums it up.
        self._calibrated = torch.zeros(K, K, device=device) if calibrated else None
        self.tokens = 0

    def add(self, x: Tensor, gradient: Tensor, root: Tensor) -> None:
        """Add inputs [..., K], gradients [..., N] and the roots of the calibration's token weights [..., 1]."""
        if not x.numel():
            return
        x, g = x.float().flatten(0, -2), gradient.float().flatten(0, -2).square()
        self._squares += g.sum(0)
        self._add(self._hessian, x * g.sum(1, keepdim=True).sqrt())
        if self._calibrated is not None:
            self._add(self._calibrated, x * root.flatten(0, -2))
        self.tokens += len(x)

    def _add(self, sums: Tensor, x: Tensor) -> None:
        if self._half and x.device.type == "cuda":
            add_upper_half(sums, x.bfloat16())
            return
        if self._half and not has_half_products(x.device) and i16_gemm.usable(x.device):
            i16_gemm.StatsI16().add(x, None, None, sums, None, x.new_zeros(x.shape[1]))
            return
        with bf16_sums(x.device, self._half):
            add_upper(sums, x)

    def importance(self) -> Tensor:
        """Return G [N], the mean over all tokens: where a token does not reach an expert, it has no gradient there."""
        return self._squares / max(1, self._passed)

    def take_weighted(self) -> Tensor:
        """Return H [K, K]; the sums become part of it, and are forgotten here."""
        sums, self._hessian = self._hessian, self._hessian[:0]
        return mirror_(sums).div_(self._squares.sum().clamp(min=1e-38))

    def take_calibrated(self) -> Tensor:
        """Return the Hessian [K, K] as calibration sums it up; the same holds for its sums."""
        assert self._calibrated is not None
        sums, self._calibrated = self._calibrated, None
        return mirror_(sums).div_(max(1, self.tokens))


def backward_stats(
    model: CalibrationModel,
    tokens: Tensor,
    *,
    measure: Measure = "fisher",
    memory: SearchMemory | None = None,
    seed: int = 0,
    half: bool = True,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,  # called after each layer forward, and after the output head
) -> Iterator[tuple[Block, Stage, dict[str, GradientStats]]]:
    """Run forward through all layers, then backward; yield their stages, last layer first, with the linears' stats.

    Stats are the caller's to use up before the next stage is asked for.
    """
    run = _Passes(model, tokens, memory or SearchMemory(), half, torch.device(device))
    rng = torch.Generator(run.device).manual_seed(seed)
    told = progress or (lambda _: None)
    with torch.no_grad():
        x = run.forward(told)
    _wake_backward(run.device)
    with timed(SEARCH_HEAD):
        pull = run.loss_gradient(x, rng) if measure == "fisher" else None
    told("output head")
    after = x
    for i in reversed(range(model.layers)):
        x = run.before(i)
        block = run.block(i, ahead=i - 1)
        if pull is None or measure == "residual":
            pull = _signs(after, rng, run.device)
        below: Tensor | None = None
        for group in run.memory.passes(block):
            stats = _new_stats(block, group, tokens.numel(), half)
            found = run.backward(block, x, pull, after, stats, wanted=below is None)
            below = found if below is None else below
            for stage in group:
                yield block, stage, {name: stats.pop(name) for name in stage}
        pull, after = below, x


def _wake_backward(device: torch.device) -> None:
    """Give the thread of backward passes its CUDA context: torch warns where the first that it does is a product."""
    if device.type == "cuda":
        with torch.enable_grad():
            one = torch.ones(1, device=device, requires_grad=True)
            torch.autograd.grad(one.exp(), one)


def _new_stats(block: Block, stages: Sequence[Stage], passed: int, half: bool) -> dict[str, GradientStats]:
    linears = block.linears()
    return {
        name: GradientStats(linears[name], passed, half, calibrated=name == stage[0])
        for stage in stages
        for name in stage
    }


def _signs(after: Tensor, rng: torch.Generator, device: torch.device) -> Tensor:
    """Return the gradient of `residual` at hidden states behind a layer."""
    signs = torch.randint(0, 2, after.shape, generator=rng, device=device).float() * 2 - 1
    size = after.to(device, torch.float32).square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
    return signs / size


class _Passes:
    """Hidden states of all sequences on their way forward and backward."""

    def __init__(
        self, model: CalibrationModel, tokens: Tensor, memory: SearchMemory, half: bool, device: torch.device
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

    def loss_gradient(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return the gradient of the summed loss at the last hidden states, next tokens sampled from the model."""
        pull = self._room()
        chances = torch.rand(self._tokens.numel(), 1, generator=rng, device=self.device)
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
        stats: dict[str, GradientStats],
        *,
        wanted: bool,
    ) -> Tensor | None:
        """Backpropagate through a layer, adding to the stats; return the gradient before it, if that is wanted."""
        found = self._room() if wanted else None
        parts = zip(self._batches(x), self._batches(pull), self._batches(after), strict=True)
        with nullcontext() if found is None else Store(found, self.device) as store:
            for here, gradient, behind in parts:
                root = behind.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
                below = self._back(block, here, gradient, root, stats)
                if store is not None:
                    store.put(below)
        return found

    def _back(self, block: Block, x: Tensor, pull: Tensor, root: Tensor, stats: dict[str, GradientStats]) -> Tensor:
        x = x.detach().requires_grad_()

        def hook(linear: TrainableLinear, given: tuple[Tensor], out: Tensor) -> None:
            seen = given[0].detach()
            roots = root if linear.rows is None else root.flatten(0, -2)[linear.rows]
            out.register_hook(lambda gradient: stats[linear.name].add(seen, gradient, roots))  # type: ignore[no-untyped-call]

        watched = [linear for name, linear in block.linears().items() if name in stats]
        handles = [linear.register_forward_hook(hook) for linear in watched]
        try:
            with torch.enable_grad():
                out = self._through(block, x)
        finally:
            for handle in handles:
                handle.remove()
        return torch.autograd.grad(out, x, pull)[0]


def sample_tokens(chances: Tensor, at: Tensor) -> Tensor:
    """Sample one of V by the chances [T, V], at one random number a row [T, 1], where torch.multinomial takes V."""
    sums = chances.cumsum(-1)
    return torch.searchsorted(sums, at * sums[:, -1:], right=True)[:, 0].clamp(max=sums.shape[1] - 1)
