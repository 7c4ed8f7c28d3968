"""Lets a model compute with quantized matrices before it is changed, and changes it as a whole or not at all.

Calibration needs the outputs of what is quantized so far. A `StandIn` puts the dequantized values into a module for the
time of a call only, so that an interruption at any moment leaves nothing to be repaired but what `remove` gives back.
Only the values of the block at work are kept between calls: the model is never in memory twice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from crelle.formats.base import QuantTensor, input_rounding


class StandIn:
    """Hooks with which a module multiplies by quantized matrices; its own weight is back after each call."""

    def __init__(self, module: Any, matrices: Sequence[QuantTensor]) -> None:
        self.module, self.matrices = module, matrices
        self._own: Tensor = module.weight.data
        self._rounds = input_rounding(matrices[0])
        self._keeps = False
        self._values: Tensor | None = None
        self._hooks: list[Any] = []

    def start(self) -> None:
        """From now on the module computes with the quantized matrices, until `remove`."""
        self._hooks += [self.module.register_forward_pre_hook(self._enter)]
        self._hooks += [self.module.register_forward_hook(self._leave, always_call=True)]

    def keep(self, wanted: bool) -> None:
        """Keep the dequantized values from one call to the next, or not (any more)."""
        self._keeps = wanted
        if not wanted:
            self._values = None

    def remove(self) -> None:
        """Leave the module as it was."""
        for hook in self._hooks:
            hook.remove()
        self.module.weight.data = self._own

    def _enter(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values = self._dequantized() if self._values is None else self._values
        self._values = values if self._keeps else None
        module.weight.data = values
        return args if self._rounds is None else (self._rounds(args[0]), *args[1:])

    def _leave(self, module: Any, _: Any, __: Any) -> None:
        module.weight.data = self._own

    def _dequantized(self) -> Tensor:
        values = torch.cat([w.dequantize(torch.float32) for w in self.matrices])
        return (values.T if isinstance(self.module, Conv1D) else values).to(self._own)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Undo what was done to the modules of a model if it does not come to its end. Values of tensors are not copied."""
    saved = [(m, type(m), dict(m.__dict__), _dicts(m)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes, dicts in saved:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for own, entries in dicts:  # the same dicts: handles of hooks refer to them
                own.clear()
                own.update(entries)
        raise


def _dicts(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Return the dicts of a module (parameters, children, hooks, tied names), each with a copy."""
    return [(value, dict(value)) for value in module.__dict__.values() if isinstance(value, dict)]
