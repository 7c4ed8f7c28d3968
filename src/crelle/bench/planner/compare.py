"""One low-bit GPU next to several fp16 ones: the question of nuQmm's Table 5 and LUT-GEMM's Table 5, by our time model.

All rows are estimates (crelle.bench.planner.step_model); what GPUs send each other is assumed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crelle.bench.planner.cost import CostModel
from crelle.bench.planner.plan import plan
from crelle.bench.planner.plan_shapes import PlannedShape
from crelle.errors import CapacityError
from crelle.formats.kv.pages import KVFormat
from crelle.quantizers.base import Quantizer
from crelle.quantizers.scheme import parse

GPUS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Compared:
    """A scheme on some GPUs; times are None where it does not fit."""

    scheme: str
    gpus: int
    batch: int
    fits: bool
    bytes_per_gpu: int | None
    milliseconds_per_step: float | None
    tokens_per_second: float | None
    cost_per_million: float | None  # in the currency of the prices


def compare_gpus(
    shape: PlannedShape,
    scheme: Quantizer,
    kv: KVFormat,
    *,
    batch: int = 1,
    cost_of: Callable[[int], CostModel] | None = None,
    **options: Any,
) -> list[Compared]:
    """Return fp16 and the scheme on 1, 2, 4 and 8 GPUs each; `options` are those of `plan`."""
    rows = []
    for quantizer in dict.fromkeys((parse("fp16"), scheme)):
        for gpus in GPUS:
            cost = None if cost_of is None else cost_of(gpus)
            try:
                found = plan(shape, quantizer, kv, gpus=gpus, batch=batch, cost=cost, **options)
            except CapacityError:  # one layer is larger than a GPU
                rows.append(Compared(str(quantizer), gpus, batch, False, None, None, None, None))
                continue
            e = found.estimate
            times: tuple[float | None, float | None, float | None] = (None, None, None)
            if e is not None:
                total = None if e.cost is None else e.cost.total
                times = e.milliseconds_per_step, e.tokens_per_second, total
            rows.append(Compared(str(quantizer), gpus, batch, found.fits, found.bytes_per_gpu, *times))
    return rows
