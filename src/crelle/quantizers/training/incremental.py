"""Training of trellis codes: columns are encoded a share at a time, and the weights after them train on in between.

    W = scale (Σ codes + w mask) H diag(signs)      mask: 1 for the columns that have no codes yet

A code can only be found by a search over 2^16 states, far too slow for every step, and a path of 128 weights has no
gradient. So a column is encoded once, by LDLQ with the Hessian of the inputs as they are then. Its error moves the
later columns to where the outputs change least; they train on from there and make up for what is left (incremental
network quantization, arXiv 1702.03044; QuIP# and QTIP train so between matrices). Scales train all the time. Rotated
columns train, since those are what codes stand for.

Latent weights are in units of the step of a uniform grid with the noise of the code, so that one rate fits all bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from crelle.formats.base import QuantTensor
from crelle.formats.trellis import COLUMNS, UNIT, TrellisTensor
from crelle.formats.wrappers.rotated import RotatedTensor
from crelle.quantizers.calibration.calibrate import LayerCalibration
from crelle.quantizers.calibration.layer_api import Block, TrainableLinear, half_products
from crelle.quantizers.calibration.stats import Stats, StatsCollector
from crelle.quantizers.ranks import world
from crelle.quantizers.schemes.trellis import Trellis
from crelle.quantizers.solvers.grouping import TINY
from crelle.quantizers.solvers.trellis_solver import (
    LEFT,
    SPREAD,
    BlockFactor,
    best_scales,
    compensated,
    encode_columns,
    first_scales,
)
from crelle.quantizers.training.ste_base import TrainableWeight, as_f16

# Share of the steps after which a share of the columns has codes. The last ones have few weights left that could make
# up for them, so the shares become smaller.
SCHEDULE = ((0.0, 0.5), (0.2, 0.75), (0.35, 0.875), (0.5, 0.9375), (0.6, 0.97), (0.7, 1.0))


class IncrementalTrellis(TrainableWeight):
    """A matrix in trellis codes up to column `encoded`, with trained weights after it."""

    rings: Tensor  # uint8 [row blocks, column blocks, bytes]; those of columns without codes mean nothing
    encoded: Tensor  # int64 []
    unit: Tensor  # f32 [N, 1]
    values: Tensor  # f32 [N, K]: what the codes stand for with scales of 1, the rotation undone
    mask: Tensor  # f32 [K]

    def __init__(self, start: TrellisTensor | RotatedTensor) -> None:
        """Begin with the codes of `start`, all of them."""
        super().__init__()
        inner = start.inner if isinstance(start, RotatedTensor) else start
        assert isinstance(inner, TrellisTensor)
        self.inputs = inner.K
        self.start, self.rotation = inner, start.rotation if isinstance(start, RotatedTensor) else None
        orders: Literal["two", "any"] = "two" if self.rotation is None or self.rotation.simple else "any"
        self.config = Trellis(inner.bits, inner.code.name, rotate=self.rotation is not None, hadamard=orders)  # type: ignore[arg-type]
        code, bits = inner.code, inner.bits
        self.step = (12 * LEFT[code.name][bits]) ** 0.5 * code.std * UNIT / SPREAD[code.name][bits]
        N, K = inner.shape
        scale = inner.scale.float().unsqueeze(1)
        self.register_buffer("unit", scale.clamp(min=TINY), persistent=False)
        self.register_buffer("rings", inner.codes.clone())
        self.register_buffer("encoded", torch.tensor(K))
        self.register_buffer("values", torch.zeros(N, K, device=inner.device), persistent=False)
        self.register_buffer("mask", torch.zeros(K, device=inner.device), persistent=False)
        self.w = nn.Parameter(self._decoded() / self.step)
        self.scale = nn.Parameter(torch.ones_like(self.unit))
        self._refresh()
        self.register_load_state_dict_post_hook(_refreshed)  # type: ignore[no-untyped-call]

    def forward(self) -> Tensor:
        free = self.w * (self.mask * self.step)
        return as_f16(self.scale * self.unit) * (self.values + self._undone(free))

    @torch.no_grad()
    def free(self, share: float, target: Tensor | None = None, by: BlockFactor | None = None) -> None:
        """Keep the codes of a share of the columns only, and train the others.

        They begin as the codes had them, or where the error to `target` [N, K] (inputs rotated) is least.
        """
        end = self._columns(share)
        decoded = self._decoded()
        if target is not None and by is not None:
            found = first_scales(target, self.start.code, self.start.bits)  # those of the search, not its least squares
            self.scale.copy_(found.unsqueeze(1) / self.unit)
            wanted = target / self._scale()
            decoded[:, end:] = compensated(wanted[:, end:], wanted[:, :end] - decoded[:, :end], by, end)
        self.w.copy_(decoded / self.step)
        self.encoded.fill_(end)
        self._refresh()

    @torch.no_grad()
    def encode(self, share: float, by: BlockFactor) -> None:
        """Find codes for the columns up to a share of all, for weights as they are now; later ones compensate them.

        With the last columns come the scales that are best for all codes.
        """
        begin, end = int(self.encoded), self._columns(share)
        if end <= begin:
            return
        rows = self.w * self.step
        found, rings = encode_columns(rows[:, begin:end], by.columns(begin, end), self.start.code, self.start.bits)
        self.rings[:, begin // COLUMNS : -(-end // COLUMNS)] = rings
        if end < self.inputs:
            self.w[:, end:] = compensated(rows[:, end:], rows[:, begin:end] - found, by, end) / self.step
        else:
            decoded = self._decoded()
            wanted = torch.cat([decoded[:, :begin], rows[:, begin:]], 1) * self._scale()
            best = best_scales(wanted, by.damped, decoded / UNIT, self._scale().squeeze(1))
            self.scale.copy_(best.float().unsqueeze(1) / self.unit)
        self.w[:, begin:end] = found / self.step
        self.encoded.fill_(end)
        self._refresh()

    @torch.no_grad()
    def share_found(self) -> None:
        """Take what the first rank has found."""
        if world().alone:
            return
        for name, t in (
            world().tensors({"rings": self.rings, "w": self.w.detach(), "scale": self.scale.detach()}).items()
        ):
            getattr(self, name).copy_(t)
        self._refresh()

    @torch.no_grad()
    def export(self) -> QuantTensor:
        if int(self.encoded) < self.inputs:
            raise RuntimeError(f"{self.inputs - int(self.encoded)} columns have no codes yet")
        scale = (self.scale * self.unit).squeeze(1).half()
        made = TrellisTensor(self.rings.clone(), scale, self.inputs, self.start.bits, self.start.code)
        return made if self.rotation is None else RotatedTensor(made, self.rotation.clone())

    def _columns(self, share: float) -> int:
        return self.inputs if share >= 1 else int(self.inputs * share) // COLUMNS * COLUMNS

    def _scale(self) -> Tensor:
        return (self.scale * self.unit).half().float()

    def _undone(self, w: Tensor) -> Tensor:
        return w if self.rotation is None else self.rotation.undone(w)

    def _decoded(self) -> Tensor:
        """Return what all codes stand for with scales of 1, [N, K]."""
        one = torch.ones_like(self.start.scale)
        return TrellisTensor(self.rings, one, self.start.K, self.start.bits, self.start.code).dequantize()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Compute from codes and their number what steps read; in place, as a CUDA graph has their addresses."""
        at = torch.arange(self.inputs, device=self.mask.device) >= int(self.encoded)
        self.mask.copy_(at)
        self.values.copy_(self._undone(self._decoded() * ~at))

    def to(self, *args: Any, **named: Any) -> "IncrementalTrellis":
        moved: IncrementalTrellis = super().to(*args, **named)
        if moved.rotation is not None:
            moved.rotation = moved.rotation.to(moved.mask.device)
        return moved


