"""LLM: prompts in, text out; what ends a text, and what is refused."""

import json
import shutil
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_model

from crelle import LLM, Sampling, quantize
from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.threads import set_threads
from crelle.quantize_job.data import CalibrationData

CONTEXT = 96
LIVELY: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 60}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


def copy_with(tiny_model: Path, to: Path, file: str, **changes: Any) -> LLM:
    """The tiny model with some settings of a JSON file changed; None removes one."""
    shutil.copytree(tiny_model, to, dirs_exist_ok=True)
    old = json.loads((to / file).read_text()) if (to / file).exists() else {}
    (to / file).write_text(json.dumps({k: v for k, v in {**old, **changes}.items() if v is not None}))
    return LLM.load(to, device="cpu")


def test_greedy_tokens_equal_the_argmax_of_whole_passes(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    for _ in range(20):
        logits = llm.model(torch.tensor([ids]), llm.model.new_cache())
        ids.append(int(logits[0, -1].argmax()))
    assert llm.generate("Hello", Sampling(max_tokens=20)).tokens == ids[-20:]


@pytest.mark.parametrize("n", [1, 2, 17])
def test_max_tokens_ends_the_text(llm: LLM, n: int) -> None:
    done = llm.generate("Hello", Sampling(max_tokens=n))
    assert (len(done.tokens), done.finish_reason, done.prompt_tokens) == (n, "length", 6)  # BOS and five letters


@pytest.mark.parametrize("prompt", [CONTEXT - 1, CONTEXT - 6, 1])
def test_full_context_ends_the_text(llm: LLM, prompt: int) -> None:
    done = llm.generate([65] * prompt, Sampling(max_tokens=1000))
    assert (len(done.tokens), done.finish_reason) == (CONTEXT - prompt, "length")


@pytest.mark.parametrize("n", [CONTEXT, CONTEXT + 1, 1000])
def test_prompt_that_fills_the_context_is_refused_before_any_work(llm: LLM, n: int) -> None:
    with pytest.raises(CapacityError, match=f"the prompt has {n} tokens, but the model's context of {CONTEXT}"):
        llm.stream([65] * n)


@pytest.mark.parametrize("token", [-1, -259, 259, 10**9])
def test_token_outside_the_vocabulary_is_refused(llm: LLM, token: int) -> None:
    with pytest.raises(SchemeError, match=f"token id {token} is outside the vocabulary of 259"):
        llm.stream([5, 0, token])


@pytest.mark.parametrize("token", [0, 258])
def test_first_and_last_token_of_the_vocabulary_are_prompts(llm: LLM, token: int) -> None:
    assert llm.generate([token], Sampling(max_tokens=2)).prompt_tokens == 1


def test_empty_prompt_is_refused_unless_bos_starts_it(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    assert llm.generate("", Sampling(max_tokens=2)).prompt_tokens == 1
    without_bos = copy_with(tiny_model, tmp_path, "tokenizer_config.json", add_bos_token=False)
    for model, prompt in ((llm, []), (without_bos, ""), (without_bos, [])):
        with pytest.raises(SchemeError, match="the prompt is empty"):
            model.generate(prompt)


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    assert llm.generate(ids).tokens == llm.generate("Hello").tokens
    assert llm.generate(ids[1:]).prompt_tokens == len(ids) - 1  # no BOS is added


def test_list_of_prompts_gives_a_list_of_completions(llm: LLM) -> None:
    prompts, sampling = ["a", "Hello", "another one"], Sampling(max_tokens=9)
    done = llm.generate(prompts, sampling)
    assert [d.tokens for d in done] == [llm.generate(p, sampling).tokens for p in prompts]
    assert len({tuple(d.tokens) for d in done}) == 3


def test_list_of_prompts_runs_side_by_side(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from crelle.engine.model_runner import ModelRunner

    batches, run = list[int](), ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda self, step: (batches.append(len(step.chunks)), run(self, step))[1])
    done = llm.generate([[65, 66], [67], [68, 69, 70]], Sampling(max_tokens=5))
    assert [d.prompt_tokens for d in done] == [2, 1, 3]
    assert batches == [3] * 5


def test_list_of_prompts_takes_a_sampling_for_each(llm: LLM) -> None:
    samplings = [Sampling(max_tokens=3), Sampling(max_tokens=7, temperature=1.0, seed=5)]
    one, two = llm.generate(["Hello", "a"], samplings)
    assert (len(one.tokens), len(two.tokens)) == (3, 7)
    assert llm.generate(["a"], samplings[1:])[0].tokens == two.tokens
    with pytest.raises(SchemeError, match="2 prompts, but 1 Samplings"):
        llm.generate(["Hello", "a"], samplings[:1])
    with pytest.raises(SchemeError, match="one prompt takes one Sampling"):
        llm.generate("Hello", samplings)  # type: ignore[call-overload]


def test_one_bad_prompt_of_a_list_is_a_sentence(llm: LLM) -> None:
    with pytest.raises(CapacityError, match=f"the model's context of {CONTEXT}"):
        llm.generate(["Hello", "a" * CONTEXT])
    with pytest.raises(SchemeError, match="the prompt is empty"):
        llm.generate([[65], []])


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_pieces_joined_are_the_completion(llm: LLM, temperature: float) -> None:
    pieces = list(llm.stream("Hello", Sampling(max_tokens=60, temperature=temperature, seed=2)))
    assert [p.completion is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]
    done = pieces[-1].completion
    assert "".join(p.text for p in pieces) == done.text == llm.tokenizer.decode(done.tokens)


def test_stream_is_lazy(llm: LLM) -> None:
    pieces = llm.stream("Hello", Sampling(**LIVELY))
    assert next(pieces).text
    assert next(pieces).completion is None


def test_streams_side_by_side_do_not_disturb_each_other(llm: LLM) -> None:
    one, two = (Sampling(**{**LIVELY, "seed": seed}) for seed in (1, 2))
    pairs = list(zip_longest(llm.stream("Hello", one), llm.stream("Another", two)))
    texts = ["".join(p.text for p in column if p) for column in zip(*pairs, strict=True)]
    assert texts == [llm.generate("Hello", one).text, llm.generate("Another", two).text]


def test_same_seed_gives_the_same_text_and_another_seed_another(llm: LLM) -> None:
    a, b, c = (llm.generate("Hello", Sampling(**{**LIVELY, "seed": s})).tokens for s in (1, 1, 2))
    assert a == b != c


def test_repetition_penalty_counts_the_prompt(llm: LLM) -> None:
    first = llm.generate("Hello", Sampling(max_tokens=1)).tokens[0]
    ids = [first, *llm.tokenizer.encode("Hello")[1:]]
    assert llm.generate(ids, Sampling(max_tokens=5, repetition_penalty=1e6)).tokens.count(first) == 0


def test_timings_are_of_this_call(llm: LLM) -> None:
    done = llm.generate("Hello", Sampling(max_tokens=20))
    assert done.first_token_seconds > 0
    assert done.tokens_per_second > 0
    assert llm.generate("Hello", Sampling(max_tokens=1)).tokens_per_second == 0.0


# What ends a text --------------------------------------------------------------------------------------------------


def distinct_token(llm: LLM) -> tuple[list[int], int, int]:
    """Return the tokens of a lively text, one of them that is not the first, and where it stands first."""
    tokens = llm.generate("Hello", Sampling(**LIVELY)).tokens
    token = next(t for t in tokens[5:] if t not in tokens[:5])
    return tokens, token, tokens.index(token)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("others", [[], [1, 258]])
def test_end_token_ends_the_text_and_is_not_part_of_it(
    file: str, others: list[int], llm: LLM, tiny_model: Path, tmp_path: Path
) -> None:
    tokens, token, at = distinct_token(llm)
    said = [*others, token] if others else token
    done = copy_with(tiny_model, tmp_path, file, eos_token_id=said).generate("Hello", Sampling(**LIVELY))
    assert (done.tokens, done.finish_reason) == (tokens[:at], "stop")
    assert done.text == llm.tokenizer.decode(tokens[:at])


def test_end_token_at_once_gives_an_empty_completion(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    first = llm.generate("Hello", Sampling(max_tokens=1)).tokens[0]
    done = copy_with(tiny_model, tmp_path, "config.json", eos_token_id=first).generate("Hello")
    assert (done.tokens, done.text, done.finish_reason) == ([], "", "stop")


def test_model_without_an_end_token_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    model = copy_with(tiny_model, tmp_path, "config.json", eos_token_id=None)
    assert model.end_ids == frozenset()
    assert model.generate("Hello", Sampling(max_tokens=20)).finish_reason == "length"


def stop_strings(text: str) -> list[str]:
    """Substrings of a text, of one to three whole characters."""
    found = [text[i : i + n] for i in range(2, len(text) - 3, 4) for n in (1, 2, 3)]
    return [s for s in found if "\N{REPLACEMENT CHARACTER}" not in s]


def test_stop_string_ends_the_text_and_does_not_leak(llm: LLM) -> None:
    whole = llm.generate("Hello", Sampling(**LIVELY))
    stops = stop_strings(whole.text)
    assert len(stops) > 5
    for stop in stops:
        pieces = list(llm.stream("Hello", Sampling(**LIVELY, stop=(stop, "never said"))))
        done = pieces[-1].completion
        assert "".join(p.text for p in pieces) == done.text == whole.text[: whole.text.find(stop)]
        assert done.finish_reason == "stop"
        assert done.tokens == whole.tokens[: len(done.tokens)]


def test_of_several_stop_strings_the_earliest_wins(llm: LLM) -> None:
    whole = llm.generate("Hello", Sampling(**LIVELY)).text
    stops = stop_strings(whole)[:6]
    done = llm.generate("Hello", Sampling(**LIVELY, stop=tuple(reversed(stops))))
    assert done.text == whole[: min((whole.find(s) + len(s), whole.find(s)) for s in stops)[1]]


def test_stop_string_that_never_comes_changes_nothing(llm: LLM) -> None:
    whole = llm.generate("Hello", Sampling(**LIVELY))
    done = llm.generate("Hello", Sampling(**LIVELY, stop=(whole.text[-1] + "never said",)))
    assert (done.text, done.tokens, done.finish_reason) == (whole.text, whole.tokens, whole.finish_reason)


# Chat, loading -----------------------------------------------------------------------------------------------------


def test_chat_continues_the_written_conversation(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    pieces = list(llm.chat(talk, Sampling(max_tokens=12)))
    expected = llm.generate(llm.tokenizer.encode_chat(talk), Sampling(max_tokens=12))
    assert "".join(p.text for p in pieces) == expected.text
    assert pieces[-1].completion.tokens == expected.tokens


def test_quantized_checkpoint_has_the_same_tokenizer_and_end_tokens(tiny_model: Path, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    quantize(source, tmp_path / "q", "rtn:bits=8,group=24")
    before, after = LLM.load(source, device="cpu"), LLM.load(tmp_path / "q", device="cpu")
    assert after.end_ids == before.end_ids == {7, 8, 258}
    assert after.tokenizer.encode_chat([{"role": "user", "content": "é"}]) == before.tokenizer.encode_chat(
        [{"role": "user", "content": "é"}]
    )


def test_threads_are_set_or_refused(tiny_model: Path) -> None:
    before = torch.get_num_threads()
    try:
        LLM.load(tiny_model, device="cpu", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        set_threads(before)
    with pytest.raises(SchemeError, match="threads must be at least 1, got 0"):
        LLM.load(tiny_model, threads=0)


def test_stories15m_continues_with_the_space_between_the_words(data: Path) -> None:
    stories = LLM.load(data / "stories15M", device="cpu")
    assert stories.generate("Once upon a time, there was a", Sampling(max_tokens=3)).text == " little girl named"


def test_a_checkpoint_made_for_a_cache_is_loaded_with_it(tiny_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = CalibrationData(text="Once upon a time there was a cache of four bits. " * 20, rows=2, length=16)
    quantize(tiny_model, made, "atom:a=8,kv=4,group=12,outliers=4", text=text, device="cpu")
    assert LLM.load(made, device="cpu").kv == KVFormat.parse(4)
    assert LLM.load(made, device="cpu", kv=16).kv == KVFormat.parse(16)
    assert LLM.load(tiny_model, device="cpu").kv == KVFormat.parse(16)


def test_sampling_options_may_be_given_as_keywords(llm: LLM) -> None:
    assert llm.generate("Hello", max_tokens=24).tokens == llm.generate("Hello", Sampling(max_tokens=24)).tokens
    many = llm.generate(["Hello", "You"], max_tokens=3, stop="x")
    assert [c.tokens for c in many] == [
        c.tokens for c in llm.generate(["Hello", "You"], Sampling(max_tokens=3, stop=("x",)))
    ]
    with pytest.raises(SchemeError, match="no sampling option 'max_new_tokens'; there are max_tokens, temperature"):
        llm.generate("Hello", max_new_tokens=3)
    with pytest.raises(SchemeError, match="max_tokens and a Sampling were given"):
        llm.generate("Hello", Sampling(), max_tokens=3)
    with pytest.raises(SchemeError, match=r"wrong type: \{'max_tokens': 'many'\}"):
        llm.generate("Hello", max_tokens="many")
