"""Calibration: token sequences run through the model layer by layer, in full precision and quantized side by side.

A layer is quantized in stages (q k v, then o, then gate and up, then down). The stats of a stage are collected on the
inputs that reach it from everything quantized before, so later matrices compensate the error of earlier ones.

A token's weight in the sums is 1/|y_t|², y the residual stream after the layer: the next norm divides by it, and
without it a handful of tokens with huge activations would dominate. With end-loss guidance it is what the loss says of
the token (crelle.quantizers.calibration.guidance), for each stage. In memory: one layer (twice), both hidden states
[S, T, width], one K² Hessian; and where there is room, what each stage reads in the full-precision layer [S, T, K] and
what each linear of the quantized layer returns [S, T, N], which otherwise are computed again. On a GPU hidden states
are bf16, in host memory where they do not fit (crelle.quantizers.calibration.memory_plan), and Hessians are sums of
products of bf16 inputs (crelle.quantizers.calibration.half_stats); the next layer is read while this one is quantized.

An expert's stats are of the tokens that the quantized model routes to it. What the full-precision expert reads of them
is known where that model routes them there too; elsewhere it is taken to be the same. A batch without a token of an
expert adds nothing to its stats.

Of several ranks (crelle.quantizers.ranks) each runs its own sequences. Stats are those of all, the matrices of a stage
are dealt out, and what a rank has quantized goes to all others, so that they go on with the same layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor, input_rounding
from crelle.formats.kv.pages import KVFormat
from crelle.quantizers.calibration.guidance import Guidance
from crelle.quantizers.calibration.half_stats import HalfStatsCollector
from crelle.quantizers.calibration.hidden_states import Store, allocate, load
from crelle.quantizers.calibration.layer_api import Block, CalibrationModel, Tape, TrainableLinear, half_products
from crelle.quantizers.calibration.memory_plan import CalibrationMemory, plan_host_memory, plan_memory
from crelle.quantizers.calibration.stats import InputRounding, Stats, StatsCollector
from crelle.quantizers.ranks import deal, world
from crelle.quantizers.solvers.grouping import slabs_on_gpu
from crelle.quantizers.stage_times import FULL, HESSIAN, QUANTIZED, READ, timed

Fit = Callable[[str, Tensor, Stats], QuantTensor]  # (module, weight, stats of its input)
Rounding = Callable[[str, Stats], InputRounding | None]  # how a module's input is to be quantized, by its stats


class _SeenError(Exception):
    """Raised once a stage's input is known: the rest of the layer need not run."""


class _Input(NamedTuple):
    """What a linear reads of a batch."""

    x: Tensor  # [..., K]
    rows: Tensor | None  # which of the batch's tokens, in order; None: all


@dataclass(slots=True)
class HiddenStates:
    """Hidden states before a layer, [S, T, width]."""

    full: Tensor  # in the full-precision model
    quantized: Tensor  # in the model as quantized so far


def memory_for(
    model: CalibrationModel, tokens: Tensor, device: torch.device, *, half: bool = True, budget: int | None = None
) -> CalibrationMemory:
    """Plan the memory of calibrating a model on sequences [S, T]; `budget`: bytes, default: all of a GPU."""
    shapes, width = model.shapes()
    S, T = tokens.shape
    if device.type != "cuda" or not half:
        return CalibrationMemory() if budget is None else plan_host_memory(shapes, S, T, width, budget)
    free, total = torch.cuda.mem_get_info(device)
    return plan_memory(shapes, S, T, width, budget=min(budget or total, total), free=free)