def _refreshed(module: IncrementalTrellis, _: object) -> None:
    """Compute what follows from a state that has been loaded."""
    module._refresh()


def events(
    steps: int, act: Callable[[float], None], schedule: Sequence[tuple[float, float]] = SCHEDULE
) -> dict[int, Callable[[], None]]:
    """Return what is done before which step of a training, by `act` with the share that is encoded from there on."""
    found = {min(round(part * steps), max(0, steps - 1)): share for part, share in schedule}
    return {step: partial(act, share) for step, share in found.items()}


def incremental(coders: Iterable[nn.Module]) -> list[IncrementalTrellis]:
    return [c for c in coders if isinstance(c, IncrementalTrellis)]


@torch.no_grad()
def begin_in_layer(layer: LayerCalibration, coders: Mapping[str, IncrementalTrellis], share: float) -> None:
    """Free all but a share of the columns in a layer, stage by stage, nearest to the full-precision outputs."""
    sources = layer.full.linears()

    def act(name: str, stats: Stats) -> None:
        target, by = coders[name].config.aim(sources[name].weight, stats)
        coders[name].free(share, target, by)

    _by_stages(layer, coders, act)


@torch.no_grad()
def encode_in_layer(layer: LayerCalibration, coders: Mapping[str, IncrementalTrellis], share: float) -> None:
    """Encode a layer's columns up to a share, stage by stage."""

    def act(name: str, stats: Stats) -> None:
        coders[name].encode(share, coders[name].config.blocks(stats))

    _by_stages(layer, coders, act)


