"""Graph capture: warmed up once, reset, then recorded; a replay runs what was recorded."""

import pytest
import torch

from crelle.kernels.cuda.step.graphs import capture

pytestmark = pytest.mark.gpu


def test_a_captured_step_replays() -> None:
    x, counter = torch.ones(4, device="cuda"), torch.zeros(1, device="cuda")
    seen: list[float] = []

    def step() -> torch.Tensor:
        counter.add_(1)
        return x * 2

    graph, y = capture(step, reset=lambda: (seen.append(counter.item()), counter.zero_()))
    assert seen == [1]  # one warm-up
    assert counter.item() == 0  # recorded, not run
    x.fill_(3)
    graph.replay()
    graph.replay()
    assert counter.item() == 2
    assert torch.equal(y, torch.full_like(y, 6))


def test_graphs_may_share_their_memory_and_warm_up_with_less() -> None:
    x, ran = torch.ones(1 << 20, device="cuda"), list[str]()
    first, a = capture(lambda: x + 1)
    second, b = capture(lambda: x + 2, warmup=lambda: ran.append("warm"), pool=first.pool())
    assert ran == ["warm"]
    first.replay()
    assert a[0] == 2
    second.replay()
    assert b[0] == 3
