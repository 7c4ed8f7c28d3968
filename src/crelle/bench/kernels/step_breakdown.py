"""Where the time of a decode step goes: the kernels of a captured graph, by kind, from CUDA's profiler.

    found = breakdown(graph.replay)       # StepBreakdown: attention, GEMMs, encoding, the rest, each kernel

Kernels overlap at their ends (PDL): the next one is resident and waits while the one before finishes. A moment counts
for the kernel that began first, so that the shares add up to the step; what belongs to none is `idle`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from crelle.errors import UnsupportedError

KINDS = {  # by the first pattern that a kernel's name has
    "attention": r"paged_attend|decode_attention|flash|fmha",
    "append": r"paged_append|paged_read",
    "encode": r"add_norm_pack|pack_x|permute_x|encode|trellis_rotate|crelle::apply",
    "routing": r"router_logits|crelle::route|sort_slots|combine|count_experts|passes_of_group",
    "gemm": r"gemm|gemv|expert_up|expert_down|cutlass|cublas|nvjet|xmma|splitK|mixed_decode|_dequant|lut",
}
MEANING = {
    "attention": "attention over the pages",
    "append": "rope and quantization of keys and values, into the pages",
    "encode": "residual add, norm or activation, and quantization or packing of x, in one launch",
    "gemm": "products, the head's too",
    "routing": "router, order of the slots, and sum of a mixture's experts",
    "rest": "embedding, copies, what no other kind has",
    "idle": "no kernel was running",
}
_REPLAYS, _TIMED = 3, 12


class Launch(NamedTuple):
    """A kernel that ran; microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel in a step."""

    name: str
    kind: str
    launches: int
    microseconds: float


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """One replay of a step's graph."""

    graph_ms: float  # replayed without the profiler
    profiled_ms: float  # under it: the sum of `milliseconds`
    launches: int
    milliseconds: dict[str, float]  # of each kind
    kernels: tuple[KernelTime, ...]  # the longest first

    def share(self, kind: str) -> float:
        """Return the share of the step that a kind takes."""
        return self.milliseconds.get(kind, 0.0) / self.profiled_ms

    def __str__(self) -> str:
        each = ", ".join(f"{kind} {ms:.2f} ms ({self.share(kind):.1%})" for kind, ms in self.milliseconds.items())
        return f"{self.graph_ms:.2f} ms, profiled {self.profiled_ms:.2f}, {self.launches} launches: {each}"


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "rest")


def short_name(name: str) -> str:
    """Return a kernel's name without types of parameters and namespaces."""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    name = re.sub(r"\([^()]*\)\s*$", "", name)  # parameters
    name = re.sub(r"\((?:int|bool|unsigned int|crelle::\w+)\)", "", name)  # casts of template arguments
    return re.sub(r"^void |\b(?:crelle|at::native|c10|at)::", "", name).strip()


def of_launches(launches: Sequence[Launch], graph_ms: float) -> StepBreakdown:
    """Share out the time from the first kernel's begin to the last one's end."""
    launches = sorted(launches, key=lambda launch: launch.begin)
    at, idle = launches[0].begin, 0.0
    names: dict[str, list[float]] = {}
    for name, begin, end in launches:
        idle += max(0.0, begin - at)
        names.setdefault(name, []).append(max(0.0, end - max(at, begin)))
        at = max(at, end)
    kernels = [KernelTime(short_name(name), kind_of(name), len(own), sum(own)) for name, own in names.items()]
    times = {kind: sum(k.microseconds for k in kernels if k.kind == kind) / 1e3 for kind in MEANING}
    times["idle"] = idle / 1e3
    ordered = tuple(sorted(kernels, key=lambda k: -k.microseconds))
    return StepBreakdown(graph_ms, (at - launches[0].begin) / 1e3, len(launches), times, ordered)


def breakdown(replay: Callable[[], object]) -> StepBreakdown:
    """Time a graph's replay, then profile some of them; the one of median length is shared out."""
    graph_ms = replay_ms(replay)
    each = [of_launches(launches, graph_ms) for launches in _profiled(replay)]
    return sorted(each, key=lambda found: found.profiled_ms)[len(each) // 2]


def replay_ms(replay: Callable[[], object]) -> float:
    """Return the median time of a replay on the device."""
    times = []
    for _ in range(_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return median(times[2:])


def _profiled(replay: Callable[[], object]) -> list[list[Launch]]:
    """Return the launches of each of _REPLAYS replays."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):  # the first use of CUPTI takes its time
        replay()
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_REPLAYS):
            replay()
            torch.cuda.synchronize()
    launches = sorted(map(_launch, filter(_on_gpu, found.events())), key=lambda launch: launch.begin)
    each, left = divmod(len(launches), _REPLAYS)
    if not each or left:
        raise UnsupportedError(
            f"the CUDA profiler saw {len(launches)} kernels in {_REPLAYS} replays of a graph, so the step cannot be "
            "shared out: it may be disabled on this machine"
        )
    return [launches[i * each : (i + 1) * each] for i in range(_REPLAYS)]


def _on_gpu(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def _launch(event: Any) -> Launch:
    return Launch(str(event.name), float(event.time_range.start), float(event.time_range.end))
