"""The serving benchmark: every request is answered in full length, counted once, and what it reports adds up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from crelle import LLM, quantize
from crelle.bench.compile_ahead import compile_ahead
from crelle.bench.load import engine_load
from crelle.bench.load.decode_throughput import budgeted, decode, fill, largest_batch
from crelle.bench.load.engine_load import EngineLoad, check, disagreement, serve
from crelle.bench.load.model_sources import checked_part, random_llm
from crelle.bench.load.serving_plot import plot_serving, scheme_label
from crelle.bench.load.trace import TraceRequest
from crelle.bench.model_shapes import SHAPES
from crelle.engine.compile_ahead import prompt_sizes
from crelle.engine.engine import Engine
from crelle.engine.memory.plan import parse_bytes, plan
from crelle.errors import CapacityError, NumericsError, SchemeError, UnsupportedError
from crelle.formats.kv.pages import KVFormat, KVPages


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """4 bits and a context of 96."""
    to = tmp_path_factory.mktemp("quantized") / "q"
    quantize(tiny_model, to, "rtn:bits=4,group=24")
    return LLM.load(to, device="cpu")


def test_trace_answers_everyone_in_full(llm: LLM) -> None:
    requests = [
        TraceRequest(0.0, 20, 9),
        TraceRequest(0.0, 3, 30),
        TraceRequest(0.02, 50, 1),
        TraceRequest(0.15, 7, 12),
    ]
    row = serve(llm, "4 bits", trace=requests, traffic="four", kv="4", pages=20)
    assert (row.requests, row.failures, row.clients) == (4, 0, None)
    assert (row.tokens, row.prompt_tokens) == (9 + 30 + 1 + 12, 80)
    assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)
    assert 0 < row.late_tokens_per_second <= 2 * row.tokens_per_second
    assert row.seconds >= 0.15
    assert row.disagreement == 0
    assert row.first_token is not None
    assert 0 < row.first_token.p50 <= row.first_token.max < row.seconds
    assert 0 < row.mean_pages <= row.most_pages <= row.pages == 20
    assert max(m.running for m in row.over_time) == row.most_running <= 4


def test_a_trace_that_is_ended_counts_what_came_by_then(llm: LLM) -> None:
    requests = [TraceRequest(0.0, 3, 1), *[TraceRequest(0.0, 4, 60)] * 40, TraceRequest(1000.0, 5, 5)]
    row = serve(llm, "4 bits", trace=requests, traffic="too much", stop=0.15, pages=40, max_batch=4)
    assert row.seconds == 0.15
    assert (row.requests, row.failures) == (41, 0)  # the last one never came
    assert 0 < row.cut < 41
    assert 0 < row.tokens < 1 + 40 * 60
    assert row.requests_per_second == pytest.approx((41 - row.cut) / 0.15)


def test_closed_loop_keeps_its_clients_busy_and_ends(llm: LLM) -> None:
    row = serve(llm, "4 bits", clients=3, seconds=0.5, prompt=10, tokens=6, pages=60)
    assert row.most_running == 3
    assert row.requests > 3
    assert row.failures == 0
    assert row.prompt_tokens == 10 * row.requests
    assert 0 < row.tokens <= 6 * row.requests
    assert row.tokens >= 6 * (row.requests - 3)  # only the last ones may end too late


def test_preemptions_are_counted(llm: LLM) -> None:
    row = serve(llm, "4 bits", clients=4, seconds=0.3, prompt=8, tokens=60, pages=9, max_batch=4)
    assert row.preemptions > 0
    assert row.tokens_run > row.prompt_tokens


def test_what_can_never_fit_fails_alone(llm: LLM) -> None:
    load = EngineLoad(Engine(llm, pages=2))
    report = load.trace([TraceRequest(0, 60, 20), TraceRequest(0, 5, 5)])
    assert (report.failures, report.tokens) == (1, 5)
    assert "the whole cache has 2" in next(iter(report.errors))


def test_waits_count_from_when_a_request_was_due(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one text at a time, the second of two that come together waits for all of the first."""
    load = EngineLoad(Engine(llm, pages=40, max_batch=1))
    report = load.trace([TraceRequest(0, 5, 40), TraceRequest(0, 5, 2)])
    first, second = report.calls
    assert second.first is not None
    assert second.first > first.seconds - 1e-3


