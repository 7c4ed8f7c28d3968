"""Choosing a kernel: the first that supports the problem, a named one, and errors that list every reason."""

import pytest
import torch

from crelle.errors import UnsupportedError
from crelle.kernels import registry
from crelle.kernels.base import Problem
from crelle.quantizers.scheme import parse

PROBLEM = Problem("bcq", 8, 64, 3, 32, "cpu", torch.float32)


class Fake:
    """A kernel that says what it is told to say."""

    def __init__(self, name: str, answer: str | None) -> None:
        self.name, self.answer = name, answer

    def supports(self, problem: Problem) -> str | None:
        return self.answer

    def prepare(self, w: object, dtype: torch.dtype) -> object:
        return w

    def run(self, x: torch.Tensor, prepared: object) -> torch.Tensor:
        return x


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = (Fake("first", "needs a moon"), Fake("second", None), Fake("third", None))
    monkeypatch.setattr(registry, "kernels", lambda: fakes)


@pytest.mark.usefixtures("three")
def test_first_supporting_kernel_wins() -> None:
    assert registry.select(PROBLEM).name == "second"


@pytest.mark.usefixtures("three")
def test_named_kernel_is_taken_though_another_is_preferred() -> None:
    assert registry.select(PROBLEM, "third").name == "third"


@pytest.mark.usefixtures("three")
def test_named_kernel_that_cannot_run_gives_its_reason_and_the_whole_problem() -> None:
    with pytest.raises(UnsupportedError, match=r"'first' cannot multiply bcq 8x64, 3 bits, group 32.*needs a moon"):
        registry.select(PROBLEM, "first")


@pytest.mark.usefixtures("three")
def test_unknown_kernel_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"no kernel 'fourth'.*first, second, third"):
        registry.select(PROBLEM, "fourth")


def test_when_none_supports_every_reason_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "kernels", lambda: (Fake("a", "needs a moon"), Fake("b", "needs two moons")))
    with pytest.raises(UnsupportedError, match=r"a needs a moon; b needs two moons"):
        registry.select(PROBLEM)


@pytest.mark.usefixtures("three")
def test_explain_gives_an_answer_for_every_kernel() -> None:
    assert registry.explain(PROBLEM) == [("first", "needs a moon"), ("second", None), ("third", None)]


@pytest.mark.parametrize("fmt", ["bcq", "uniform", "dense"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_real_kernels_leave_no_problem_without_an_answer(fmt: str, device: str) -> None:
    problem = Problem(fmt, 33, 71, 3, 71, device, torch.float16)
    chosen = registry.select(problem)
    assert chosen.supports(problem) is None
    for name, reason in registry.explain(problem):
        assert reason is None or reason.strip(), name


def test_explain_answers_for_the_kernels_it_is_given() -> None:
    assert registry.explain(PROBLEM, [Fake("mine", "needs a moon")]) == [("mine", "needs a moon")]


@pytest.mark.parametrize("scheme", ["rtn:bits=4,group=24", "bcq:bits=3,group=row", "bf16"])
def test_a_problem_says_all_about_its_weight(scheme: str) -> None:
    w = parse(scheme).fit(torch.randn(12, 48))
    problem = Problem.of(w, torch.float16)
    assert problem == Problem(w.format, 12, 48, w.bits, w.group, "cpu", torch.float16)
    for word in (w.format, "12x48", f"{w.bits} bits", f"group {w.group}", "float16", "cpu"):
        assert word in str(problem)


@pytest.mark.parametrize("fmt", ["bcq", "uniform", "dense"])
def test_every_kernel_can_be_insisted_on_where_it_says_it_can_run(fmt: str) -> None:
    problem = Problem(fmt, 32, 64, 4, 32, "cpu", torch.float32)
    for name, reason in registry.explain(problem):
        if reason is None:
            assert registry.select(problem, name).name == name
        else:
            with pytest.raises(UnsupportedError, match=name):
                registry.select(problem, name)
    assert len({name for name, _ in registry.explain(problem)}) == len(registry.kernels())
