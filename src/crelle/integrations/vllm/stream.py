"""What a checkpoint's tensors need on their way into vLLM's models, besides their names.

matrices that no layer asked for    vLLM builds some layers without a quantization method (embeddings of OPT and
Gemma 2, routers of experts): those get their matrix dequantized
norms                               Gemma's multiply by 1 + weight; a Crelle checkpoint has the 1 added already
("norm_weight_offset": 0 in its config), so it is taken off again
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from vllm.model_executor.models.utils import WeightsMapper

from crelle.formats.base import Spec, shape_of
from crelle.integrations.vllm.arrival import Arrival, Share

Named = Iterable[tuple[str, Tensor]]


@dataclass
class CheckpointMapper(WeightsMapper):
    """vLLM combines the mapper of a quantization config with the model's own (`|`); this one stays what it is."""

    plain: dict[str, Spec] | None = None  # matrices that no layer asked for, by their name in the checkpoint
    bits: int | None = None
    norm_offset: float = 0.0  # to be taken off the weights of norms

    def __ror__(self, other: WeightsMapper) -> "CheckpointMapper":
        """Combine, model's names first. Python asks here first, because this is a subclass of the other's type."""
        both = WeightsMapper.__or__(other, self)
        named = {f.name: getattr(both, f.name) for f in fields(WeightsMapper)}
        return CheckpointMapper(**named, plain=self.plain, bits=self.bits, norm_offset=self.norm_offset)

    def __or__(self, other: WeightsMapper) -> "CheckpointMapper":
        both = WeightsMapper.__or__(self, other)
        named = {f.name: getattr(both, f.name) for f in fields(WeightsMapper)}
        return CheckpointMapper(**named, plain=self.plain, bits=self.bits, norm_offset=self.norm_offset)

    def apply(self, weights: Named) -> Named:
        return super().apply(self._without_offset(self._dequantized(weights)))  # type: ignore[no-any-return]

    def _dequantized(self, weights: Named) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, Arrival] = {}
        for name, tensor in weights:
            module, _, part = name.rpartition(".")
            if (spec := (self.plain or {}).get(module)) is None or name.endswith(".bias"):
                yield name, tensor
                continue
            if module not in waiting:
                N, K = shape_of(spec)
                waiting[module] = Arrival(module, spec, [Share(slice(0, N), slice(0, K))], self.bits)
            waiting[module].put(part, tensor)
            if found := waiting[module].weights:
                yield f"{module}.weight", found[0].dequantize()
                del waiting[module]
        for arrival in waiting.values():
            arrival.require()

    def _without_offset(self, weights: Named) -> Iterator[tuple[str, Tensor]]:
        """Models within models apply their mappers too: a tensor remembers that it has been here."""
        for name, tensor in weights:
            if self.norm_offset and tensor.dim() == 1 and name.endswith("norm.weight") and not _seen(tensor):
                tensor = tensor.float() - self.norm_offset
                tensor.crelle_without_offset = True  # type: ignore[attr-defined]
            yield name, tensor


def _seen(tensor: Any) -> bool:
    return getattr(tensor, "crelle_without_offset", False)
