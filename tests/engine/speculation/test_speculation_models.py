"""Greedy answers of real models with n-gram look-up are those without, over hundreds of prompts from real text."""

from pathlib import Path

import pytest

from crelle import LLM, Sampling, quantize
from crelle.engine.engine import Engine

PROMPTS = {"stories15M": 300, "smollm2": 60}
TOKENS = 32
TEXT = {"stories15M": "tinystories-test.txt", "smollm2": "wikitext2-test.txt"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("how", ["ngram", "ngram:tokens=4,adaptive=false"])
def test_greedy_answers_are_equal(data: Path, smollm2_file: Path, tmp_path: Path, name: str, how: str) -> None:
    source = data / name if name == "stories15M" else smollm2_file
    quantize(source, tmp_path / "q", "rtn:bits=4,group=32")
    llm = LLM.load(tmp_path / "q", device="cpu", threads=1)
    words = next((data / "text").glob(TEXT[name])).read_text().split()
    count = PROMPTS[name]
    prompts = [" ".join(words[40 * i : 40 * i + 20 + i % 20]) for i in range(count)]
    found = []
    for mode in ("off", how):
        engine = Engine(llm, pages=400, max_batch=4, speculate=mode)
        handles = [engine.add(prompt, Sampling(max_tokens=TOKENS)) for prompt in prompts]
        engine.run()
        found.append([handle.outputs[0].completion.tokens for handle in handles])
        assert engine.stats.failed == 0
    assert found[0] == found[1]
    assert engine.stats.tokens_accepted > count  # more than one for each, or nothing is shown
