"""Calibration: token sequences run through the model layer by layer, in full precision and quantized side by side.

A layer is quantized in stages (q k v, then o, then gate and up, then down). The stats of a stage are collected on the
inputs that reach it from everything quantized before, so later matrices compensate the error of earlier ones.

A token's weight in the sums is 1/|y_t|², y the residual stream after the layer: the next norm divides by it, and
without it a handful of tokens with huge activations would dominate. In memory: one layer (twice), both hidden states
[S, T, width], what each stage reads in the full-precision layer [S, T, K], what each linear of the quantized layer
returns [S, T, N], one K² Hessian.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor, input_rounding
from crelle.formats.kv import KVFormat
from crelle.quantizers.layer_api import Block, CalibrationModel, Tape, TrainableLinear, half_products
from crelle.quantizers.stats import InputRounding, Stats, StatsCollector
from crelle.quantizers.training import relative_error

Fit = Callable[[str, Tensor, Stats], QuantTensor]  # (module, weight, stats of its input)
Rounding = Callable[[str, Stats], InputRounding | None]  # how a module's input is to be quantized, by its stats


class _SeenError(Exception):
    """Raised once a stage's input is known: the rest of the layer need not run."""


@dataclass(slots=True)
class HiddenStates:
    """Hidden states before a layer, [S, T, width]."""

    full: Tensor  # in the full-precision model
    quantized: Tensor  # in the model as quantized so far


class Calibrator:
    """Runs sequences through the model; `begin` (or `skip`) is called for each layer in turn."""

    def __init__(
        self,
        model: CalibrationModel,
        tokens: Tensor,
        *,
        device: torch.device | str = "cpu",
        batch: int = 8,
        half: bool = True,  # bf16 products where the machine has them
        kv: KVFormat | None = None,  # the cache that the quantized model reads keys and values from
    ) -> None:
        self.kv = kv if kv is not None and kv.coded else None
        self.model, self.device, self.batch, self.half = model, torch.device(device), batch, half
        with torch.no_grad():
            x = torch.cat([model.embed(t.to(self.device)) for t in torch.split(tokens, batch)])
        self.hidden = HiddenStates(x, x.clone())
        self.next = 0

    def at(self, name: str) -> bool:
        """Tell whether a shard is the next layer."""
        return self.next < self.model.layers and name == self.model.layer_name(self.next)

    @torch.no_grad()
    def begin(self, stats: bool = True) -> "LayerCalibration":
        """Build the next layer and run the full-precision hidden states through it; stats: some will be asked for."""
        full, block = self.model.block(self.next), self.model.block(self.next)
        if self.kv is not None:
            block.round_cache(self.kv, self.hidden.full)
        read: dict[str, list[Tensor]] = {stage[0]: [] for stage in full.stages()} if stats else {}
        for name, inputs in read.items():
            full.linears()[name].watch = inputs.append
        after = self._through(full, self.hidden.full)
        for name in read:
            full.linears()[name].watch = None
        return LayerCalibration(self, full, block, after, read)

    @torch.no_grad()
    def skip(self, fitted: Mapping[str, QuantTensor], vectors: Mapping[str, Tensor] | None = None) -> None:
        """Run through a layer that an earlier run has already quantized."""
        layer = self.begin(stats=False)
        layer.put(fitted, vectors)
        layer.end()

    def _through(self, block: Block, x: Tensor, tapes: Sequence[Tape] = ()) -> Tensor:
        after = []
        with half_products(self.device, self.half):
            for i, part in enumerate(torch.split(x, self.batch)):
                with _on_tape(block, tapes[i] if tapes else None):
                    after.append(block(part))
        return torch.cat(after)


