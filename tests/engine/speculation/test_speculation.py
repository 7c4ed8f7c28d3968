"""Answers with tokens that were guessed are those without: every kind of request, cache, batch and draft."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy, write_tiny_model
from emulated_cuda import EmulatedExecutor, emulate
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from known_drafts import ALWAYS, draft_known
from reference_single import GREEDY, TEXTS, alone, assert_all_as_alone, assert_empty, tokens
from sampled_cases import share_of

from crelle import LLM
from crelle.engine.block_manager import BlockManager
from crelle.engine.engine import Engine, Handle
from crelle.engine.requests.output import OutputState
from crelle.engine.requests.sequence import Request, Sequence
from crelle.engine.sampling.grammar import GrammarSpec, one_of
from crelle.engine.sampling.sampler import Sampler, Sampling, likeliest
from crelle.engine.sampling.stop_filter import StopFilter
from crelle.engine.sampling.verify import Verified, accept, sample_drafts
from crelle.engine.scheduler import Step
from crelle.errors import NumericsError, SchemeError, UnsupportedError
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.step.graph_inputs import bucket_of
from crelle.kernels.threads import set_threads

REPEATS = "one two three one two three one two"
LONG = replace(GREEDY, max_tokens=24)
SAMPLINGS = {
    "greedy": LONG,
    "sampled": replace(LONG, temperature=1.0, seed=3),
    "truncated": replace(LONG, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=4),
    "penalties": replace(LONG, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "biased": replace(LONG, temperature=0.7, seed=5, logit_bias=((65, 4.0), (66, 3.0))),
    "not yet": replace(LONG, min_tokens=9),
    "stops": replace(LONG, temperature=1.0, seed=6, stop=("a", "t ", "zz")),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    set_threads(1)
    yield
    set_threads(None)


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    at = tmp_path_factory.mktemp("speculation")
    whole = write_tiny_model(at / "m", max_position_embeddings=256)
    return LLM.load(quantized_copy(whole, at / "q", "bcq-nested:bits=4,group=24,data=false"), device="cpu", draft=2)


def engines(llm: LLM, how: str, **options: Any) -> Engine:
    return Engine(llm, **{"kv": "16:page=4", "pages": 80, "speculate": how, **options})


def told(handle: Handle) -> list[Any]:
    """All that a request gets, but for times."""
    found = []
    for output in handle.outputs:
        assert output.error is None
        done = output.completion
        found.append((done.text, done.tokens, done.finish_reason, done.prompt_tokens, output.logprobs))
    return found


@pytest.mark.parametrize("how", [ALWAYS, "ngram:tokens=15,adaptive=false", "draft:tokens=2,adaptive=false", "ngram"])
def test_every_sampling_gets_what_it_gets_without_drafts(nested: LLM, how: str, monkeypatch: Any) -> None:
    plain = engines(nested, "off", max_batch=20)
    want = {name: plain.add(REPEATS, s, logprobs=3, ignore_end=name != "not yet") for name, s in SAMPLINGS.items()}
    plain.run()
    if how.startswith("ngram:"):
        ids = nested.encode(REPEATS)
        draft_known(monkeypatch, [ids + h.outputs[0].completion.tokens for h in want.values()], 250)
    several = engines(nested, how, max_batch=8)
    for name, s in SAMPLINGS.items():
        ends = name != "not yet"
        alone_, beside = engines(nested, how), several.add(REPEATS, s, logprobs=3, ignore_end=ends)
        handle = alone_.add(REPEATS, s, logprobs=3, ignore_end=ends)
        alone_.run()
        assert told(handle) == told(want[name]), name
        several.step()
        want[name] = (want[name], beside)  # type: ignore[assignment]
        assert_empty(alone_)
    several.run()
    for first, beside in want.values():  # type: ignore[misc]
        assert told(beside) == told(first)
    assert_empty(several)
    if how != "ngram":  # which is adaptive: as many as pay on this machine
        assert several.stats.tokens_accepted > 0
        assert several.stats.tokens_drafted > several.stats.tokens_accepted


def test_n_sequences_of_a_prompt_guess_for_themselves(nested: LLM) -> None:
    sampling = replace(SAMPLINGS["sampled"], temperature=0.3)
    for how in (ALWAYS, "draft:tokens=3,adaptive=false"):
        engine = engines(nested, how)
        handle = engine.add(REPEATS, sampling, n=4, ignore_end=True)
        engine.run()
        assert tokens(handle) == alone(nested, REPEATS, sampling, kv="16:page=4", n=4, ignore_end=True)
        assert engine.stats.tokens_drafted > 0
        assert_empty(engine)


@pytest.mark.parametrize("kv", ["16:page=4", "8", "4", "3:page=4", "k4v2"])
@pytest.mark.parametrize("where", ["cpu", "eager", "cuda"])
def test_every_cache_and_executor_verifies_to_the_last_bit(
    nested: LLM, where: str, kv: str, monkeypatch: Any, tmp_path: Path
) -> None:
    """Logprobs are equal, so logits are; on an emulated GPU verified tokens are rows of a decode graph."""
    llm = nested
    if where == "eager":
        llm = LLM.load(write_tiny_model(tmp_path / "m", num_hidden_layers=1), device="cpu", kernel="reference")
    if where == "cuda":
        emulate(monkeypatch)
    limits = {"kv": kv, "pages": 64, "max_batch": 4}
    plain = Engine(llm, speculate="off", **limits)  # type: ignore[arg-type]
    want = [plain.add(text, GREEDY, logprobs=2, ignore_end=True) for text in TEXTS]
    plain.run()
    whole = [llm.encode(t) + h.outputs[0].completion.tokens for t, h in zip(TEXTS, want, strict=True)]
    draft_known(monkeypatch, whole, 250)
    engine = Engine(llm, speculate=ALWAYS, **limits)  # type: ignore[arg-type]
    handles = [engine.add(text, GREEDY, logprobs=2, ignore_end=True) for text in TEXTS]
    engine.run()
    assert isinstance(engine.runner.executor(None), CudaExecutor) == (where == "cuda")
    assert [told(h) for h in handles] == [told(h) for h in want]
    assert engine.stats.tokens_accepted > 0


@settings(
    max_examples=share_of(25),
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_few_pages_preemptions_and_prefixes_change_nothing(nested: LLM, data: st.DataObject) -> None:
    how = data.draw(st.sampled_from([ALWAYS, "ngram:tokens=9,adaptive=false", "draft:tokens=4,adaptive=false"]))
    kv = data.draw(st.sampled_from(["16:page=4", "4:page=4"]))
    pages, batch = data.draw(st.integers(16, 40)), data.draw(st.integers(1, 6))
    budget = data.draw(st.integers(batch, 40))
    engine = Engine(nested, kv=kv, pages=pages, max_batch=batch, budget=budget, speculate=how, watermark=0)
    asked = []
    for _ in range(data.draw(st.integers(2, 8))):
        sampling = data.draw(st.sampled_from([GREEDY, replace(SAMPLINGS["sampled"], max_tokens=12, temperature=0.4)]))
        n, bits = data.draw(st.integers(1, min(2, batch))), data.draw(st.sampled_from([None, 2, 3]))
        guess, text = data.draw(st.booleans()), data.draw(st.sampled_from([REPEATS[:23], *TEXTS]))
        asked.append(((text, sampling, n, bits), engine.add(text, sampling, n=n, bits=bits, speculate=guess)))
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
    engine.run()
    assert engine.stats.failed == 0
    assert_all_as_alone(engine, asked)


def test_a_prompt_that_ends_with_a_chunk_of_one_token_has_no_draft_yet(nested: LLM, monkeypatch: Any) -> None:
    ids = nested.encode(REPEATS)[:21]
    want = alone(nested, ids, GREEDY, n=2, ignore_end=True)
    draft_known(monkeypatch, [ids + want[0]], 250, wrong=10**9)
    for budget in (4, 5, 10, 20):
        engine = engines(nested, ALWAYS, budget=budget, max_batch=4)
        handle = engine.add(ids, GREEDY, n=2, ignore_end=True)
        engine.run()
        assert tokens(handle) == want
        assert engine.stats.tokens_accepted > 0


def test_grammars_hold_and_answers_stay(nested: LLM) -> None:
    specs = [GrammarSpec("regex", r"(one two ){4}three"), one_of(["three two one", "one two three", "three"])]
    for spec in specs:
        found = []
        for how in ("off", ALWAYS, "draft:tokens=5,adaptive=false"):
            engine = engines(nested, how)
            handle = engine.add(REPEATS, replace(LONG, max_tokens=64), grammar=spec, logprobs=1)
            engine.run()
            found.append(told(handle))
            assert handle.outputs[0].completion.finish_reason == "stop"
        assert found[0] == found[1] == found[2]
        assert engine.stats.tokens_drafted > 0


def test_a_stop_string_within_a_draft_ends_the_text_there(nested: LLM, monkeypatch: Any) -> None:
    want = engines(nested, "off").add("Hello", LONG, ignore_end=True)
    whole = [event.text for event in want]
    at = next(i for i in range(3, len(whole)) if whole[i].strip() and whole[i] not in "".join(whole[:i]))
    draft_known(monkeypatch, [nested.encode("Hello") + tokens(want)[0]], 250, wrong=10**9)
    engine = engines(nested, "ngram:tokens=15,adaptive=false")
    handle = engine.add("Hello", replace(LONG, stop=(whole[at],)), ignore_end=True)
    engine.run()
    done = handle.outputs[0].completion
    assert (done.text, done.finish_reason) == ("".join(whole[:at]), "stop")
    assert done.tokens == tokens(want)[0][: at + 1]
    assert_empty(engine)


def test_right_guesses_save_steps_and_wrong_ones_cost_none(nested: LLM, monkeypatch: Any) -> None:
    want = alone(nested, "Hello", LONG, ignore_end=True)[0]
    whole, steps = [nested.encode("Hello") + want], dict[int, int]()
    for wrong in (1, 10**9):
        draft_known(monkeypatch, whole, 250, wrong=wrong)
        engine = engines(nested, ALWAYS)
        handle = engine.add("Hello", LONG, ignore_end=True)
        engine.run()
        assert tokens(handle)[0] == want
        steps[wrong] = engine.stats.steps
        done = handle.outputs[0].completion
        assert (done.drafted, done.accepted) == (engine.stats.tokens_drafted, engine.stats.tokens_accepted)
    assert steps[10**9] == 1 + -(-(LONG.max_tokens - 1) // 4)
    assert steps[10**9] < steps[1] <= LONG.max_tokens


def test_a_draft_that_is_the_model_itself_is_always_right(nested: LLM) -> None:
    """Which shows that its cache follows: acceptance, catching up, pages that grow and consecutive prompts."""
    llm = LLM.load(nested.weights.path, device="cpu", draft=nested.weights.path, speculate="draft:adaptive=false")
    for prompt in (REPEATS, "Hello", REPEATS + " four"):
        done = llm.generate(prompt, replace(GREEDY, max_tokens=40))
        assert done.tokens == alone(nested, prompt, replace(GREEDY, max_tokens=40))[0]
        assert done.accepted >= done.drafted - 1 > 0  # the last one may be an end token


def test_a_full_batch_and_requests_that_do_not_want_it_have_no_drafts(nested: LLM) -> None:
    for n, want in ((16, False), (1, True)):
        engine = engines(nested, ALWAYS, pages=400, max_batch=16)
        handles = [engine.add(REPEATS, GREEDY, ignore_end=True) for _ in range(n)]
        engine.run()
        assert (engine.stats.tokens_drafted > 0) == want
        assert {tuple(tokens(h)[0]) for h in handles} == {tuple(alone(nested, REPEATS, GREEDY, ignore_end=True)[0])}
    engine = engines(nested, ALWAYS)
    plain = engine.add(REPEATS, GREEDY, speculate=False)
    engine.run()
    assert plain.outputs[0].completion.drafted == engine.stats.tokens_drafted == 0


def test_a_failing_draft_model_fails_the_requests_of_its_step_only(nested: LLM) -> None:
    engine = engines(nested, "draft:tokens=2,adaptive=false")
    draft = engine.speculator.draft
    assert draft is not None
    first, propose = engine.add(REPEATS, GREEDY), draft.propose

    def fail(wanted: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    draft.propose = fail  # type: ignore[method-assign]
    engine.run()
    assert isinstance(first.outputs[0].error, torch.OutOfMemoryError)
    draft.propose = propose  # type: ignore[method-assign]
    second = engine.add(REPEATS, GREEDY)
    engine.run()
    assert tokens(second) == alone(nested, REPEATS, GREEDY)
    assert_empty(engine)


def test_what_cannot_guess_is_refused_with_a_sentence(nested: LLM, tiny_model: Path, tmp_path: Path) -> None:
    for text in ("nope", "ngram:tokens=0", "ngram:tokens=16", "ngram:tokens=99999", "ngram:x=1", "ngram:adaptive=2"):
        with pytest.raises(SchemeError, match=r"speculation|tokens of a draft"):
            Engine(nested, pages=8, speculate=text)
    for bits in (1, 4, "7"):
        with pytest.raises(SchemeError, match=f"a draft of {bits} bits needs a nested checkpoint"):
            LLM.load(nested.weights.path, device="cpu", draft=bits)
    with pytest.raises(SchemeError, match="needs one: use `draft=DIR`"):
        LLM.load(tiny_model, device="cpu", speculate="draft")
    other = write_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedError, match="has another vocabulary"):
        LLM.load(tiny_model, device="cpu", draft=other)


def test_defaults_speculate_only_where_tokens_stay_the_same(nested: LLM) -> None:
    llm = LLM(nested.model, nested.tokenizer, nested.weights)
    assert Engine(llm, pages=8).speculator.settings.method == "ngram"
    off = Engine(llm, pages=8, batch_invariant=False)
    assert off.speculator.settings.method == "off"
    assert "--exact" in off.speculation_reason
    assert "may differ" in Engine(llm, pages=8, batch_invariant=False, speculate="ngram").speculation_reason
    assert Engine(nested, pages=8).speculator.settings.method == "draft"
    assert Engine(nested, pages=8, speculate="off").plan.page_bytes < Engine(nested, pages=8).plan.page_bytes


def test_a_draft_model_on_a_gpu_guesses_without_waiting_and_guesses_the_same(nested: LLM, monkeypatch: Any) -> None:
    """Its tokens stay on the device from step to step, also while sequences ask for different numbers of them."""
    asked = [(text, replace(GREEDY, max_tokens=9 + 7 * i)) for i, text in enumerate((REPEATS, "Hello", "one two"))]
    found = []
    for where in ("cpu", "cuda"):
        if where == "cuda":
            emulate(monkeypatch)
        engine = engines(nested, "draft:tokens=4,adaptive=false")
        handles = [engine.add(text, sampling, ignore_end=True) for text, sampling in asked]
        engine.run()
        draft = engine.speculator.draft
        assert draft is not None
        assert isinstance(draft.executor, CudaExecutor) == (where == "cuda")
        outputs = [h.outputs[0].completion for h in handles]
        found.append([(done.tokens, done.drafted, done.accepted) for done in outputs])
        assert engine.stats.tokens_accepted > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("vocabulary", [2, 3])
@settings(max_examples=share_of(100), deadline=None)
@given(data=st.data())
def test_acceptance_by_the_device_is_that_of_the_samplers(vocabulary: int, data: st.DataObject) -> None:
    """The likeliest tokens of all rows at once say what samplers say row by row, NaN and ends included."""
    draft = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=6))
    logits = torch.tensor(data.draw(st.lists(st.permutations(range(vocabulary)), min_size=7, max_size=7)))
    logits = logits[: 1 + len(draft)].float()
    for row in data.draw(st.sets(st.integers(0, len(draft)), max_size=2)):
        logits[row] = float("nan")
    room, end = data.draw(st.integers(1, 8)), frozenset(data.draw(st.sets(st.integers(0, vocabulary), max_size=1)))
    request = Request(prompt=(1,), sampling=Sampling(max_tokens=room), end_ids=end)
    sequence = Sequence(request, 0, 1 + room, BlockManager(8, 4).table(None))
    found = []
    for top in (None, 0):  # a sequence whose log-probabilities are wanted is sampled position by position
        state = OutputState(0, 1, Sampler(request.sampling), StopFilter(None, ()), top)  # type: ignore[arg-type]
        assert state.fast == (top is None)
        (tokens,) = sample_drafts(logits, [Verified(sequence, state, draft)])
        found.append(type(tokens) if isinstance(tokens, BaseException) else [t.token for t in tokens])
    best = likeliest(logits).tolist()
    assert found[0] == found[1] == (accept(best, draft, end, room) or NumericsError)


def test_a_step_that_captured_graphs_is_no_measurement(nested: LLM, monkeypatch: Any) -> None:
    """Also where it was only started and its tokens come in the next step; and all that verify are captured first."""
    emulate(monkeypatch)
    engine = engines(nested, ALWAYS)
    graphs, verifying, usual = list[tuple[int, bool]](), list[int](), list[bool]()
    graph, note = EmulatedExecutor.graph, engine.speculator.note

    def made(self: EmulatedExecutor, rows: int, verifies: bool = False) -> Any:
        graphs.append((bucket_of(rows), verifies))
        return graph(self, rows, verifies)

    def noted(step: Step, accepted: Any, seconds: float | None, overlaps: bool | None = None) -> None:
        usual.append(seconds is not None)
        if step.drafted:
            verifying.append(len(set(graphs)))
        note(step, accepted, seconds, overlaps)

    monkeypatch.setattr(EmulatedExecutor, "captures", property(lambda self: len(set(graphs))), raising=False)
    monkeypatch.setattr(EmulatedExecutor, "graph", made)
    monkeypatch.setattr(engine.speculator, "note", noted)
    handle = engine.add(REPEATS, LONG, ignore_end=True)
    engine.run()
    assert handle.outputs[0].error is None
    assert {(b, True) for b in (2, 4, 8, 16)} <= set(graphs)
    assert len(set(verifying)) == 1  # no graph was captured once tokens were verified
    assert not usual[0]  # that of the prompt, before which graphs were captured
    assert all(usual[1:])
