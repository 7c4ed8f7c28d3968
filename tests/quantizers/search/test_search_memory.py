"""Sensitivities within a memory budget: the same results, and no more memory than planned."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from crelle.errors import CapacityError
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.quantizers.base import BitConfig
from crelle.quantizers.search.gradient_stats import Measure, backward_stats
from crelle.quantizers.search.search_memory import SearchMemory, plan_device, plan_host, search_memory
from crelle.quantizers.search.sensitivity import Sensitivity, planning_rows, sensitivities

CPU = torch.device("cpu")
SETTINGS = (BitConfig(2, 32), BitConfig(3, 64), BitConfig(4, "row"))
LLAMA3_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
LLAMA3_70B = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)]
GB = 10**9


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> CalibrationModel:
    """A model with so many layers that their hidden states are most of what is held."""
    path = tmp_path_factory.mktemp("deep") / "m"
    return CalibrationModel(open_weights(write_tiny_model(path, num_hidden_layers=8)))


def text(rows: int, length: int) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def measured(
    model: CalibrationModel, memory: SearchMemory | int | None, measure: Measure = "fisher"
) -> list[Sensitivity]:
    return sensitivities(model, text(4, 24), SETTINGS, half=False, memory=memory, measure=measure)


@pytest.mark.parametrize("measure", ["fisher", "residual"])
@pytest.mark.parametrize(
    "memory",
    [
        SearchMemory(stride=2),
        SearchMemory(stride=5),
        SearchMemory(stride=8),
        SearchMemory(sums=1),  # every stage goes backward for itself
        SearchMemory(stride=4, sums=4 * 72 * 72 * 6),
    ],
)
@pytest.mark.sample(3)
def test_what_is_computed_again_is_the_same(deep: CalibrationModel, memory: SearchMemory, measure: Measure) -> None:
    assert measured(deep, memory, measure) == measured(deep, SearchMemory(), measure)


@pytest.mark.parametrize("memory", [SearchMemory(batch=1), SearchMemory(batch=6), SearchMemory(fits=1)])
def test_smaller_portions_change_no_more_than_rounding(deep: CalibrationModel, memory: SearchMemory) -> None:
    for one, other in zip(measured(deep, memory), measured(deep, SearchMemory()), strict=True):
        assert one.module == other.module
        assert one.losses == pytest.approx(other.losses, rel=0.05)  # a code at the middle of two levels may change


def test_bf16_hidden_states_change_little(deep: CalibrationModel) -> None:
    rounded = measured(deep, SearchMemory(states=torch.bfloat16))
    for one, other in zip(rounded, measured(deep, SearchMemory()), strict=True):
        assert one.losses == pytest.approx(other.losses, rel=0.5)  # few sampled tokens decide, of which some are others
    totals = [sum(one.losses[SETTINGS[0]] for one in found) for found in (rounded, measured(deep, SearchMemory()))]
    assert totals[0] == pytest.approx(totals[1], rel=0.1)  # some of the sampled next tokens are others


def test_passes_hold_no_more_sums_than_allowed(deep: CalibrationModel) -> None:
    block = deep.block(0)
    stages = [s for group in SearchMemory(sums=1).passes(block) for s in group]
    assert stages == list(block.stages())
    assert SearchMemory().passes(block) == [stages]
    assert [len(group) for group in SearchMemory(sums=1).passes(block)] == [1] * len(stages)
    two = 4 * 72 * 72 * (4 + 2)  # q, k, v and o with one more for each input
    assert len(SearchMemory(sums=two).passes(block)[0]) == 2
    assert len(SearchMemory(sums=two - 1).passes(block)[0]) == 1


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that tensors of a CPU held at one time during some work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    held, peak = 0, 0
    for _, change in sorted(events, key=lambda e: e[0]):
        held += change
        peak = max(peak, held)
    return peak


def passes(model: CalibrationModel, tokens: Tensor, memory: SearchMemory) -> None:
    for _, _, stats in backward_stats(model, tokens, memory=memory, half=False):
        for one in stats.values():
            one.take_weighted()


def test_a_budget_bounds_what_is_held(tmp_path: Path) -> None:
    """In a deep and narrow model hidden states are most of what is held."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 36, "intermediate_size": 50, "head_dim": 6}
    model, tokens = CalibrationModel(open_weights(write_tiny_model(tmp_path / "m", **sizes))), text(32, 8)
    free = SearchMemory(batch=8)
    unbounded = peak_bytes(lambda: passes(model, tokens, free))
    assert unbounded > 16 * 4 * tokens.numel() * 36
    budget = int(0.8 * unbounded)
    plan = search_memory(model, tokens, CPU, half=False, budget=budget)
    assert plan.stride > 1
    assert peak_bytes(lambda: passes(model, tokens, plan)) <= plan.device_bytes <= budget


