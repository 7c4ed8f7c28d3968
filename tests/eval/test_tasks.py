"""Accuracy on tasks: log-likelihoods against plain torch, each type of task, resumption, paired test, bad input."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy
from transformers import AutoModelForCausalLM

from crelle import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError, CrelleError, FormatError, NumericsError, SchemeError
from crelle.eval.tasks import loglikelihood, scoring
from crelle.eval.tasks.items import read_items
from crelle.eval.tasks.journal import ItemResult
from crelle.eval.tasks.loglikelihood import encode_pair, loglikelihoods
from crelle.eval.tasks.paired import mcnemar, paired, standard_error
from crelle.eval.tasks.scoring import compare, score_task, summarize
from crelle.eval.tasks.spec import TaskSpec, find_task, known_tasks

BOS = 256
Pair = tuple[str, str]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


@pytest.fixture(scope="module")
def peer(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def piqa_lines(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    words = [f"{draw.choice(['cut', 'fold', 'naïve', 'burn'])} it {'x' * draw.randrange(12)}" for _ in range(2 * count)]
    return [
        {"query": f"Q: {i * 37}?\n", "choices": words[2 * i : 2 * i + 2], "gold": draw.randrange(2)}
        for i in range(count)
    ]


def task(folder: Path, lines: Sequence[dict[str, Any]], name: str = "piqa", yaml: str | None = None) -> TaskSpec:
    write_lines(folder / f"{name}.jsonl", lines)
    if yaml is not None:
        (folder / f"{name}.yaml").write_text(yaml)
    return find_task(name, folder)


def plain_score(peer: Any, prompt: str, ending: str) -> tuple[float, bool]:
    """Return log p(ending | prompt) of one sequence alone by transformers' model in f64, and whether it is greedy."""
    ids = [BOS, *encoded(prompt + ending)]
    with torch.inference_mode():
        log_p = peer(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    at = range(1 + len(encoded(prompt)), len(ids))
    return sum(float(log_p[t - 1, ids[t]]) for t in at), all(int(log_p[t - 1].argmax()) == ids[t] for t in at)


def encoded(text: str) -> list[int]:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    (piece, _), *_ = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text) or [("", None)]
    return [alphabet.index(c) for c in piece]


