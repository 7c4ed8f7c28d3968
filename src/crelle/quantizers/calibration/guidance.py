"""End-loss guidance: how much the loss of the whole model depends on what each linear returns for each token.

    s_t = mean over outputs n of (∂loss/∂z_tn)²        z = W x, the outputs of one linear for token t

With these weights a Hessian X̂ᵀ Diag(s) X̂ measures a change of W by what it does to the loss, and not by the error of
the layer's output (GuidedQuant, arXiv 2505.07004). The loss is that of next tokens sampled from the model's own
distribution: the expectation of s is then the Fisher information. One pass over the calibration sequences gives s for
all linears of the full-precision model, before its first layer is quantized.

    time     about four forward passes, in proportion to tokens and weights (crelle.quantizers.calibration.loss_passes);
             the source is read twice for every part of the sequences
    memory   one layer, one batch inside it, and hidden states [part, T, width] before every layer. A part is as many
             sequences as the budget has room for: the gradient of one does not depend on the others. What is left are
             two bytes for each token and linear: 0.12 GB for Llama-3-8B with 128 sequences of 2048 tokens

Experts share what the linears of their layer that have the same name get: one of them reads few tokens, and the
quantized model may route others to it. A token that none of them reads has the mean weight.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from crelle.errors import CapacityError, FormatError
from crelle.formats.storage.io import ShardReader, write_whole
from crelle.quantizers.calibration.layer_api import Block, CalibrationModel
from crelle.quantizers.calibration.loss_passes import LossPasses, Place, wake_backward
from crelle.quantizers.ranks import world
from crelle.quantizers.stage_times import GUIDANCE, GUIDANCE_HEAD, timed

_TOKENS = 2048  # of a batch
_LOGITS = 1 << 29  # bytes of logits and their softmax
_SPARE = 0.9  # of a budget on a GPU: the rest is for what allocators lose between blocks
_HOST = 1 << 32  # bytes of hidden states on a CPU, where there is no budget
_LEAST = 1e-8  # of the mean weight: no token is without any
_EXPERT = re.compile(r"\.\d+(?=\.[^.]+$)")  # in the name of an expert's linear: its number


@dataclass(frozen=True, slots=True)
class GuidanceMemory:
    """Where things are, and the bytes that are expected."""

    part: int  # sequences that go forward and backward together
    batch: int  # of them, inside a layer
    states: torch.dtype = torch.float32
    states_on_device: bool = True
    stride: int = 1
    logits: int = _LOGITS
    device_bytes: int = 0

    def tokens_of_logits(self, V: int) -> int:
        return max(1, min(1024, self.logits // (16 * V)))


def guidance_memory(
    model: CalibrationModel,
    tokens: Tensor,
    device: torch.device,
    *,
    half: bool = True,
    budget: int | None = None,
    held: int = 0,
) -> GuidanceMemory:
    """Plan the memory of one pass over sequences [S, T].

    `budget`: bytes, default: all of a GPU; `held`: of them, bytes that calibration has taken already.
    """
    shapes, width = model.shapes()
    S, T = tokens.shape
    if device.type != "cuda":
        return plan_guidance(shapes, S, T, width, model.layers, budget=None if budget is None else budget - held)
    total = torch.cuda.mem_get_info(device)[1]
    room = int(_SPARE * min(budget or total, total)) - held
    return plan_guidance(shapes, S, T, width, model.layers, budget=room, half=half)


def plan_guidance(
    shapes: Sequence[tuple[int, int]],
    S: int,
    T: int,
    width: int,
    layers: int,
    *,
    budget: int | None,
    half: bool = False,  # hidden states and products in bf16
) -> GuidanceMemory:
    """Plan for a model of `layers` layers with linears of shapes (N, K), within `budget` bytes."""
    size = 2 if half else 4
    weights = (6 if half else 4) * sum(N * K for N, K in shapes)
    sequence = T * (size * 3 * sum(N + K for N, K in shapes) + 4 * 6 * width + 8 * max(N for N, _ in shapes))
    states = (layers + 3) * size * T * width  # before every layer, of the one at work, and the gradients
    batch = max(1, min(S, _TOKENS // T))
    limit = weights + batch * sequence + _HOST if budget is None else budget
    while batch > 1 and weights + batch * (sequence + states) > limit:
        batch //= 2
    least = weights + batch * sequence + states
    if budget is not None and least > budget:
        raise CapacityError(
            f"end-loss guidance needs about {least / 1e9:.3g} GB, but calibration leaves {max(0, budget) / 1e9:.3g} GB "
            "of the limit; allow more with `memory`, use shorter or fewer sequences (`length`, `rows`), or guidance=0"
        )
    part = max(1, min(S, (limit - weights - batch * sequence) // states))
    return GuidanceMemory(
        part,
        batch,
        torch.bfloat16 if half else torch.float32,
        logits=_LOGITS if budget is None else min(_LOGITS, budget // 8),
        device_bytes=weights + batch * sequence + part * states,
    )


@dataclass(frozen=True, slots=True)
class Guidance:
    """s of all tokens for each stage: the mean of its linears', each of mean 1."""

    stages: Mapping[str, Tensor]  # bf16 [S, T] by a stage's first linear; experts' by its name without their number

    def weights(self, first: str, strength: float) -> Tensor:
        """Return the weights f32 [S, T], mean 1, of the tokens in the stage whose first linear this is."""
        found = self.stages[first if first in self.stages else _shared(first)].float()
        weight = found.to(world().device) ** strength
        return weight / world().mean(weight)

    def save(self, path: Path) -> None:
        """Keep the weights for a run that goes on with this one; of several ranks the first writes what all have."""
        every = {name: world().gather(w.to(world().device)).cpu() for name, w in self.stages.items()}
        if world().first:
            write_whole(path, safetensors.torch.save(every))

    @classmethod
    def load(cls, path: Path, tokens: int) -> "Guidance":
        """Return this rank's part of what `save` kept for that many sequences of all ranks."""
        kept = ShardReader(path) if world().first else None
        names = world().value([] if kept is None else kept.names())
        found = {}
        for name in names:
            every = world().tensors({} if kept is None else {name: kept.read(name)})[name].cpu()
            if every.dim() != 2 or len(every) != tokens:
                raise FormatError(f"{path} is not of this run; `overwrite=True` starts over")
            found[name] = world().part(every)
        return cls(found)


