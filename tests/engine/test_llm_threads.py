"""One LLM in several threads: each answer is the one that the same call gets alone."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import quantized_copy
from reference_single import GREEDY, TEXTS, WARM, alone, assert_empty

from crelle import LLM, Sampling, quantize
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.engine import Engine
from crelle.kernels.threads import set_threads

THREADS = 4
PROMPTS = ["a", "Hello", "Once upon a time there was a fox", "The quick brown fox jumps over the lazy dog"]
Job = tuple[str, Any, Sampling, int | None]  # what to call, prompt or prompts, sampling, bits


@pytest.fixture(autouse=True)
def one_thread_for_the_kernels() -> Iterator[None]:
    """It is Python's threads that are tested here; on a busy machine those of the kernels wait for each other."""
    set_threads(1)
    yield
    set_threads(None)


def in_threads(*work: Callable[[], None]) -> None:
    """Run all at once; raise what the first that failed raised."""
    failed: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def answer(llm: LLM, job: Job) -> Any:
    how, prompt, sampling, bits = job
    if how == "stream":
        return "".join(piece.text for piece in llm.stream(prompt, sampling, bits=bits))
    found = llm.generate(prompt, sampling, bits=bits)
    return [c.tokens for c in found] if isinstance(found, list) else found.tokens


def jobs(llm: LLM, lengths: tuple[int, ...]) -> list[Job]:
    every: list[Job] = []
    for bits in (None, *llm.precisions):
        for length in lengths:
            greedy, warm = Sampling(max_tokens=length), Sampling(max_tokens=length, temperature=0.8, seed=length)
            every += [("generate", prompt, greedy, bits) for prompt in PROMPTS]
            every += [("generate", PROMPTS[0], warm, bits), ("stream", PROMPTS[2], greedy, bits)]
        every += [("generate", PROMPTS[:3], Sampling(max_tokens=lengths[0]), bits)]
    return every


def as_alone(llm: LLM, rounds: int, lengths: tuple[int, ...] = (3, 9, 14)) -> None:
    """Every thread makes all calls, each in an order of its own, and leaves streams half read between them."""
    every = jobs(llm, lengths)
    want = [answer(llm, job) for job in every]
    wrong: list[tuple[Job, Any, Any]] = []

    def client(seed: int) -> None:
        mine, paused = random.Random(seed), list[Iterator[Any]]()
        for _ in range(rounds):
            for i in mine.sample(range(len(every)), len(every)):
                if mine.random() < 0.2:  # a stream that is begun here, and goes on or not while others run
                    paused.append(llm.stream(mine.choice(PROMPTS), GREEDY))
                    next(paused[-1])
                if (got := answer(llm, every[i])) != want[i]:
                    wrong.append((every[i], got, want[i]))

    in_threads(*(lambda seed=seed: client(seed) for seed in range(THREADS)))  # type: ignore[misc]
    assert not wrong, f"{len(wrong)} of {THREADS * rounds * len(every)} answers are wrong, e.g. {wrong[0]}"


@pytest.fixture(scope="module")
def coded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("threads") / "coded"
    quantized_copy(tiny_model, to, "rtn:bits=4,group=24")
    return to