def test_loglikelihoods_are_those_of_each_sequence_alone(llm: LLM, peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[Pair] = [("Q: how?\nA:", f" {'ab' * n}") for n in range(1, 9)] + [
        ("", "naïve 漢"),
        ("x", "y"),
        ("x", "z"),
    ]
    found = loglikelihoods(llm, [encode_pair(llm, *pair) for pair in pairs])
    for score, pair in zip(found, pairs, strict=True):
        expected, greedy = plain_score(peer, *pair)
        assert score.loglikelihood == pytest.approx(expected, rel=1e-5)
        assert score.greedy == greedy
    monkeypatch.setitem(loglikelihood._LOGITS, "cpu", 4 * 259 * 20)  # 20 tokens a batch: many batches, and single rows
    again = loglikelihoods(llm, [encode_pair(llm, *pair) for pair in pairs])
    assert [s.loglikelihood for s in again] == pytest.approx([s.loglikelihood for s in found], rel=1e-5)


@pytest.mark.parametrize("kv", [16, 4])
def test_quantized_models_score_padded_rows_as_single_ones(tiny_model: Path, tmp_path: Path, kv: int) -> None:
    coded = LLM.load(quantized_copy(tiny_model, tmp_path / "q", "rtn:bits=4,group=24"), device="cpu", kv=kv)
    pairs = [encode_pair(coded, "Q: how?\nA:", f" {'ab' * n}") for n in range(1, 6)]
    together = [s.loglikelihood for s in loglikelihoods(coded, pairs)]
    alone = [loglikelihoods(coded, [pair])[0].loglikelihood for pair in pairs]
    assert together == pytest.approx(alone, rel=1e-6)


def test_rows_that_are_the_same_run_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = llm.model.forward
    monkeypatch.setattr(llm.model, "forward", lambda ids, *a, **k: seen.append(len(ids)) or forward(ids, *a, **k))
    loglikelihoods(llm, [encode_pair(llm, "is it?", ending) for ending in "yn?"])
    assert seen == [1]


def test_white_space_behind_a_prompt_belongs_to_the_ending(llm: LLM) -> None:
    assert encode_pair(llm, "A: ", "yes") == encode_pair(llm, "A:", " yes")
    assert encode_pair(llm, "A:", " yes").start == 3


def test_multiple_choice_is_judged_by_the_sum_and_by_the_mean(llm: LLM, peer: Any, tmp_path: Path) -> None:
    lines = piqa_lines(40)
    spec = task(tmp_path, lines)
    results = score_task(llm, spec)
    plain, norm = [], []
    for line, result in zip(lines, results, strict=True):
        scores = [plain_score(peer, line["query"] + "Answer:", f" {choice}")[0] for choice in line["choices"]]
        assert result.loglikelihoods == pytest.approx(scores, rel=1e-5)
        plain.append(scores.index(max(scores)) == line["gold"])
        each = [score / len(choice) for score, choice in zip(scores, line["choices"], strict=True)]
        norm.append(each.index(max(each)) == line["gold"])
    assert plain != norm  # else this would not tell them apart
    figures = summarize(spec, results)
    p = sum(plain) / 40
    assert (figures.accuracy, figures.accuracy_norm, figures.items) == (p, sum(norm) / 40, 40)
    assert figures.stderr == pytest.approx(math.sqrt(p * (1 - p) / 39))


def test_shared_ending_is_scored_behind_each_prompt(llm: LLM, peer: Any, tmp_path: Path) -> None:
    options = ["Ann thanked Bob because Ann", "Ann thanked Bob because Bob"]
    spec = task(tmp_path, [{"context_options": options, "continuation": "helped.", "gold": 1}], "winogrande")
    (result,) = score_task(llm, spec)
    scores = [plain_score(peer, option, " helped.")[0] for option in options]
    assert result.loglikelihoods == pytest.approx(scores, rel=1e-5)
    assert (result.correct, result.correct_norm) == (scores[1] > scores[0], None)
    assert summarize(spec, [result]).stderr is None


def test_last_word_has_the_likelihood_of_its_tokens(llm: LLM, peer: Any, tmp_path: Path) -> None:
    texts = [f"The {word} went  home " for word in ("cat", "dog", "漢字")]
    spec = task(tmp_path, [{"text": t} for t in texts], "lambada", 'type: last_word\ntext: "{text}"\n')
    results = score_task(llm, spec)
    for text, result in zip(texts, results, strict=True):
        expected, _ = plain_score(peer, text.rstrip()[:-6], "  home")
        assert (result.correct, result.loglikelihoods) == (False, pytest.approx([expected], rel=1e-5))
    mean = sum(r.loglikelihoods[0] for r in results) / 3
    assert summarize(spec, results).perplexity == pytest.approx(math.exp(-mean))


def test_last_word_is_right_where_all_of_it_is_greedy(tiny_model: Path, tmp_path: Path) -> None:
    knowing = LLM.load(tiny_model, device="cpu")
    ids = torch.tensor([*knowing.tokenizer.encode("they went home"), 0])
    knowing.model.forward = lambda rows, *_, **__: torch.eye(259)[ids[1 : 1 + rows.shape[1]]].expand(len(rows), -1, -1)
    texts = ["they went home", "they went hope", "they went to me"]
    spec = task(tmp_path, [{"text": t} for t in texts], "lambada", 'type: last_word\ntext: "{text}"\n')
    assert [r.correct for r in score_task(knowing, spec)] == [True, False, False]


def test_generated_text_is_matched_exactly(llm: LLM, tmp_path: Path) -> None:
    said = [llm.generate(f"Q{i}:", Sampling(max_tokens=3)).text.strip() for i in range(3)]
    lines = [{"q": "Q0", "a": said[0]}, {"q": "Q1", "a": [f"{said[1]}!", said[1]]}, {"q": "Q2", "a": f"{said[2]}!"}]
    spec = task(tmp_path, lines, "own", 'type: generate\nprompt: "{q}:"\nanswer: a\nmax_tokens: 3\nstop: ["!!!!"]\n')
    results = score_task(llm, spec)
    assert [(r.correct, (r.text or "").strip()) for r in results] == list(zip([True, True, False], said, strict=True))


def test_built_in_tasks_read_the_real_data(data: Path) -> None:
    sizes = {"piqa": 1838, "arc_easy": 2376, "arc_challenge": 1172, "winogrande": 1267, "boolq": 3270}
    sizes["lambada_openai"] = 5153
    for name, count in sizes.items():
        items = read_items(find_task(name, data / "tasks"))
        assert len(items) == count
        assert all(not p.endswith(" ") and e[0].isspace() for item in items for p, e in item.pairs)
    assert read_items(find_task("piqa", data / "tasks"))[1].pairs[0] == (
        "Question: dresser\nAnswer:",
        " replace drawer with bobby pin",
    )
    (prompt, word), *_ = read_items(find_task("lambada_openai", data / "tasks"))[0].pairs
    assert (prompt[-16:], word) == ("don't care about", " signs")


def test_own_description_goes_before_the_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "piqa.yaml").write_text('type: last_word\ntext: "{text}"\ndata: other.jsonl\n')
    spec = find_task("piqa", tmp_path)
    assert (spec.type, spec.data.name) == ("last_word", "other.jsonl")
    assert known_tasks(tmp_path) == ["arc_challenge", "arc_easy", "boolq", "lambada_openai", "piqa", "winogrande"]


