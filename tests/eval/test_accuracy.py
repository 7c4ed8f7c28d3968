"""What rounding costs: the reference is compared with itself, every kernel and instruction set has its line."""

from pathlib import Path

import pytest

from crelle import LLM, quantize
from crelle.bench.kernels import gemv
from crelle.errors import SchemeError, UnsupportedError
from crelle.eval import accuracy
from crelle.eval.perplexity import perplexity
from crelle.kernels import cpu

TEXT = "The quick brown fox jumps over the lazy dog. " * 6
without_core = pytest.mark.skipif(cpu.available() is not None, reason=f"the C++ core {cpu.available()}")


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("accuracy") / "q"
    quantize(tiny_model, to, "rtn:bits=4,group=24")
    return to


def test_token_by_token_equals_whole_windows(tiny_model: Path) -> None:
    llm = LLM.load(tiny_model, device="cpu")
    whole, steps = (perplexity(llm, TEXT, context=40, stepwise=s) for s in (False, True))
    assert steps.perplexity == pytest.approx(whole.perplexity, rel=1e-5)
    assert (steps.tokens, steps.windows) == (whole.tokens, whole.windows)


@without_core
def test_every_kernel_is_measured_both_ways(quantized: Path) -> None:
    rows, left_out = accuracy.perplexities(quantized, TEXT, context=48, step_tokens=30)
    assert [r.kernel for r in rows[::2]] == list(accuracy.KERNELS)
    assert {r.read_as for r in rows} == {"prompt", "token by token"}
    assert not left_out
    assert [r.above_first for r in rows[:2]] == [0.0, 0.0]
    exact, int8 = (max(abs(r.above_first) for r in rows if r.kernel == k) for k in ("cpu", "cpu-int8"))
    assert exact < 1e-4
    assert exact < int8 < 0.1
    assert {r.context for r in rows if r.read_as == "token by token"} == {30}


def test_a_plain_model_is_measured_as_it_is(tiny_model: Path) -> None:
    rows, left_out = accuracy.perplexities(tiny_model, TEXT, context=48, step_tokens=30)
    assert [r.kernel for r in rows] == ["plain", "plain"]
    assert set(left_out) == set(accuracy.KERNELS)
    assert str(tiny_model) not in str(left_out)


def test_an_insisted_kernel_is_not_left_out(tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match="nothing to do"):
        accuracy.perplexities(tiny_model, TEXT, kernels=["cpu"], context=48)


def test_too_few_steps_are_a_sentence(tiny_model: Path) -> None:
    with pytest.raises(SchemeError, match="`step_tokens`"):
        accuracy.perplexities(tiny_model, TEXT, step_tokens=1)


@without_core
def test_products_of_every_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "BITS", (2, 4))
    monkeypatch.setattr(accuracy, "_K", 256)
    rows = accuracy.product_errors()
    isas = cpu.core().isas()
    assert [(r.isa, r.format, r.bits) for r in rows] == [
        (isa, form, bits) for isa in isas for form in ("bcq", "uniform") for bits in (2, 4)
    ]
    for r in rows:
        assert 0 < r.exact < gemv.TOLERANCE["exact"]
        assert r.exact < r.int8 < 2 * gemv.TOLERANCE["int8"]
        assert r.exact_outliers < r.int8_outliers


def test_without_the_extension_there_are_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy.cpu, "available", lambda: "is not built here")
    assert accuracy.product_errors() == []
