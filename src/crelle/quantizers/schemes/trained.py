"""Schemes that train what they have fitted, with a straight-through estimator.

    tune=none    as fitted
    tune=short   block by block: each layer against the full-precision one, when its matrices are fitted
    tune=full    then all of the model end to end against the full-precision model (crelle.quantize_job.run); with
                 train=scales codes stay as they are, which takes far less memory

Which matrices can be trained, and what of them, their formats say (crelle.quantizers.training.ste).
"""

from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor
from crelle.quantizers.calibration.calibrate import LayerCalibration
from crelle.quantizers.training.blockwise import Training, tune_block
from crelle.quantizers.training.incremental import IncrementalTrellis, begin_in_layer, encode_in_layer, events
from crelle.quantizers.training.ste import row_scaled, trainable, trainable_weight
from crelle.quantizers.training.ste_base import TrainableWeight

Tune = Literal["none", "short", "full"]
Train = Literal["all", "scales"]
_STEPS, _LENGTH = 3000, 1024  # of end-to-end training, by default, with sequences of so many tokens
_FEW = 128  # steps of a layer with which trellis codes only lose by being found anew (docs/notes/trellis.md)
_SMALL = 750_000_000  # weights up to which a model gets all of them


class TrainedConfig:
    """What a config with these settings does with a layer; its fields are the config's own."""

    __slots__ = ()
    tune: Tune
    steps: int  # of block-wise training, per layer
    rate: float  # learning rate, in steps of the grid; 0: 5e-3, and more where the grid is finer than 3 bits
    end: int  # steps of end-to-end training, with tune=full; -1: by the size of the model
    own: int  # sequences that the model itself generates for it; -1: by the size of the model
    train: Train  # what trains end to end: weights and scales, or scales alone, with the codes fixed
    seed: int

    @property
    def bits_for_rate(self) -> float:
        """Return the bits per weight that the learning rate goes by."""
        raise NotImplementedError

    def check_training(self) -> None:
        if self.steps < 0:
            raise SchemeError(f"steps must be at least 0, got {self.steps}")
        for name in ("end", "own"):
            if (value := getattr(self, name)) < -1:
                raise SchemeError(f"{name} must be at least 0, or -1 for the default, got {value}")

    def before_layer(self, layer: LayerCalibration) -> dict[str, Tensor]:
        return {}

    def after_layer(self, layer: LayerCalibration, fitted: dict[str, QuantTensor]) -> dict[str, QuantTensor]:
        """Train the layer together against the full-precision one: the matrices whose format trains its weights."""
        if self.tune == "none" or not self.steps:
            return fitted
        linears, sources = layer.block.linears(), layer.full.linears()
        found = {n: self._trainable(w, sources[n].weight) for n, w in fitted.items()}
        coders = {n: coder for n, coder in found.items() if coder is not None}
        for name, coder in coders.items():
            linears[name].coder = coder
        x, y, t = layer.hidden.quantized, layer.after, self.block_training()
        paths = {n: c for n, c in coders.items() if isinstance(c, IncrementalTrellis)}
        planned = events(t.steps, partial(_encode, layer, paths)) if paths else {}
        with torch.enable_grad():
            layer.losses = tune_block(layer.block, list(coders.values()), x, y, t, layer.device, planned)
        for name in coders:
            linears[name].coder = None
        return fitted | {n: c.export() for n, c in coders.items()}

    def _trainable(self, fitted: QuantTensor, source: Tensor) -> TrainableWeight | None:
        if self.steps < _FEW and row_scaled(fitted):
            return trainable(fitted, source, "scales")
        return trainable_weight(fitted, source)

    def block_training(self) -> Training:
        # The finer the grid, the smaller its steps relative to the weights, and the more of them a weight may move.
        rate = self.rate or 5e-3 * 2 ** max(0.0, round(self.bits_for_rate - 3.35, 6))
        return Training(steps=self.steps, batch=8, rate=rate, scale_rate=rate / 2, seed=self.seed)

    def end_to_end(self, weights: int, length: int) -> Training:
        """Return the hyperparameters with which `tune=full` trains a model with so many weights in its layers.

        By default 3000 steps, on 25 million tokens in sequences of `length` at most, and on fewer where the model is
        large: a token costs what it has of weights, and larger models lose less by quantization. EfficientQAT trains
        models of 7B to 70B end to end on 17 million.
        """
        batch, most = 8, _STEPS * _size_factor(weights)
        steps = max(1, round(most * min(1.0, _LENGTH / length))) if self.end < 0 else self.end
        return Training(steps=steps, batch=batch, rate=3e-3, scale_rate=1.5e-3, warmup=50, seed=self.seed)

    def own_sequences(self, weights: int) -> int:
        """Return how many sequences the model shall write for `tune=full`: `own`, or 2048 and fewer if it is large."""
        return max(1, round(2048 * _size_factor(weights) ** 2)) if self.own < 0 else self.own


def _encode(layer: LayerCalibration, coders: Mapping[str, IncrementalTrellis], share: float) -> None:
    """Begin with a share of the columns, or encode up to a share."""
    if all(int(c.encoded) == c.inputs for c in coders.values()):
        begin_in_layer(layer, coders, share)
    else:
        encode_in_layer(layer, coders, share)


def _size_factor(weights: int) -> float:
    return sqrt(min(1.0, _SMALL / weights))