class StoppedError(Exception):
    """Ends a run between two groups of items."""


def test_rerun_scores_only_what_is_missing(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_ITEMS", 4)
    spec, kept = task(tmp_path, piqa_lines(10)), tmp_path / "kept"
    whole = score_task(llm, spec)

    def stop(done: int, total: int, note: str) -> None:
        assert total == 10
        raise StoppedError

    with pytest.raises(StoppedError):
        score_task(llm, spec, results=kept, progress=stop)
    (partial,) = kept.iterdir()
    assert partial.name.endswith(".partial.jsonl")
    partial.write_bytes(partial.read_bytes() + b'{"line": 3, "corr')  # killed while it wrote
    seen: list[int] = []
    assert score_task(llm, spec, results=kept, progress=lambda done, *_: seen.append(done)) == [
        ItemResult(r.line, r.correct, r.correct_norm, pytest.approx(r.loglikelihoods, rel=1e-6)) for r in whole
    ]
    assert seen == [8, 10]
    (done,) = kept.iterdir()
    assert done.name == partial.name.replace(".partial", "")
    seen.clear()
    assert len(score_task(llm, spec, results=kept, limit=3, progress=lambda done, *_: seen.append(done))) == 3
    assert seen == []


def test_limited_run_stays_partial_and_a_longer_one_goes_on(llm: LLM, tmp_path: Path) -> None:
    spec, kept, seen = task(tmp_path, piqa_lines(6)), tmp_path / "kept", []
    score_task(llm, spec, limit=2, results=kept)
    assert [f.name.endswith(".partial.jsonl") for f in kept.iterdir()] == [True]
    score_task(llm, spec, limit=5, results=kept, progress=lambda done, total, _: seen.append((done, total)))
    assert seen == [(5, 5)]
    assert sum(len(f.read_text().splitlines()) for f in kept.iterdir()) == 1 + 5
    for other in (LLM.load(llm.weights.path, device="cpu", kv=8), llm):
        write_lines(spec.data, piqa_lines(5) if other is llm else piqa_lines(6))
        score_task(other, spec, limit=1, results=kept)
    assert len(list(kept.iterdir())) == 3  # another cache and other data have files of their own


def test_killed_run_goes_on(tiny_model: Path, llm: LLM, tmp_path: Path) -> None:
    spec, kept = task(tmp_path, piqa_lines(70)), tmp_path / "kept"
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom crelle import LLM\n"
        "from crelle.eval.tasks.scoring import score_task\nfrom crelle.eval.tasks.spec import find_task\n"
        "model, data, kept = map(Path, sys.argv[1:])\n"
        "die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "score_task(LLM.load(model, device='cpu'), find_task('piqa', data), results=kept, progress=die)\n"
    )
    process = subprocess.run([sys.executable, "-c", script, tiny_model, tmp_path, kept], timeout=300, env=os.environ)
    assert process.returncode == -signal.SIGKILL
    (partial,) = kept.iterdir()
    assert len(partial.read_text().splitlines()) == 1 + 32
    seen: list[int] = []
    results = score_task(llm, spec, results=kept, progress=lambda done, *_: seen.append(done))
    assert (seen, [r.line for r in results]) == ([64, 70], list(range(1, 71)))
    assert not list(kept.glob("*.partial.jsonl"))


