"""A batch gets what single requests get: every prompt length, answer, sampling, prefix, budget, KV and weight format.

Three ways: on a CPU; on a CPU by the host side of the CUDA path (emulated_cuda.py); and on a GPU, by itself and in
batch-invariant mode. request_matrix.py has the cases.
"""

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
from emulated_cuda import emulate
from known_drafts import ALWAYS, draft_known
from reference_single import assert_empty
from request_matrix import (
    ANSWERS,
    CASES,
    CONTEXT,
    FACTORS,
    KVS,
    LENGTHS,
    PERMUTED,
    SCHEMES,
    WORDS,
    Case,
    assert_close,
    batch,
    model,
    outcome,
    requests,
    single,
    wanted,
)

from crelle import LLM, Sampling
from crelle.engine.engine import Engine
from crelle.errors import CapacityError, SchemeError
from crelle.formats.base import FORMATS
from crelle.formats.kv.format import GROUPS, KVFormat
from crelle.kernels import cuda
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.kernels.cuda.executor import CudaExecutor, supports_model
from crelle.quantizers.scheme import CONFIGS, parse

GPU_CASES = [  # both budgets, greedy and mixed
    case for case in CASES if case.number % 2 == case.number // 4 % 2
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("matrix")
    model.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sample(5)
def test_a_batch_on_a_cpu_gets_what_single_requests_get(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model(case.scheme, "cpu", folder)
    asked = requests(case, eager=not isinstance(llm.model.decoder, FusedDecoder))
    ends, each = wanted(asked, single(llm, case, asked))
    for emulated in (False, True):
        if emulated:
            emulate(monkeypatch)
        guesses = emulated == (case.number % 2 == 0)
        if guesses:
            whole = [[*one.prompt, *t] for one, found in zip(asked, each, strict=True) for _, t in found]
            draft_known(monkeypatch, whole, WORDS)
        engine, runs = batch(llm, case, asked, ends, speculate=ALWAYS if guesses else "off")
        assert guesses or engine.stats.tokens_drafted == 0
        assert engine.stats.tokens_accepted > 0 or not guesses or case.budget < 512  # prompts in nearly every step
        assert isinstance(engine.runner.executor(None), CudaExecutor) == emulated
        for found in runs:
            assert found == each


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_a_batch_on_a_gpu_gets_what_single_requests_get(case: Case, folder: Path) -> None:
    """Bit for bit in batch-invariant mode; else the sums of a row depend on the number of rows, and tokens may too."""
    llm = model(case.scheme, "cuda", folder)
    eager = supports_model(llm.model, KVFormat.parse(case.kv)) is not None
    assert eager == (case.kv == "k16v8")
    asked = requests(case, eager)
    for invariant in (True, False) if not eager else (False,):
        alone = single(llm, case, asked, batch_invariant=invariant)
        ends, each = wanted(asked, alone)
        _, runs = batch(llm, case, asked, ends, batch_invariant=invariant, speculate=ALWAYS if invariant else None)
        for found in runs:
            assert not invariant or found == each
            for one, got, reference in zip(asked, found, alone, strict=True):
                assert_close(llm, case, one, got, reference, ends)


# --- what cannot be answered -----------------------------------------------------------------------------------------


def refuse_what_has_no_room(llm: LLM) -> None:
    """Prompts that fill the context or are longer, and answers of no tokens, get a sentence; others go on."""
    engine = Engine(llm, pages=2 * CONTEXT // 16, max_batch=4)
    running = engine.add([1, 2, 3], Sampling(max_tokens=4), ignore_end=True)
    engine.step()
    for length in (CONTEXT, CONTEXT + 1, 3 * CONTEXT):
        sentence = f"the prompt has {length} tokens, but the model's context of {CONTEXT}"
        with pytest.raises(CapacityError, match=sentence):
            engine.add([1] * length)
        with pytest.raises(CapacityError, match=sentence):
            llm.generate([1] * length)
        with pytest.raises(CapacityError, match=sentence):
            llm.generate([[1], [1] * length])
    with pytest.raises(SchemeError, match="the prompt is empty"):
        engine.add([])
    with pytest.raises(SchemeError, match="max_tokens must be at least 1, got 0"):
        engine.add([1], Sampling(max_tokens=0))
    with pytest.raises(SchemeError, match=f"token id {WORDS} is outside the vocabulary"):
        engine.add([WORDS])
    engine.run()
    assert outcome(running) == outcome_alone(llm)
    assert_empty(engine)


def outcome_alone(llm: LLM) -> list[tuple[str, list[int]]]:
    done = llm.generate([1, 2, 3], Sampling(max_tokens=4))
    return [(done.finish_reason, done.tokens)]


def test_what_has_no_room_is_refused_on_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model("fp16", "cpu", folder)
    llm.end_ids = frozenset()
    refuse_what_has_no_room(llm)
    emulate(monkeypatch)
    llm._idle.clear()
    refuse_what_has_no_room(llm)


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
def test_what_has_no_room_is_refused_on_a_gpu(folder: Path) -> None:
    llm = model("fp16", "cuda", folder)
    llm.end_ids = frozenset()
    refuse_what_has_no_room(llm)


# --- the matrix itself -----------------------------------------------------------------------------------------------


def test_the_matrix_has_every_format_and_all_pairs() -> None:
    assert {scheme.partition(":")[0] for scheme in SCHEMES} == {*CONFIGS, "fp16", PERMUTED} - {"auto"}
    stored = {parse(scheme).storage((128, 256))["format"] for scheme in SCHEMES if scheme != PERMUTED}
    imported = {PERMUTED, "exl3"}  # the latter is dequantized at load, as any format without kernels
    assert stored | imported == set(FORMATS)
    formats = [KVFormat.parse(kv) for kv in KVS]
    assert {kv.bits for kv in formats} | {kv.v_bits for kv in formats} == set(GROUPS)
    factors = [(case.scheme, case.kv, case.budget, case.sharing, case.mixed) for case in CASES]
    values = [set(column) for column in zip(*factors, strict=True)]
    for a, b in combinations(range(5), 2):
        if (a, b) != (0, 1):  # four KV formats for a scheme, not all of them
            assert {(row[a], row[b]) for row in factors} == set(product(values[a], values[b]))
    asked = [(case, one) for case in CASES for one in requests(case)]
    kinds = {(len(one.prompt), one.answer, one.sampling.temperature > 0) for _, one in asked}
    assert kinds == set(product(LENGTHS, ANSWERS, (False, True)))
    assert {(len(one.prompt), case.budget, case.sharing) for case, one in asked} == {
        (length, budget, sharing) for length in LENGTHS for budget, sharing, _ in FACTORS
    }