class Calibrator:
    """Runs sequences through the model; `begin` (or `skip`) is called for each layer in turn."""

    def __init__(
        self,
        model: CalibrationModel,
        tokens: Tensor,
        *,
        device: torch.device | str = "cpu",
        batch: int | None = None,  # sequences; default: by the memory plan
        half: bool = True,  # bf16 products where the machine has them
        kv: KVFormat | None = None,  # the cache that the quantized model reads keys and values from
        memory: CalibrationMemory | None = None,  # default: what `memory_for` plans
    ) -> None:
        self.kv = kv if kv is not None and kv.coded else None
        self.model, self.device, self.half = model, torch.device(device), half
        self.memory = memory or memory_for(model, tokens, self.device, half=half)
        self.batch = batch or self.memory.batch
        self.next = 0
        self.guidance: Guidance | None = None  # of these sequences
        self.strength: Callable[[str], float] = lambda name: 0.0  # with which a linear's scheme asks for guidance
        parts = torch.split(tokens, self.batch)
        with torch.no_grad(), timed(READ):
            self._shape = len(tokens), tokens.shape[1], model.shapes()[1]
            full = self._room()
            with Store(full, self.device) as store:
                for part in parts:
                    store.put(model.embed(part.to(self.device)))
            self.hidden = HiddenStates(full, self._room().copy_(full))
        model.drop_tables()
        self._spare: Tensor | None = None  # hidden states that are no longer needed

    def _room(self) -> Tensor:
        return allocate(*self._shape, self.memory.states, self.device, on_device=self.memory.states_on_device)

    def take_room(self) -> Tensor:
        """Return room for hidden states: what earlier layers no longer need, or new."""
        found, self._spare = self._spare, None
        return self._room() if found is None else found

    def collector(self, K: int) -> StatsCollector:
        """Return a collector of stats in the accuracy of this device."""
        if self.half and self.memory.states == torch.bfloat16:
            return HalfStatsCollector(K, self.device)
        return StatsCollector(K, self.device, cross=True, half=self.half)

    def at(self, name: str) -> bool:
        """Tell whether a shard is the next layer."""
        return self.next < self.model.layers and name == self.model.layer_name(self.next)

    @torch.no_grad()
    def begin(self, stats: bool = True) -> "LayerCalibration":
        """Build the next layer and run the full-precision hidden states through it; stats: some will be asked for."""
        with timed(READ):
            full = self.model.block(self.next)
            if self.device.type == "cuda" and self.next + 1 < self.model.layers:
                self.model.read_ahead(self.next + 1)
            block = full.twin()
        if self.kv is not None:
            one = {"x": self.hidden.full[:1].to(self.device, torch.float32)}
            block.round_cache(self.kv, world().tensors(one)["x"])
        read: dict[str, list[_Input]] = {}
        if stats and self.memory.keep:
            read = {stage[0]: [] for stage in full.stages()}
        for name, inputs in read.items():
            linear = full.linears()[name]
            linear.watch = partial(_note, inputs, linear)
        after, weights = self.take_room(), []
        with timed(FULL), Store(after, self.device) as store:
            for x in self.batches(self.hidden.full):
                y = self.through(full, x)
                weights.append(y.float().square().mean(-1).clamp(min=1e-12).reciprocal_())  # [B, T]
                store.put(y)
        for name in read:
            full.linears()[name].watch = None
        return LayerCalibration(self, full, block, after, torch.cat(weights), read)

    @torch.no_grad()
    def skip(self, fitted: Mapping[str, QuantTensor], vectors: Mapping[str, Tensor] | None = None) -> None:
        """Run through a layer that an earlier run has already quantized."""
        layer = self.begin(stats=False)
        layer.put(fitted, vectors)
        layer.end()

    def batches(self, states: Tensor) -> Iterator[Tensor]:
        """Yield hidden states batch by batch, f32 on the device."""
        return load(states, self.batch, self.device)

    def through(self, block: Block, x: Tensor, tape: Tape | None = None) -> Tensor:
        """Run a batch through a layer."""
        with half_products(self.device, self.half), _on_tape(block, tape):
            return block(x)

    def moved_on(self, layer: "LayerCalibration") -> None:
        """Take the hidden states behind a layer for those before the next one."""
        self._spare, self.hidden.full = self.hidden.full, layer.after
        self.next += 1