def test_damaged_or_busy_results_are_refused(llm: LLM, tmp_path: Path) -> None:
    spec, kept = task(tmp_path, piqa_lines(3)), tmp_path / "kept"
    score_task(llm, spec, limit=1, results=kept)
    (partial,) = kept.iterdir()
    before = partial.read_bytes()

    def again(*_: object) -> None:
        with pytest.raises(FormatError, match=r"another run is writing .*\.partial\.jsonl"):
            score_task(llm, spec, results=kept)

    score_task(llm, spec, limit=2, results=kept, progress=again)
    for wrong, sentence in (
        (before + b'{"line": 2}\n', "line 3, is not the result of an item"),
        (before + b"?\n", "line 3, is not valid JSON"),
        (b"{}\n", "holds results of something else"),
    ):
        partial.write_bytes(wrong)
        with pytest.raises(FormatError, match=sentence):
            score_task(llm, spec, results=kept)


def test_paired_by_hand() -> None:
    """Both right, only the model (1), only the other (3), both wrong: difference -2/8."""
    model = [True, True, True, False, False, False, False, False]
    other = [True, True, False, True, True, True, False, False]
    found = paired(model, other)
    assert (found.difference, found.only_model, found.only_other) == (-0.25, 1, 3)
    assert found.p_value == pytest.approx(2 * (1 + 4) / 16)  # of 4 that changed, at most 1 of one kind
    squares = (1 + 0.25) ** 2 + 3 * (-1 + 0.25) ** 2 + 4 * 0.25**2
    assert found.stderr == pytest.approx(math.sqrt(squares / 7 / 8))


def test_paired_test_at_its_ends() -> None:
    assert (mcnemar(0, 0), mcnemar(3, 3)) == (1.0, 1.0)
    assert mcnemar(0, 10) == mcnemar(10, 0) == 2 / 1024
    assert 0 < mcnemar(1000, 1200) < 1e-4  # floats would overflow
    assert (standard_error([1.0]), standard_error([1.0, 1.0])) == (None, 0.0)


def test_compared_models_share_their_items(llm: LLM, tmp_path: Path) -> None:
    spec = task(tmp_path, piqa_lines(8))
    results = score_task(llm, spec)
    plain, norm = compare(results, results)
    assert norm is not None
    assert (plain.difference, plain.p_value, norm.difference) == (0, 1, 0)


