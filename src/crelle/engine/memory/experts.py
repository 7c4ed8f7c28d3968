"""What a mixture of experts gets of a GPU that is too small for all of it.

    limit = weights outside the experts + working space + cache + staging buffer + slots for experts

The cache gets CACHE_TOKENS tokens, or a whole context if that is less, but no more than CACHE_SHARE of the limit. What
is left are slots, the same share of the experts of every layer. All experts lie in pinned host memory
(crelle.kernels.cuda.experts.host_memory). A model that fits the limit is loaded as always.
"""

from typing import TYPE_CHECKING

import torch

from crelle.engine.memory.machine import free_memory, free_on_host
from crelle.engine.memory.plan import page_bytes_of, parse_bytes, show_bytes, working_bytes_of
from crelle.errors import CapacityError
from crelle.formats.kv.pages import KVFormat
from crelle.formats.storage.open import Weights
from crelle.kernels.cuda.experts.host_memory import ExpertOffload, offload_of
from crelle.kernels.spec import DecoderSpec
from crelle.models.loader import read_spec

if TYPE_CHECKING:
    from crelle.models.loader import Model

__all__ = ["expert_offload", "expert_uses", "offload_of", "reserved_bytes"]

CACHE_TOKENS = 8192
CACHE_SHARE = 0.125
GPU_SHARE = 0.9  # of the free memory, where no limit is given
_BATCH, _BUDGET = 32, 2048  # sequences and tokens of a step, for which working space is left
_LEFT = 0.1  # share of the free host memory that is not pinned
_ELEMENT = 2  # bytes of an activation


def expert_offload(
    weights: Weights, device: torch.device, memory: str | int | None, kv: KVFormat
) -> ExpertOffload | None:
    """Return what takes a model's experts that do not fit `memory`; None for models without experts, and on a CPU."""
    if device.type != "cuda":
        return None
    spec = read_spec(weights)
    if spec.encoder or not any(layer.mlp.experts for layer in spec.layers):
        return None
    free = free_memory(device)
    size = int(GPU_SHARE * free.size) if memory is None else parse_bytes(memory)
    if size > free.size:
        raise CapacityError(
            f"a memory limit of {show_bytes(size)} is more than the {show_bytes(free.size)} free {free.where}; lower "
            "`memory`"
        )
    of = f"{GPU_SHARE:.0%} of what is free {free.where}" if memory is None else "set by --memory"
    return ExpertOffload(
        size - reserved_bytes(spec, kv, size),
        device,
        fits=size - working_bytes_of(spec, 1, 512, _ELEMENT, kv.page) - page_bytes_of(spec, kv, _ELEMENT),
        host_free=lambda: int((1 - _LEFT) * free_on_host().size),
        reason=f"a limit of {show_bytes(size)}, {of}",
    )


def reserved_bytes(spec: DecoderSpec, kv: KVFormat, limit: int) -> int:
    """Return the bytes that working space and cache get before experts do."""
    pages, page = -(-min(spec.context, CACHE_TOKENS) // kv.page), page_bytes_of(spec, kv, _ELEMENT)
    working = working_bytes_of(spec, _BATCH, _BUDGET, _ELEMENT, pages * kv.page)
    return working + max(page, min(pages * page, int(CACHE_SHARE * limit)))


def expert_uses(model: "Model") -> tuple[int, int]:
    """Return how many experts tokens have taken, and how many of those were in slots; (0, 0) if none is streamed."""
    offload = offload_of(model)
    streams = None if offload is None else offload.streams
    return (0, 0) if streams is None else (streams.uses, streams.hits)
