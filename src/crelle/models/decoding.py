"""What all model families do alike around a step: caches, linears, and the graphs of the step on a GPU."""

from threading import RLock
from typing import Any, overload

import torch
from torch import Tensor, nn

from crelle.formats.kv import KVFormat
from crelle.models.cache import Cache, KVCache, PagedCache
from crelle.models.graphed import GraphedDecoder, graphed
from crelle.models.linear import QuantLinear


class Decoding(nn.Module):
    """A model; families add forward(), make_step(), step_lacks() and key_centers."""

    c: Any  # the family's config
    dtype: torch.dtype
    device: torch.device
    key_centers: Any  # per layer, what keys are stored relative to where a cache asks for it
    _graphed: GraphedDecoder | str | None = None  # or why there are none

    def __init__(self) -> None:
        super().__init__()
        self.lock = RLock()  # of what is made when it is first asked for, by whichever thread

    def graphed(self) -> GraphedDecoder | None:
        """Return the graphs of the step on a GPU, made when they are first asked for; None where there are none."""
        if self._graphed is None:
            with self.lock:
                if self._graphed is None:
                    self._graphed = graphed(self)  # type: ignore[arg-type]
        return self._graphed if isinstance(self._graphed, GraphedDecoder) else None

    @overload
    def new_cache(self, batch: int = 1) -> KVCache: ...
    @overload
    def new_cache(self, batch: int = 1, *, kv: KVFormat | str | int) -> Cache: ...

    def new_cache(self, batch: int = 1, *, kv: KVFormat | str | int = 16) -> Cache:
        """Return an empty cache for so many sequences; kv: 16 (numbers in the model's dtype), or pages of 8 or 4."""
        c, fmt = self.c, KVFormat.parse(kv)
        sizes = (c.layers, batch, c.kv_heads, c.head_size, c.context, self.dtype, self.device)
        if not fmt.coded:
            return KVCache(*sizes)
        centers: list[Tensor] | None = self.key_centers if fmt.center else None
        return PagedCache(fmt, *sizes, centers)

    def linears(self) -> list[QuantLinear]:
        """All linear layers, in the order in which they run."""
        return [m for m in self.modules() if isinstance(m, QuantLinear)]