def test_wrong_engine_is_not_timed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run = Engine(llm, pages=40), None
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda step: -run(step))
    with pytest.raises(UnsupportedError, match="the engine is wrong here"):
        disagreement(engine)
    monkeypatch.setattr(engine.runner, "run", lambda step: run(step) * torch.nan)
    with pytest.raises(NumericsError, match="not finite"):
        disagreement(engine)


def test_no_load_is_a_sentence(llm: LLM) -> None:
    with pytest.raises(SchemeError, match="no requests"):
        serve(llm, "4 bits", trace=[], pages=20)
    with pytest.raises(SchemeError, match="at least 1 client"):
        serve(llm, "4 bits", clients=0, pages=20)


# Decoding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["16", "4", "8"])
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_decoding_steps_all_texts_together(llm: LLM, batch: int, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    schedule = engine_load.Engine.step

    def step(self: Engine) -> bool:
        found = schedule(self)
        seen.append(self.stats.running)
        return found

    monkeypatch.setattr(Engine, "step", step)
    row = decode(llm, "4 bits", batch=batch, context=60, tokens=8, kv=kv)
    assert (row.batch, row.context, row.memory) == (batch, 60, None)
    assert seen.count(batch) >= 8
    assert row.cached_tokens == batch * (60 + 3 + 8 - 1)
    assert row.tokens_per_second == pytest.approx(batch * 1e3 / row.milliseconds_per_step, rel=0.9)


def test_largest_batch_fits_and_one_more_does_not(llm: LLM) -> None:
    kv, memory = KVFormat(4), "9MB"
    batch = largest_batch(llm, kv, memory, 60, 8)
    assert batch > 1
    row = decode(llm, "4 bits", batch=batch, context=60, tokens=8, kv=kv, memory=memory)
    assert row.weight_bytes + row.working_bytes + row.cache_bytes <= parse_bytes(memory)
    more = plan([llm.model], kv, memory=memory, pages=None, max_batch=batch + 1, budget=max(512, batch + 1))
    assert more.pages < (batch + 1) * -(-(60 + 3 + 8) // kv.page)
    assert largest_batch(llm, 16, memory, 60, 8) < batch


def test_too_little_memory_is_a_sentence(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="leaves no room for the KV cache"):
        largest_batch(llm, 4, "100kB", 60, 8)
    with pytest.raises(CapacityError, match="context of 96"):
        decode(llm, "4 bits", batch=1, context=95, tokens=8)


@pytest.mark.parametrize("kv", ["16", "8", "4"])
def test_filled_pages_hold_numbers_of_a_usual_size(kv: str) -> None:
    pages = KVPages.new(KVFormat.parse(kv), 9, 2, 64, torch.float32, "cpu")
    fill([pages])
    numbers = pages.read(torch.arange(9))
    assert numbers.isfinite().all()
    assert 0.5 < float(numbers.std()) < 2


def test_shape_with_random_weights_decodes_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES["smollm2-135m"], "vocab_size", 1000)  # most of one layer's model is its vocabulary
    shaped = random_llm("smollm2-135m", "rtn:bits=4,group=64", torch.device("cpu"), layers=1)
    row = decode(shaped, "rtn:bits=4,group=64", batch=2, context=20, tokens=3, kv=4)
    assert row.model == "smollm2-135m"
    with pytest.raises(UnsupportedError, match="has no tokenizer"):
        shaped.generate("Hello")


def test_picture_of_both_kinds_of_rows(llm: LLM, tmp_path: Path) -> None:
    from dataclasses import asdict

    rows: list[Any] = [
        decode(llm, "4 bits", batch=1, context=20, tokens=3),
        decode(llm, "4 bits", batch=2, context=20, tokens=3, memory="9MB"),
        serve(llm, "4 bits", trace=[TraceRequest(0, 5, 5)], traffic="one", pages=20),
    ]
    for some in (rows, rows[:1], rows[2:]):
        path = tmp_path / "p.png"
        plot_serving(path, [asdict(r) for r in some])
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()


# Quantized activations ------------------------------------------------------------------------------------------------

TINY_ATOM = {**SHAPES["smollm2-135m"], "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3}
TINY_ATOM |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 500,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("scheme", ["atom:w=4,a=4,group=64,outliers=16", "atom:w=4,a=8,levels=2,group=64,outliers=16"])
def test_random_integer_models_are_checked_by_their_first_layer(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY_ATOM)  # type: ignore[attr-defined]
    llm = random_llm("tiny", scheme, torch.device("cpu"))
    part = checked_part(llm)
    assert (len(part.model.spec.layers), len(llm.model.spec.layers)) == (1, 3)
    assert [w.kernel for w in part.model.linears()][:3] == [w.kernel for w in llm.model.linears()][:3]
    ids = torch.arange(5)
    assert torch.equal(part.model.embedding(ids), llm.model.embedding(ids))
    assert 0 <= check(Engine(llm, kv=KVFormat(4), pages=40)) < 0.3
    row = decode(llm, scheme, batch=3, context=20, tokens=4, kv="4", profile=True)
    assert row.tokens_per_second > 0
    assert row.breakdown is None
    assert row.no_breakdown is not None


def test_float_models_are_checked_whole(llm: LLM) -> None:
    assert checked_part(llm) is llm


def test_a_budget_is_timed_at_its_largest_batch_and_a_whole_bucket(llm: LLM) -> None:
    found = plan([llm.model], KVFormat(4), memory=None, pages=40, max_batch=8, budget=512)
    rows = list(budgeted(llm, "4 bits", "4", found.total, 20, 4))
    largest = largest_batch(llm, "4", found.total, 20, 4)
    assert [r.batch for r in rows] == [max(b for b in (1, 2, 4, 8, 16, 24, 32) if b <= largest), largest]
    assert all(r.memory and r.cache_bytes + r.weight_bytes <= found.total for r in rows)


def test_nothing_is_compiled_ahead_on_a_cpu(llm: LLM) -> None:
    assert compile_ahead(Engine(llm, pages=4), [1, 2], 64) == (0, 0.0)
    assert prompt_sizes(0) == []
    assert prompt_sizes(20) == list(range(2, 21))
    assert prompt_sizes(60)[-4:] == [40, 48, 56, 64]


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        ("fp16", "FP16"),
        ("atom:w=4,a=8,levels=2", "W4A8 two-level"),
        ("atom:w=8,a=8,group=row,outliers=0", "W8A8 per row"),
        ("rtn:bits=4,group=128", "W4A16 (rtn)"),
        ("as stored", "as stored"),
    ],
)
def test_schemes_have_the_papers_names(scheme: str, label: str) -> None:
    assert scheme_label(scheme) == label


def test_plot_of_batches_budgets_and_kernels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows: list[dict[str, Any]] = []
    kinds = {"attention": 5.0, "gemm": 2.0, "encode": 0.3, "idle": 0.1}
    for scheme, kv in (("fp16", "kv16"), ("atom:w=4,a=4", "kv4")):
        for batch, memory in ((8, None), (128, None), (126, "24GB")):
            row = {"scheme": scheme, "kv": kv, "batch": batch, "memory": memory, "milliseconds_per_step": 7.3}
            row |= {"tokens_per_second": batch * 137.0, "model": "m", "device": "d", "context": 1024}
            row["breakdown"] = {"milliseconds": kinds, "profiled_ms": 7.4} if batch == 128 else None
            rows.append(row)
    plot_serving(tmp_path / "p.png", rows)
    assert (tmp_path / "p.png").stat().st_size > 10_000