class LayerCalibration:
    """Calibration of one layer: its full-precision and its quantized copy, and the hidden states before it."""

    def __init__(
        self,
        calibrator: Calibrator,
        full: Block,
        block: Block,
        after: Tensor,
        token_weight: Tensor,  # [S, T]
        read: Mapping[str, list[_Input]],
    ) -> None:
        self.full, self.block, self.after = full, block, after
        self._calibrator, self._read = calibrator, dict(read)
        self.losses: list[float] = []  # of block-wise training
        self.without_tokens: list[str] = []  # linears of experts that no token was routed to
        self.changed = False  # whether its weights are no longer those of the source, though it computes the same
        self._token_weight = (token_weight / world().mean(token_weight)).sqrt_()
        self._tapes: list[Tape] = []  # of the batches, while the stages are quantized one after the other

    @property
    def hidden(self) -> HiddenStates:
        return self._calibrator.hidden

    @property
    def device(self) -> torch.device:
        return self._calibrator.device

    @torch.no_grad()
    def fit(self, fit: Fit, rounding: Rounding | None = None) -> dict[str, QuantTensor]:
        """Quantize the layer stage by stage; the block is left with the quantized weights in it.

        Where `rounding` quantizes the input of a matrix, that matrix is fitted to the quantized input.
        """
        fitted: dict[str, QuantTensor] = {}
        if self._calibrator.memory.keep:
            self._tapes = [Tape() for _ in self._weights()]  # what stands before a stage no longer changes
        for stage in self.block.stages():
            weights = {name: self.full.linears()[name].weight for name in stage}
            stats = self.stats(stage[0])
            if not stats.tokens:
                self.without_tokens += stage
            by_rounding: dict[InputRounding, Stats] = {}
            if rounding is not None:
                stats = replace(stats, readers=torch.stack([w.T @ w for w in weights.values()]).sum(0))
            of_input: dict[str, Stats] = {}
            for name in stage:
                found = None if rounding is None else rounding(name, stats)
                if found is not None and found not in by_rounding:
                    by_rounding[found] = self.stats(stage[0], found)
                of_input[name] = stats if found is None else by_rounding[found]
            owners = deal({name: w.numel() for name, w in weights.items()}, world().size)
            mine: dict[str, QuantTensor] = {}
            with slabs_on_gpu(self._calibrator.memory.slab):
                for name in (n for n, owner in owners.items() if owner == world().rank):
                    mine[name] = fit(name, weights[name], of_input[name])
            here = world().matrices(mine, owners)
            self._set(here)
            if any(self.block.linears()[name].activation is not None for name in here):
                for tape in self._tapes:  # a norm that only linears read rounds its result to bf16, where CPUs
                    tape.forget_last()  # have such products; linears that quantize it themselves want it in f32
            fitted |= here
        return fitted

    @torch.no_grad()
    def stats(self, name: str, rounding: InputRounding | None = None) -> Stats:
        """Return the stats of the input of one linear, as the block stands now."""
        calibrator, hidden = self._calibrator, self.hidden
        collector = calibrator.collector(self.block.linears()[name].weight.shape[1])
        read = self._read.get(name)
        full_inputs = self._inputs(FULL, self.full, name, hidden.full) if read is None else iter(read)
        inputs = self._inputs(QUANTIZED, self.block, name, hidden.quantized, self._tapes)
        for weight, here, full in zip(self._weights(name), inputs, full_inputs, strict=True):
            x = here.x if rounding is None else rounding(here.x)
            x, x_full = x.flatten(0, -2), _of_same_tokens(full, here)
            weight = weight.flatten() if here.rows is None else weight.flatten()[here.rows]
            with timed(HESSIAN):
                collector.add(x, x_full, weight)
        with timed(HESSIAN):
            return replace(collector.stats(), rounding=rounding)

    def _inputs(
        self, kind: str, block: Block, name: str, states: Tensor, tapes: Sequence[Tape] = ()
    ) -> Iterator[_Input]:
        """Yield what one linear reads, batch by batch."""
        batches = self._calibrator.batches(states)
        for i in range(len(self._weights())):
            with timed(kind), half_products(self._calibrator.device, self._calibrator.half):
                found = _input(block, name, next(batches), tapes[i] if tapes else None)
            yield found

    def full_changed(self) -> None:
        """Forget what the full-precision layer's linears read: it has been changed."""
        self._read.clear()
        self.changed = True

    def _weights(self, name: str | None = None) -> Sequence[Tensor]:
        """Return the roots of the tokens' weights, by batch; `name`: of the linear whose stage has its own."""
        root, guidance = self._token_weight, self._calibrator.guidance
        if name is not None and guidance is not None:
            readers = next((stage for stage in self.block.stages() if name in stage), (name,))
            if (strength := max(map(self._calibrator.strength, readers))) > 0:
                root = guidance.weights(readers[0], strength).to(root.device).sqrt()
        return torch.split(root, self._calibrator.batch)

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
        with timed(QUANTIZED):
            for name, w in fitted.items():
                linear = self.block.linears()[name]
                linear.weight = w.to(self._calibrator.device).dequantize(torch.float32)
                linear.activation = input_rounding(w.to(self._calibrator.device))

    @torch.no_grad()
    def end(self) -> None:
        """Move both hidden states past the layer."""
        calibrator, states = self._calibrator, self.hidden.quantized
        with timed(QUANTIZED), Store(states, calibrator.device) as store:
            for i, x in enumerate(calibrator.batches(states)):
                store.put(calibrator.through(self.block, x, self._tapes[i] if self._tapes else None))
        calibrator.moved_on(self)


@contextmanager
def _on_tape(block: Block, tape: Tape | None) -> Iterator[None]:
    if tape is not None:
        tape.rewind()
    block.use_tape(tape)
    try:
        yield
    finally:
        block.use_tape(None)


def _note(inputs: list[_Input], linear: TrainableLinear, x: Tensor) -> None:
    inputs.append(_Input(x, linear.rows))


def _of_same_tokens(full: _Input, here: _Input) -> Tensor:
    """Return inputs [T, K] of the full-precision model for the tokens of `here`; where it has none, those of `here`."""
    x, x_full = here.x.flatten(0, -2), full.x.flatten(0, -2)
    if here.rows is None or full.rows is None:
        return x_full
    if not len(full.rows):
        return x
    at = torch.searchsorted(full.rows, here.rows).clamp(max=len(full.rows) - 1)
    return torch.where((full.rows[at] == here.rows)[:, None], x_full[at], x)


def _input(block: Block, name: str, x: Tensor, tape: Tape | None = None) -> _Input:
    """Run a block up to one of its linears and return what that linear would read."""
    seen: list[_Input] = []
    linear: TrainableLinear = block.linears()[name]

    def watch(value: Tensor) -> None:
        _note(seen, linear, value)
        raise _SeenError

    linear.watch = watch
    try:
        with _on_tape(block, tape):
            block(x)
    except _SeenError:
        pass
    finally:
        linear.watch = None
    return seen[0]