def _shared(linear: str) -> str:
    return _EXPERT.sub("", linear)


class _Squares:
    """The mean squares of one linear's output gradients, for each token of a part; of experts, the sum of theirs."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.sums = torch.zeros(tokens, device=device)

    def add(self, x: Tensor, gradient: Tensor, place: Place) -> None:
        if not gradient.numel():
            return
        squares = gradient.float().flatten(0, -2).square().mean(-1)  # [tokens that it reads]
        here = self.sums[place.begin : place.begin + place.root.numel()]
        if place.rows is None:
            here += squares
        else:
            here.index_add_(0, place.rows, squares)


def guide(
    model: CalibrationModel,
    tokens: Tensor,
    memory: GuidanceMemory,
    *,
    seed: int = 0,
    half: bool = True,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,  # (done, total), after each layer forward or backward
) -> Guidance:
    """Return the weights of the tokens of sequences [S, T] in every linear; of several ranks, each of its own."""
    device = torch.device(device)
    # One number for each token of all ranks, on any device: what is sampled does not depend on how the work is split.
    every = torch.rand(sum(world().counts(len(tokens))), tokens.shape[1], generator=torch.Generator().manual_seed(seed))
    parts = list(zip(*(torch.split(t, memory.part) for t in (tokens, world().part(every))), strict=True))
    total, done = len(parts) * model.layers * 4, 0
    found: dict[str, list[Tensor]] = {}

    def tell(units: int) -> None:
        nonlocal done
        done += units
        if progress is not None:
            progress(done, total)

    with timed(GUIDANCE):
        for part, chances in parts:
            for stage, squares in _of_part(model, part, chances, memory, half, device, tell):
                found.setdefault(stage, []).append(squares.cpu())
        return Guidance({stage: _mean(torch.cat(s, 1)).reshape(tokens.shape) for stage, s in found.items()})


def _of_part(
    model: CalibrationModel,
    tokens: Tensor,
    chances: Tensor,
    memory: GuidanceMemory,
    half: bool,
    device: torch.device,
    tell: Callable[[int], None],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the squares [linears, tokens] by the first linear of a stage, last layer first."""
    run = LossPasses(model, tokens, memory, half, device)
    with torch.no_grad():
        x = run.forward(lambda _: tell(1))
    wake_backward(device)
    with timed(GUIDANCE_HEAD):
        pull = run.loss_gradient(x, chances.reshape(-1, 1).to(device))
    after = x
    for i in reversed(range(model.layers)):
        x = run.before(i)
        block = run.block(i, ahead=i - 1)
        stages = _stages(block)
        sinks = {name: _Squares(tokens.numel(), device) for names in stages.values() for name in set(names.values())}
        by_linear = {n: sinks[name] for names in stages.values() for n, name in names.items()}
        below = run.backward(block, x, pull, after, by_linear, wanted=i > 0)
        for first, names in stages.items():
            yield first, torch.stack([sinks[name].sums for name in dict.fromkeys(names.values())])
        tell(3)
        if below is not None:
            pull, after = below, x


def _stages(block: Block) -> dict[str, dict[str, str]]:
    """Return by stage which linears it has, each with the name of what collects for it: experts share one."""
    count = Counter(map(_shared, block.linears()))
    found: dict[str, dict[str, str]] = {}
    for stage in block.stages():
        names = {n: _shared(n) if count[_shared(n)] > 1 else n for n in stage}
        found.setdefault(names[stage[0]], {}).update(names)
    return found


def _mean(squares: Tensor) -> Tensor:
    """Return the mean bf16 [tokens] of linears' squares [linears, tokens], each of them divided by its own mean."""
    total = torch.zeros_like(squares[0])
    for one in squares:
        seen = one > 0
        share = float(world().mean(seen.float().to(world().device)))
        mean = float(world().mean(one.to(world().device))) / max(share, 1e-12)
        total += torch.where(seen, one / max(mean, 1e-38), 1.0) / len(squares)
    return total.clamp(min=_LEAST).bfloat16()