GOOD = {"query": "Q\n", "choices": ["a", "b"], "gold": 0}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"query": "Q", "choices": ["a", "b"]}, r"piqa\.jsonl, line 2: the field 'gold' is missing"),
        ({"choices": ["a", "b"], "gold": 0}, "line 2: the field 'query' is missing"),
        (GOOD | {"gold": 2}, "the field 'gold' should be a number from 0 to 1, not 2"),
        (GOOD | {"gold": True}, "the field 'gold' should be a number"),
        (GOOD | {"choices": ["a"]}, "the field 'choices' should be a list of at least 2 strings"),
        (GOOD | {"choices": ["a", ""]}, "the field 'choices' should be a list of at least 2 strings"),
        (GOOD | {"query": 7}, "the field 'query' should be a string, not 7"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        read_items(task(tmp_path, [GOOD, line]))


def test_data_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").write_text(json.dumps(GOOD) + "\n\n{broken\n")
    with pytest.raises(FormatError, match=r"piqa\.jsonl, line 3, is not valid JSON"):
        read_items(find_task("piqa", tmp_path))
    (tmp_path / "piqa.jsonl").write_text("\n")
    with pytest.raises(FormatError, match="has no items"):
        read_items(find_task("piqa", tmp_path))
    (tmp_path / "piqa.jsonl").unlink()
    with pytest.raises(FormatError, match=r"piqa\.jsonl does not exist"):
        read_items(find_task("piqa", tmp_path))


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ("type: [", "is not valid YAML"),
        ("- a", "should hold settings"),
        ("type: quiz", "'type' should be one of multiple_choice, shared_ending, last_word, generate, not 'quiz'"),
        ("type: multiple_choice\nprompt: a\nchoices: b", "a task of type multiple_choice needs 'answer'"),
        ("type: last_word\ntext: a\nstop: [b]", "last_word has no setting 'stop'"),
        ("type: last_word\ntext: 7", "'text' should be a string, not 7"),
        ("type: generate\nprompt: a\nanswer: b\nmax_tokens: 0", "'max_tokens' should be a number from 1 on, not 0"),
        ("type: generate\nprompt: a\nanswer: b\nmax_tokens: 1\nstop: c", "'stop' should be a list of strings"),
        ("type: last_word\ntext: a\ndata: ../b.jsonl", "'data' should be the name of a file beside it"),
        ("type: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_wrong_descriptions_are_named(tmp_path: Path, yaml: str, sentence: str) -> None:
    (tmp_path / "own.yaml").write_text(yaml)
    with pytest.raises(FormatError, match=rf"own\.yaml.*{sentence}"):
        find_task("own", tmp_path)


def test_unknown_task_and_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("type: last_word\ntext: a\n")
    known = "arc_challenge, arc_easy, boolq, lambada_openai, own, piqa, winogrande"
    for name in ("piqua", "../piqa", "", "a\0b"):
        with pytest.raises(SchemeError, match=rf"there is no task .* known are {known}"):
            find_task(name, tmp_path)
    with pytest.raises(FormatError, match="nowhere is not a folder"):
        find_task("piqa", tmp_path / "nowhere")


def test_what_the_model_cannot_read_is_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    def refused(
        error: type[CrelleError], sentence: str, line: dict[str, Any], name: str = "piqa", yaml: str = ""
    ) -> None:
        with pytest.raises(error, match=sentence):
            score_task(llm, task(tmp_path, [line], name, yaml or None))

    long = GOOD | {"query": "x" * 87}  # BOS, 87, "Answer:" and " a" are 97, of which the last is only predicted
    assert score_task(llm, task(tmp_path, [long]))
    longer = GOOD | {"query": "x" * 88}
    refused(
        CapacityError, "line 1: a prompt with its ending of 97 tokens does not fit the model's context of 96", longer
    )
    yaml = 'type: generate\nprompt: "{q}"\nanswer: q\nmax_tokens: 90\n'
    refused(CapacityError, "a prompt of 8 tokens with 90 to generate does not fit", {"q": "1234567"}, "own", yaml)
    refused(FormatError, "at least two words", {"q": "word "}, "last", 'type: last_word\ntext: "{q}"\n')
    with pytest.raises(SchemeError, match="`limit` must be at least 1, got 0"):
        score_task(llm, task(tmp_path, [GOOD]), limit=0)


def test_empty_prompt_needs_a_bos(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    spec = task(tmp_path, [GOOD], "own", "type: multiple_choice\nprompt: ' '\nchoices: choices\nanswer: gold\n")
    assert score_task(llm, spec)
    bare = Path(shutil.copytree(tiny_model, tmp_path / "bare"))
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    with pytest.raises(
        SchemeError, match=r"own\.jsonl, line 1: the prompt is empty, and this model's tokenizer adds no"
    ):
        score_task(LLM.load(bare, device="cpu"), spec)


def test_logits_that_are_not_finite_are_an_error(tiny_model: Path, tmp_path: Path) -> None:
    broken = LLM.load(tiny_model, device="cpu")
    broken.model.forward = lambda ids, *_, **__: torch.full((*ids.shape, 259), math.nan)
    with pytest.raises(NumericsError, match=r"logits are not finite for line 1 of .*piqa\.jsonl"):
        score_task(broken, task(tmp_path, [GOOD]), results=tmp_path / "kept")
    assert all(len(f.read_text().splitlines()) == 1 for f in (tmp_path / "kept").iterdir())
