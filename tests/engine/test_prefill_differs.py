"""Executors that run prompts through other kernels than sampled tokens: each token keeps the bits that it has alone."""

from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest
import torch
from fake_model import Runner, request, scheduler, steps
from torch import Tensor

from crelle import LLM, Sampling
from crelle.engine.engine import Engine, Handle
from crelle.formats.kv.pages import KVPages
from crelle.kernels.executor import Chunk

PAGE = 4
SAMPLING = Sampling(max_tokens=14)


class TwoPaths:
    """A model played by hashes that lie in the pages; prompts and sampled tokens hash differently."""

    def __init__(self, layers: Sequence[KVPages], vocabulary: int, *, prefill_differs: bool) -> None:
        self.layers, self.vocabulary, self.prefill_differs = layers, vocabulary, prefill_differs
        self.chunks: list[Chunk] = []

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        self.chunks += chunks
        found = [self._value(chunk) for chunk in chunks]
        return torch.nn.functional.one_hot(
            torch.tensor([v % 256 for v, c in zip(found, chunks, strict=True) if c.wanted], dtype=torch.long),
            self.vocabulary,
        ).float()

    def _value(self, chunk: Chunk) -> int:
        pages = self.layers[0].codes  # [pages, 2, heads, page, D]
        assert chunk.prompt is not None
        value = 0
        for i, token in enumerate(chunk.ids, chunk.start):
            seen = [int(pages[chunk.pages[j // PAGE], 0, 0, j % PAGE, 0]) for j in range(i)]
            value = crc32(repr((seen, token, i >= chunk.prompt)).encode()) % 2000
            pages[chunk.pages[i // PAGE], 0, 0, i % PAGE, 0] = value
        return value


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    llm = LLM.load(tiny_model, device="cpu", threads=1)
    llm.end_ids = frozenset()
    return llm


def played(llm: LLM, *, prefill_differs: bool = True, **options: int) -> tuple[Engine, TwoPaths]:
    engine = Engine(llm, kv=f"16:page={PAGE}", **{"pages": 64, **options})
    executor = TwoPaths(engine.runner.layers, llm.model.spec.vocabulary, prefill_differs=prefill_differs)
    engine.runner._executors[None] = executor  # type: ignore[assignment]
    return engine, executor


def tokens(handle: Handle) -> list[int]:
    return handle.outputs[0].completion.tokens


def alone(llm: LLM, prompt: list[int]) -> list[int]:
    engine, _ = played(llm)
    handle = engine.add(prompt, SAMPLING)
    engine.run()
    return tokens(handle)


def follow_up(llm: LLM, *, prefill_differs: bool) -> tuple[Handle, list[int]]:
    """A conversation's second prompt: the first one, its answer, and more."""
    engine, _ = played(llm, prefill_differs=prefill_differs)
    first = engine.add([1, 2, 3, 4, 5, 6], SAMPLING)
    engine.run()
    second = [1, 2, 3, 4, 5, 6, *tokens(first), 7]
    handle = engine.add(second, SAMPLING)
    engine.run()
    return handle, alone(llm, second)


def test_an_answer_is_no_cached_prompt(llm: LLM) -> None:
    handle, want = follow_up(llm, prefill_differs=True)
    assert tokens(handle) == want
    assert handle.outputs[0].reused == PAGE  # the page that held nothing but the first prompt


def test_where_the_paths_are_one_an_answer_is_a_cached_prompt(llm: LLM) -> None:
    handle, want = follow_up(llm, prefill_differs=False)
    assert handle.outputs[0].reused == 16
    assert tokens(handle) != want  # the played model's paths differ after all: the check above can fail


def test_who_is_preempted_finds_its_sampled_pages_and_runs_them_as_sampled(llm: LLM) -> None:
    """Pages for two sequences of three: every token has the bits that it has alone."""
    prompts = [[1, 2, 3, 4, 5, 6 + i] for i in range(3)]
    engine, executor = played(llm, pages=11)
    handles = [engine.add(prompt, SAMPLING) for prompt in prompts]
    engine.run()
    assert [tokens(handle) for handle in handles] == [alone(llm, prompt) for prompt in prompts]
    assert engine.stats.preemptions > 0
    assert {chunk.prompt for chunk in executor.chunks} == {6}
    assert any(chunk.start < 6 < chunk.end or (chunk.start >= 6 and len(chunk.ids) > 1) for chunk in executor.chunks)


def test_it_matters_only_where_bits_do(llm: LLM) -> None:
    engine, _ = played(llm)
    assert engine.runner.prefill_differs(None)
    engine.runner.batch_invariant = False
    assert not engine.runner.prefill_differs(None)


@pytest.mark.parametrize("differs", [False, True])
def test_a_key_says_how_many_tokens_of_a_page_were_sampled(differs: bool) -> None:
    s = scheduler(page=4)
    runner = Runner(s)
    first = request((1, 2, 3, 1, 2, 3), tokens=12, prefill_differs=differs)
    s.submit(first)
    steps(s, runner)
    ids = first.sequences[0].ids
    again = request(ids[:-1], tokens=1, prefill_differs=differs)
    s.submit(again)
    steps(s, runner)
    assert again.sequences[0].reused == (4 if differs else (len(ids) - 2) // 4 * 4)
