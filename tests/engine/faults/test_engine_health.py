"""When the engine stops: a runner that fails every time, a CUDA context that is lost. Everybody hears of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_injection import AHEAD, REQUESTS, Asked, Fault, Told, ask, played_engine
from reference_single import assert_empty

from crelle import LLM, Sampling
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.engine import Engine
from crelle.engine.faults import FAILED_STEPS
from crelle.errors import CapacityError, CrelleError

TORCH = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`")
LOST = [
    (TORCH, "an illegal memory access was encountered"),
    (torch.AcceleratorError("CUDA error: unspecified launch failure"), "unspecified launch failure"),
    (CrelleError("gemm<4> of gemm.cu: CUDA_ERROR_LAUNCH_FAILED (in words)"), "CUDA_ERROR_LAUNCH_FAILED"),
]
ONE = Sampling(max_tokens=1)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


class Failing:
    """Makes the played runner of an engine raise what comes next in a list; None and after its end: a good step."""

    def __init__(self, engine: Engine, errors: list[BaseException | None], where: str = "run") -> None:
        self.errors = errors
        work = getattr(engine.runner, where)

        def sometimes(step: Any) -> Any:
            if self.errors and (error := self.errors.pop(0)) is not None:
                raise error
            return work(step)

        setattr(engine.runner, where, sometimes)


def one_token(engine: Engine) -> str:
    """Ask for one token, which takes one step; return how that ended."""
    handle = engine.add([1, 2, 3], ONE)
    engine.run()
    return handle.outputs[0].completion.finish_reason


def assert_stopped(engine: Engine, error: BaseException, reason: str) -> None:
    assert engine.stopped is error
    assert engine.stop_reason == reason
    with pytest.raises(CapacityError, match="the engine has stopped"):
        engine.add([1, 2, 3])
    assert not engine.step()
    assert_empty(engine)


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_a_runner_that_fails_every_time_stops_the_engine(llm: LLM, ahead: bool) -> None:
    engine = played_engine(llm, ahead=ahead)
    errors = [RuntimeError(f"fault {i}") for i in range(9)]
    Failing(engine, list(errors), "start" if ahead else "run")
    for _ in range(FAILED_STEPS - 1):
        assert one_token(engine) == "error"
        assert engine.stopped is None
    assert one_token(engine) == "error"
    assert_stopped(engine, errors[FAILED_STEPS - 1], "3 consecutive steps failed")


def test_tokens_that_never_arrive_count_as_failed_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, error = played_engine(llm, ahead=True), RuntimeError("the copy has failed")

    def lost(self: Told) -> list[int]:
        raise error

    monkeypatch.setattr(Told, "tokens", lost)
    for _ in range(FAILED_STEPS):
        assert engine.stopped is None
        assert one_token(engine) == "error"
    assert_stopped(engine, error, "3 consecutive steps failed")


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_a_good_step_between_failed_ones_starts_the_count_again(llm: LLM, ahead: bool) -> None:
    engine = played_engine(llm, ahead=ahead)
    fault, good = RuntimeError("now and then"), None
    Failing(engine, [fault, fault, good] * 5, "start" if ahead else "run")
    ends = [one_token(engine) for _ in range(16)]
    assert ends == ["error", "error", "length"] * 5 + ["length"]
    assert (engine.stopped, engine.stop_reason) == (None, None)


def test_the_users_own_interrupts_are_no_failed_steps(llm: LLM) -> None:
    engine = played_engine(llm)
    Failing(engine, [KeyboardInterrupt()] * FAILED_STEPS * 2)
    for _ in range(FAILED_STEPS * 2):
        engine.add([1, 2, 3], ONE)
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    engine.run()
    assert engine.stopped is None
    assert one_token(engine) == "length"


@pytest.mark.parametrize(("error", "name"), LOST, ids=[name for _, name in LOST])
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_a_lost_cuda_context_stops_the_engine_at_once(llm: LLM, error: Exception, name: str, ahead: bool) -> None:
    """Whoever runs, and whoever waits, gets one last event with the error."""
    engine, requests = played_engine(llm, ahead=ahead), AHEAD if ahead else REQUESTS
    everyone = [Asked(name) for name in requests]
    for asked in everyone:
        ask(engine.add, asked, requests, Fault(0, ValueError))
    Failing(engine, [None, None, error], "start" if ahead else "run")
    engine.run()
    for asked in everyone:
        assert asked.handle is not None
        assert len([e for e in asked.events if e.output is not None]) == asked.handle.request.n
    errors = {output.error for asked in everyone if asked.handle for output in asked.handle.outputs}
    assert errors - {None} == {error}
    assert_stopped(engine, error, f"the CUDA context is lost ({name})")


def test_a_context_that_is_lost_while_sampling_stops_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a kernel is seen by whoever reads its result first."""
    engine = played_engine(llm)

    def lost(*_: Any) -> int:
        raise TORCH

    monkeypatch.setattr("crelle.engine.requests.output.OutputState.take", lost)
    assert one_token(engine) == "error"
    assert_stopped(engine, TORCH, "the CUDA context is lost (an illegal memory access was encountered)")


def test_a_context_that_is_lost_before_a_request_is_queued_stops_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step would be due, and no request would ever be let in."""
    service = AsyncEngine(played_engine(llm))

    def lost(*_: Any) -> None:
        raise TORCH

    monkeypatch.setattr("crelle.engine.engine.Sampler", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        service.submit([1, 2, 3], ONE)
    service._thread.join(20)
    assert not service._thread.is_alive()
    assert service.error is TORCH
    assert service.stop_reason == "the CUDA context is lost (an illegal memory access was encountered)"
    service.close()


def test_errors_of_cuda_that_leave_the_context_count_as_failed_steps(llm: LLM) -> None:
    engine, error = played_engine(llm), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    Failing(engine, [error, None, RuntimeError("CUDA error: invalid configuration argument")])
    assert [one_token(engine) for _ in range(4)] == ["error", "length", "error", "length"]
    assert engine.stopped is None
