"""A mixture of experts larger than one GPU: how many experts of each layer fit, and how fast the rest can be streamed.

    bytes over PCIe = (1 - share of hits) x experts that a step reads x bytes of an expert
    step            = the step of plan.py, with only the hits among its experts
                    + bytes over PCIe / bandwidth of PCIe

The first line is exact, as the engine shares out memory (crelle.engine.memory.experts); the second is a prediction. The
share of hits depends on what is asked of the model: uses by chance hit what share of the experts fits, and real routing
prefers some experts, so that the same slots hit more often. `crelle serve` counts it (crelle_expert_hits_total).
"""

from dataclasses import dataclass, replace

from crelle.bench.planner.plan_shapes import PlannedShape
from crelle.bench.planner.step_model import BANDWIDTH, StepWork, milliseconds
from crelle.engine.memory.experts import reserved_bytes
from crelle.engine.memory.plan import show_bytes
from crelle.errors import SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.experts.host_memory import share_slots, staged_experts
from crelle.quantizers.base import Quantizer

PCIE = 40.0  # GB/s that kernels read from pinned host memory over PCIe 5 x16: 35 to 47 measured on an H200
_SHARES = (0.5, 0.75, 0.9)  # of hits, beside what chance hits
_F16 = 2  # bytes


@dataclass(frozen=True, slots=True)
class StreamedSpeed:
    """Decoding at a share of hits: a prediction."""

    share_of_hits: float
    gpu_bytes_per_step: float
    pcie_bytes_per_step: float
    milliseconds_per_step: float
    tokens_per_second: float  # of all sequences together


@dataclass(frozen=True, slots=True)
class Streamed:
    """Experts in host memory, some of them in slots of the GPU."""

    experts: int  # of a layer
    fewest_slots: int  # experts of a layer that fit the GPU
    most_slots: int
    expert_bytes: int
    slot_bytes: int  # of all layers together
    staging_bytes: int  # through which prompts read experts
    host_bytes: int  # of experts in pinned host memory
    pcie_gb_per_s: float
    why_not: str | None
    by_chance: float  # share of hits where all experts are taken as often
    speeds: tuple[StreamedSpeed, ...]  # the first: at the share that was asked for, else by chance


def streamed(
    shape: PlannedShape,
    scheme: Quantizer,
    kv: KVFormat,
    work: StepWork,
    *,
    memory: int,
    batch: int,
    hits: float | None = None,
    pcie: float = PCIE,
    bandwidth: float = BANDWIDTH,
) -> Streamed | None:
    """Share out one GPU's memory with experts in host memory; None for models without experts.

    work: what a step does where all experts are on the GPU, for `batch` sequences.
    """
    spec, experts = shape.spec, shape.experts
    if experts is None:
        return None
    if not 0 < pcie < float("inf"):
        raise SchemeError(f"the bandwidth of PCIe is a positive number of GB/s, not {pcie:g}")
    if hits is not None and not 0 <= hits <= 1:
        raise SchemeError(f"a share of hits is between 0 and 1, not {hits:g}")
    layers = [layer.mlp.experts.count for layer in spec.layers if layer.mlp.experts is not None]
    inside = shape.stored_bytes(scheme, expert=True)
    size = inside // sum(layers)
    outside = shape.stored_bytes(scheme, expert=False) + _F16 * shape.outside
    staging = 2 * staged_experts(experts.count, size) * size
    left = memory - reserved_bytes(spec, kv, memory) - outside - staging
    slots = share_slots(max(0, left), [(n, size) for n in layers])
    share = sum(slots) / sum(layers)
    why = None
    if left < 0:
        why = (
            f"the weights outside the experts take {show_bytes(outside)}, the buffer for streaming "
            f"{show_bytes(staging)}, working space and cache {show_bytes(reserved_bytes(spec, kv, memory))}, and there "
            f"are {show_bytes(memory)}"
        )
    found = list[StreamedSpeed]()
    for h in [share if hits is None else hits, *(x for x in _SHARES if hits is None and x > share)]:
        dense, chosen = work.products
        missed = (1 - h) * chosen.bytes  # each expert once
        on_gpu = replace(work, products=(dense, replace(chosen, bytes=h * chosen.bytes)))
        ms = milliseconds(on_gpu) * BANDWIDTH / bandwidth + missed / pcie / 1e6
        found.append(StreamedSpeed(h, dense.bytes + h * chosen.bytes, missed, ms, 1e3 * batch / ms))
    return Streamed(
        experts=experts.count,
        fewest_slots=min(slots),
        most_slots=max(slots),
        expert_bytes=size,
        slot_bytes=sum(slots) * size,
        staging_bytes=staging,
        host_bytes=inside,
        pcie_gb_per_s=pcie,
        why_not=why,
        by_chance=share,
        speeds=tuple(found) if why is None else (),
    )