@pytest.fixture(scope="module")
def nested(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("threads") / "nested"
    quantized_copy(tiny_model, to, "bcq-nested:bits=4,group=24,data=false")
    return to


@pytest.mark.parametrize("kv", [16, 8, 4])
@pytest.mark.parametrize("weights", ["plain", "coded", "nested"])
@pytest.mark.sample(3)
def test_threads_get_the_answers_of_one_alone(
    tiny_model: Path, coded: Path, nested: Path, weights: str, kv: int
) -> None:
    path = {"plain": tiny_model, "coded": coded, "nested": nested}[weights]
    as_alone(LLM.load(path, device="cpu", kv=kv), rounds=1 if weights == "nested" else 2)


@pytest.fixture(scope="module")
def stories(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("threads") / "stories"
    quantize(data / "stories15M", to, "rtn:bits=4,group=32", head="rtn:bits=4,group=32")
    return to


@pytest.mark.parametrize("kv", [16, 4])
@pytest.mark.sample(2)
def test_threads_get_the_answers_of_one_alone_on_a_real_model(stories: Path, kv: int) -> None:
    as_alone(LLM.load(stories, device="cpu", kv=kv), rounds=1, lengths=(2, 9))


def test_calls_engines_and_a_service_share_one_model(nested: Path) -> None:
    """Three engines of their own, one of them a service, and single calls, all at the same time."""
    llm = LLM.load(nested, device="cpu", kv=4)
    want = {(t, b): alone(llm, t, WARM, kv=4, bits=b)[0] for t in TEXTS for b in (None, 2, 3)}
    single = {t: llm.generate(t, GREEDY).tokens for t in TEXTS}
    service = AsyncEngine(Engine(llm, pages=60, max_batch=4, budget=16))

    def engine() -> None:
        for _ in range(2):
            mine = Engine(llm, pages=60, max_batch=4, budget=16)
            handles = {key: mine.add(key[0], WARM, bits=key[1]) for key in want}
            mine.run()
            assert {key: handle.outputs[0].completion.tokens for key, handle in handles.items()} == want
            assert_empty(mine)

    def client() -> None:
        for _ in range(2):
            handles = {key: service.submit(key[0], WARM, bits=key[1]) for key in want}
            for key, handle in handles.items():
                assert [event.token for event in handle][:-1] == want[key]

    def caller() -> None:
        for _ in range(8):
            assert {t: llm.generate(t, GREEDY).tokens for t in TEXTS} == single

    with service:
        in_threads(engine, engine, client, client, caller)
    assert_empty(service.engine)


def test_a_precision_is_built_once(nested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, built, together = LLM.load(nested, device="cpu"), list[int](), threading.Barrier(THREADS)
    build = type(llm.model).at

    def slowly(model: Any, bits: int) -> Any:
        built.append(bits)
        time.sleep(0.05)
        return build(model, bits)

    monkeypatch.setattr(type(llm.model), "at", slowly)
    found: list[Any] = []

    def ask() -> None:
        together.wait(10)
        found.append(llm.at(2))

    in_threads(*[ask] * THREADS)
    assert built == [2]
    assert len(set(map(id, found))) == 1


def test_a_stream_that_nobody_reads_holds_nobody_up(coded: Path) -> None:
    llm = LLM.load(coded, device="cpu")
    paused = llm.stream("Hello", GREEDY)
    next(paused)
    in_threads(lambda: llm.generate("a", GREEDY), lambda: llm.generate(["a", "b"], GREEDY))
    assert "".join(piece.text for piece in paused)


def test_a_busy_service_does_not_starve_single_calls(coded: Path) -> None:
    llm = LLM.load(coded, device="cpu")
    with AsyncEngine(Engine(llm, pages=200, max_batch=16)) as service:
        handles = [service.submit(text, Sampling(max_tokens=80)) for text in TEXTS * 20]
        done = llm.generate("Hello", Sampling(max_tokens=4))
        left = sum(not handle.finished for handle in handles)
        assert len(done.tokens) == 4
        assert left > 0, "the call had to wait until the service was idle"


def test_the_thread_count_may_change_while_others_run(coded: Path) -> None:
    llm = LLM.load(coded, device="cpu")
    want, running = {t: llm.generate(t, GREEDY).tokens for t in TEXTS}, threading.Event()

    def caller() -> None:
        try:
            for _ in range(6):
                assert {t: llm.generate(t, GREEDY).tokens for t in TEXTS} == want
        finally:
            running.set()

    def changer() -> None:
        while not running.is_set():
            for count in (1, 2, 3):
                set_threads(count)

    in_threads(caller, changer)