def test_a_budget_that_is_too_small_is_a_sentence(deep: CalibrationModel) -> None:
    with pytest.raises(CapacityError, match="`memory`"):
        measured(deep, 10000)


@given(st.integers(1, 100), st.integers(1, 64), st.integers(8, 2048), st.integers(10**6, 10**11))
def test_plans_for_a_cpu_keep_their_budget(layers: int, S: int, T: int, budget: int) -> None:
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    try:
        plan = plan_host(shapes, 576, S, T, layers, budget)
    except CapacityError:
        assert budget < 10**10
        return
    assert plan.device_bytes <= budget
    assert 1 <= plan.stride <= layers
    assert 1 <= plan.batch <= S
    more = plan_host(shapes, 576, S, T, layers, 2 * budget)
    assert (more.sums is None) >= (plan.sums is None)
    if more.sums == plan.sums and more.batch == plan.batch:
        assert more.stride <= plan.stride


@pytest.mark.parametrize(
    ("shapes", "layers", "budget"),
    [(LLAMA3_8B, 32, 16), (LLAMA3_8B, 32, 40), (LLAMA3_70B, 80, 48), (LLAMA3_70B, 80, 60), (LLAMA3_70B, 80, 140)],
)
def test_plans_for_a_gpu_keep_their_budget(shapes: list[tuple[int, int]], layers: int, budget: int) -> None:
    width = shapes[0][1]
    plan = plan_device(shapes, 8, 2048, width, layers, budget=budget * GB, free=140 * GB)
    assert plan.device_bytes <= 0.9 * budget * GB
    states = 2 * 8 * 2048 * width * (layers + 3)
    assert plan.host_bytes == (0 if plan.states_on_device else states)
    assert plan.states_on_device or plan.device_bytes + states > 0.9 * budget * GB
    with pytest.raises(CapacityError, match="GPU memory"):
        plan_device(shapes, 8, 2048, width, layers, budget=4 * GB, free=140 * GB)


def test_tokens_follow_the_widest_matrix(deep: CalibrationModel) -> None:
    tokens = torch.zeros(64, 512, dtype=torch.long)
    assert len(planning_rows(deep, tokens)) == 8
    assert len(planning_rows(deep, tokens[:3])) == 3

    class Wide:
        def shapes(self) -> tuple[list[tuple[int, int]], int]:
            return LLAMA3_8B, 4096

    assert len(planning_rows(Wide(), tokens)) == 28  # type: ignore[arg-type]


@pytest.mark.gpu
def test_host_memory_gives_the_same_on_a_gpu(tiny_model: Path) -> None:
    device = torch.device("cuda")
    model = CalibrationModel(open_weights(tiny_model), device)
    memory = SearchMemory(states=torch.bfloat16)
    found = [
        sensitivities(model, text(6, 32), SETTINGS, device=device, memory=m)
        for m in (memory, replace(memory, states_on_device=False), replace(memory, sums=1))
    ]
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.losses == pytest.approx(other.losses, rel=1e-3)
