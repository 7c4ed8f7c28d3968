"""Runs calibration batches through the numbered layers ("blocks") of any transformers model, one block at a time.

One pass over the batches records what each block is called with. Where a block's first argument is what the block
before returned, its inputs are made by running that block alone; where not, by running the model up to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = Mapping[str, Any]  # what a model is called with


class Call(NamedTuple):
    """One call of a module; of a block that follows another, `args` lack the first one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SeenError(Exception):
    """Raised once a module was called: the rest of the model need not run."""


class BlockInputs:
    """The inputs of blocks, called for in the order in which the model runs them."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], batches: Sequence[Batch]) -> None:
        self.model, self.batches = model, batches
        self._calls: dict[str, list[Call]] = {name: [] for name in blocks}
        self._follows: set[str] = set()
        self._before: tuple[str, list[Call]] | None = None
        for batch in batches:
            self._record(batch)
        self.order = [name for name, calls in self._calls.items() if calls]

    def _record(self, batch: Batch) -> None:
        last: list[Any] = [None]

        def before(name: str) -> Callable[..., None]:
            def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if args and last[0] is not None and args[0] is last[0]:
                    self._follows.add(name)
                    args = args[1:]
                else:
                    args = ()  # the model has to run anyway
                self._calls[name].append(Call(args, kwargs))

            return see

        def after(_: nn.Module, __: Any, out: Any) -> None:
            last[0] = out[0] if isinstance(out, tuple) else out

        with _hooks() as hooks, torch.no_grad():
            for name in self._calls:
                module = self.model.get_submodule(name)
                hooks += [module.register_forward_pre_hook(before(name), with_kwargs=True)]
                hooks += [module.register_forward_hook(after)]
            self.model(**batch)

    @torch.no_grad()
    def of(self, name: str) -> list[Call]:
        """Return what a block, or the model where the name is empty, is called with, as the model is now."""
        if not name:
            return [Call((), dict(batch)) for batch in self.batches]
        index = self.order.index(name)
        chained = self._before is not None and index and self._before[0] == self.order[index - 1]
        if name in self._follows and chained and self._before is not None:
            module = self.model.get_submodule(self._before[0])
            made = []
            for one, recorded in zip(self._before[1], self._calls[name], strict=True):
                out = module(*one.args, **one.kwargs)
                made.append(Call((out[0] if isinstance(out, tuple) else out, *recorded.args), recorded.kwargs))
        else:
            made = [one for batch in self.batches for one in calls_of(self.model, name, Call((), dict(batch)))]
        self._before = name, made
        return made


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    held: list[Any] = []
    try:
        yield held
    finally:
        for hook in held:
            hook.remove()


@torch.no_grad()
def calls_of(outer: nn.Module, name: str, call: Call) -> list[Call]:
    """Call a module and return how it called one inside; it stops there."""
    seen: list[Call] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call(args, kwargs))
        raise SeenError

    with _hooks() as hooks:
        hooks += [outer.get_submodule(name).register_forward_pre_hook(see, with_kwargs=True)]
        with suppress(SeenError):
            outer(*call.args, **call.kwargs)
    return seen


@torch.no_grad()
def stages(outer: nn.Module, names: Sequence[str], call: Call) -> list[tuple[str, ...]]:
    """Return the linears in the order in which they run, those that read the same tensor together."""
    read: dict[str, Tensor] = {}  # holds the tensors: the memory of one is no other's meanwhile

    def see_as(name: str) -> Callable[..., None]:
        def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            read.setdefault(name, args[0])

        return see

    with _hooks() as hooks:
        hooks += [outer.get_submodule(name).register_forward_pre_hook(see_as(name)) for name in names]
        outer(*call.args, **call.kwargs)
    by_input: dict[tuple[Any, ...], list[str]] = {}
    for name, x in read.items():
        by_input.setdefault((x.data_ptr(), x.shape, x.stride()), []).append(name)
    return [tuple(stage) for stage in by_input.values()]