class LayerCalibration:
    """Calibration of one layer: its full-precision and its quantized copy, and the hidden states before it."""

    def __init__(
        self, calibrator: Calibrator, full: Block, block: Block, after: Tensor, read: Mapping[str, list[Tensor]]
    ) -> None:
        self.full, self.block, self.after = full, block, after
        self._calibrator, self._read = calibrator, dict(read)
        self.losses: list[float] = []  # of block-wise training
        self.changed = False  # whether its weights are no longer those of the source, though it computes the same
        weight = after.square().mean(-1).clamp(min=1e-12).reciprocal_()  # [S, T]
        self._token_weight = (weight / weight.mean()).sqrt_()
        self._tapes: list[Tape] = []  # of the batches, while the stages are quantized one after the other

    @property
    def hidden(self) -> HiddenStates:
        return self._calibrator.hidden

    @torch.no_grad()
    def fit(self, fit: Fit, rounding: Rounding | None = None) -> dict[str, QuantTensor]:
        """Quantize the layer stage by stage; the block is left with the quantized weights in it.

        Where `rounding` quantizes the input of a matrix, that matrix is fitted to the quantized input.
        """
        fitted: dict[str, QuantTensor] = {}
        self._tapes = [Tape() for _ in self._batches()]  # what stands before a stage no longer changes
        for stage in self.block.stages():
            weights = {name: self.full.linears()[name].weight for name in stage}
            stats = self.stats(stage[0])
            by_rounding: dict[InputRounding, Stats] = {}
            if rounding is not None:
                stats = replace(stats, readers=torch.stack([w.T @ w for w in weights.values()]).sum(0))
            for name, weight in weights.items():
                found = None if rounding is None else rounding(name, stats)
                if found is not None and found not in by_rounding:
                    by_rounding[found] = self.stats(stage[0], found)
                fitted[name] = fit(name, weight, stats if found is None else by_rounding[found])
            self._set({name: fitted[name] for name in stage})
        return fitted

    @torch.no_grad()
    def stats(self, name: str, rounding: InputRounding | None = None) -> Stats:
        """Return the stats of the input of one linear, as the block stands now."""
        K = self.block.linears()[name].weight.shape[1]
        collector = StatsCollector(K, self._calibrator.device, cross=True, half=self._calibrator.half)
        read = self._read.get(name, [])
        known = len(read) * self._calibrator.batch >= len(self.hidden.full)  # not where an expert missed a batch
        for i, (weight, full, quantized) in enumerate(self._batches()):
            with half_products(self._calibrator.device, self._calibrator.half):
                x = _input(self.block, name, quantized, self._tapes[i] if self._tapes else None)
                x_full = read[i] if known else _input(self.full, name, full)
            x = x if rounding is None else rounding(x)
            collector.add(weight[..., None] * x, weight[..., None] * x_full)
        return replace(collector.stats(), rounding=rounding)

    def full_changed(self) -> None:
        """Forget what the full-precision layer's linears read: it has been changed."""
        self._read.clear()
        self.changed = True

    def _batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        size = self._calibrator.batch
        parts = (torch.split(t, size) for t in (self._token_weight, self.hidden.full, self.hidden.quantized))
        return zip(*parts, strict=True)

    @torch.no_grad()
    def put(self, fitted: Mapping[str, QuantTensor], vectors: Mapping[str, Tensor] | None = None) -> None:
        """Put quantized weights (and norms that a quantizer changed) into the block."""
        self._tapes = []
        self._set(fitted)
        linears = self.block.linears()
        here = self.block.vectors()
        for name, v in (vectors or {}).items():
            module, _, kind = name.rpartition(".")
            if name in here:
                here[name].copy_(v)
            elif kind == "bias" and module in linears:
                linears[module].bias = v.to(self._calibrator.device, torch.float32)

    def _set(self, fitted: Mapping[str, QuantTensor]) -> None:
        for name, w in fitted.items():
            linear = self.block.linears()[name]
            linear.weight = w.dequantize(torch.float32).to(self._calibrator.device)
            linear.activation = input_rounding(w.to(self._calibrator.device))

    @torch.no_grad()
    def end(self) -> float:
        """Move both hidden states past the layer; returns the relative error of the quantized ones."""
        self.hidden.quantized = self._calibrator._through(self.block, self.hidden.quantized, self._tapes)
        self.hidden.full = self.after
        self._calibrator.next += 1
        return float(relative_error(self.hidden.quantized, self.hidden.full))


@contextmanager
def _on_tape(block: Block, tape: Tape | None) -> Iterator[None]:
    if tape is not None:
        tape.rewind()
    block.use_tape(tape)
    try:
        yield
    finally:
        block.use_tape(None)


def _input(block: Block, name: str, x: Tensor, tape: Tape | None = None) -> Tensor:
    """Run a block up to one of its linears and return what that linear would read."""
    seen: list[Tensor] = []

    def watch(value: Tensor) -> None:
        seen.append(value)
        raise _SeenError

    linear: TrainableLinear = block.linears()[name]
    linear.watch = watch
    try:
        with _on_tape(block, tape):
            block(x)
    except _SeenError:
        pass
    finally:
        linear.watch = None
    return seen[0]