def _by_stages(
    layer: LayerCalibration, coders: Mapping[str, IncrementalTrellis], act: Callable[[str, Stats], None]
) -> None:
    layer.put({})  # what stood before a stage may have changed
    linears = layer.block.linears()
    with _as_weights(linears):
        for stage in layer.block.stages():
            if not (mine := [name for name in stage if name in coders]):
                continue
            stats = layer.stats(stage[0])
            for name in mine:
                act(name, stats)
                coders[name].share_found()
                linears[name].weight = coders[name]()


@torch.no_grad()
def free_in_network(blocks: Sequence[Block], share: float) -> None:
    """Free all but a share of the columns in a whole model, which computes the same as before."""
    for block in blocks:
        for coder in _paths(block).values():
            coder.free(share)


@torch.no_grad()
def encode_in_network(blocks: Sequence[Block], states: Sequence[Tensor], share: float, half: bool) -> None:
    """Encode all layers' columns up to a share, by Hessians of the inputs that states [B, T, width] lead to."""
    for block in blocks:
        linears, paths = block.linears(), _paths(block)
        stages = {stage[0]: [name for name in stage if name in paths] for stage in block.stages()}
        stages = {first: names for first, names in stages.items() if names}
        device = states[0].device
        seen: dict[str, list[tuple[Tensor, Tensor | None]]] = {first: [] for first in stages}
        for first, inputs in seen.items():
            linears[first].watch = partial(_note, inputs, linears[first])
        collectors = {
            first: StatsCollector(paths[names[0]].inputs, device, half=half) for first, names in stages.items()
        }
        with _as_weights(linears), half_products(device, half):
            for x in states:
                y = block(x)
                weight = y.float().square().mean(-1).clamp(min=1e-12).rsqrt().flatten()  # as in calibration
                for first, inputs in seen.items():
                    for given, rows in inputs:
                        collectors[first].add(given, None, weight if rows is None else weight[rows])
                    inputs.clear()
        for first, names in stages.items():
            linears[first].watch = None
            stats = collectors[first].stats()
            for name in names:
                paths[name].encode(share, paths[name].config.blocks(stats))
                paths[name].share_found()
        with _as_weights(linears), half_products(device, half):
            states = [block(x) for x in states]


def _note(inputs: list[tuple[Tensor, Tensor | None]], linear: TrainableLinear, x: Tensor) -> None:
    inputs.append((x, linear.rows))


def _paths(block: Block) -> dict[str, IncrementalTrellis]:
    return {n: c.coder for n, c in block.linears().items() if isinstance(c.coder, IncrementalTrellis)}


@contextmanager
def _as_weights(linears: Mapping[str, TrainableLinear]) -> Iterator[None]:
    """Let linears multiply by the weights that their coders compute now: once, and by kernels without gradients."""
    kept = {name: (linear.coder, linear.weight) for name, linear in linears.items() if linear.coder is not None}
    for name, (coder, _) in kept.items():
        assert coder is not None
        linears[name].weight, linears[name].coder = coder(), None
    try:
        yield
    finally:
        for name, (coder, weight) in kept.items():
            linears[name].coder, linears[name].weight = coder, weight
