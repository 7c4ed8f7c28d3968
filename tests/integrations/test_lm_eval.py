"""Crelle as a model of the real lm-eval: `make test-lm-eval`, in an environment of its own.

Held against our own tasks item by item, and against lm-eval's model for transformers on the same weights.
"""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is no dependency: make test-lm-eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

from crelle import LLM  # noqa: E402
from crelle.errors import SchemeError, UnsupportedError  # noqa: E402
from crelle.eval.tasks.harness import prefix_id, rolling_windows  # noqa: E402
from crelle.eval.tasks.scoring import score_task, summarize  # noqa: E402
from crelle.eval.tasks.spec import find_task  # noqa: E402
from crelle.integrations.lm_eval import CrelleLM  # noqa: E402

PROMPTS = {"piqa": "{{query}}Answer:", "arc_easy": "{{query}}\nAnswer:"}


@pytest.fixture(scope="module")
def ours(tiny_model: Path) -> CrelleLM:
    return CrelleLM(str(tiny_model), device="cpu")


@pytest.fixture(scope="module")
def theirs(tiny_model: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(tiny_model), device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what datasets makes of our files out of the user's cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def asked(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]


def write_task(folder: Path, name: str, file: Path) -> None:
    metrics = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]
    task = {
        "task": f"local_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": PROMPTS[name],
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": metrics,
    }
    (folder / f"local_{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def random_items(count: int) -> str:
    draw = random.Random(0)
    lines = []
    for i in range(count):
        choices = [f"{draw.choice(['fold', 'naïve', 'burn'])} {'x' * draw.randrange(9)}it" for _ in range(3)]
        lines.append(json.dumps({"query": f"Q: {i * 37}?\n", "choices": choices, "gold": draw.randrange(3)}) + "\n")
    return "".join(lines)


def evaluate(model: str, arguments: str, folder: Path, tasks: list[str], limit: int | None = None) -> Any:
    return lm_eval.simple_evaluate(
        model,
        model_args=arguments,
        tasks=tasks,
        limit=limit,
        device="cpu",
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=1,  # 0 would leave the standard error out
    )


def compare(llm: LLM, found: Any, name: str, data: Path, limit: int | None) -> None:
    """Every item has the same log-likelihoods and is right or wrong alike; so the figures are equal."""
    spec = find_task(name, data)
    results = score_task(llm, spec, limit=limit)
    samples = sorted(found["samples"][f"local_{name}"], key=lambda s: s["doc_id"])
    assert len(samples) == len(results)
    for sample, result in zip(samples, results, strict=True):
        assert [x for x, _ in sample["filtered_resps"]] == pytest.approx(result.loglikelihoods, rel=1e-4)
        assert (bool(sample["acc"]), bool(sample["acc_norm"])) == (result.correct, result.correct_norm)
    figures, reported = summarize(spec, results), found["results"][f"local_{name}"]
    assert reported["acc,none"] == pytest.approx(figures.accuracy, abs=1e-12)
    assert reported["acc_norm,none"] == pytest.approx(figures.accuracy_norm, abs=1e-12)
    assert reported["acc_stderr,none"] == pytest.approx(figures.stderr, abs=1e-12)


@pytest.mark.parametrize("model", ["crelle", "hf"])
def test_task_figures_equal_ours_item_by_item(tiny_model: Path, tmp_path: Path, model: str) -> None:
    for name in PROMPTS:
        (tmp_path / f"{name}.jsonl").write_text(random_items(40))
        write_task(tmp_path, name, tmp_path / f"{name}.jsonl")
    arguments = f"pretrained={tiny_model}" + (",dtype=float32" if model == "hf" else "")
    found = evaluate(model, arguments, tmp_path, [f"local_{name}" for name in PROMPTS])
    for name in PROMPTS:
        compare(LLM.load(tiny_model, device="cpu"), found, name, tmp_path, None)


@pytest.mark.parametrize("name", list(PROMPTS))
@pytest.mark.parametrize("model", ["crelle", "hf"])
def test_task_figures_equal_ours_on_real_items(data: Path, tmp_path: Path, name: str, model: str) -> None:
    source = data / "stories15M"
    write_task(tmp_path, name, data / "tasks" / f"{name}.jsonl")
    arguments = f"pretrained={source}" + (",dtype=float32" if model == "hf" else "")
    found = evaluate(model, arguments, tmp_path, [f"local_{name}"], limit=20)
    compare(LLM.load(source, device="cpu"), found, name, data / "tasks", 20)


def test_loglikelihoods_are_those_of_lm_evals_own_model(ours: CrelleLM, theirs: Any) -> None:
    pairs = [("Q: how?\nA:", " so"), ("x  ", "y"), ("", "alone"), ("naïve", " 漢字"), ("long " * 40, "end")]
    pairs += [("<|bos|>Q", " a"), ("", "<|bos|>Q")]
    requests = asked("loglikelihood", pairs)
    for (mine, greedy), (expected, wanted) in zip(
        ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True
    ):
        assert mine == pytest.approx(expected, rel=1e-4)
        assert greedy == wanted


def test_rolling_windows_are_those_of_lm_eval(ours: CrelleLM, tiny_model: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    for limit in (1, 5, 32):
        text = "The quick brown fox jumps over the lazy dog."
        ids, prefix = ours.llm.tokenizer.encode(text, bos=False), prefix_id(ours.llm)
        expected = map(make_disjoint_window, get_rolling_token_windows(ids, prefix, limit, 1))
        found = [(list(w.ids[: w.start]), list(w.ids[w.start :])) for w in rolling_windows(ours.llm, text, limit)]
        assert found == [(list(a), list(b)) for a, b in expected]
    # Where the tokenizer adds BOS, lm-eval's model also predicts it, which ours takes as context only.
    plain = HFLM(str(tiny_model), device="cpu", dtype="float32", add_bos_token=False)
    requests = asked("loglikelihood_rolling", [("one two",), ("naïve café " * 30,)])
    found_totals, wanted = ours.loglikelihood_rolling(requests), plain.loglikelihood_rolling(requests)
    assert found_totals == pytest.approx(wanted, rel=1e-4)


def test_greedy_texts_are_those_of_lm_evals_own_model(ours: CrelleLM, theirs: Any) -> None:
    prompts = ["Once", "The quick brown fox", "naïve café " * 12, "<|bos|>Q"]
    free = theirs.generate_until(asked("generate_until", [(p, {"max_gen_toks": 12}) for p in prompts]))
    stop = next(text[4:6] for text in free if len(text) > 6)  # something that is generated
    for options in ({"max_gen_toks": 12}, {"max_gen_toks": 12, "until": [stop]}, {"max_gen_toks": 5, "until": stop}):
        requests = asked("generate_until", [(p, options) for p in prompts])
        assert ours.generate_until(requests) == theirs.generate_until(requests)


def test_a_cut_prompt_is_told_of(ours: CrelleLM, caplog: pytest.LogCaptureFixture) -> None:
    ours.loglikelihood(asked("loglikelihood", [("long " * 40, "end"), ("x", "y")]))
    assert "1 of 2 prompts are cut at the left to fit the context of 96" in caplog.text


def test_chats_go_through_the_models_template(ours: CrelleLM) -> None:
    text = ours.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|start|>user\nHi<|end|><|start|>assistant\n")
    with pytest.raises(UnsupportedError, match="gen_prefix"):
        ours.apply_chat_template([{"role": "assistant", "content": "So"}], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "name the model: --model_args pretrained=DIR"),
        ({"dtype": "float32"}, "Crelle has no model argument 'dtype'; there are pretrained, kv"),
        ({"max_length": 97}, "max_length must be 1 to 96, the model's context, got 97"),
    ],
)
def test_wrong_model_arguments_are_a_sentence(tiny_model: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemeError, match=re.escape(sentence)):
        CrelleLM(**({"pretrained": str(tiny_model)} if arguments else {}), **arguments)


def test_the_guides_example_runs(tiny_model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "evaluate.md").read_text(encoding="utf-8")
    section = page.split("## With lm-eval\n")[1].split("\n## ")[0]
    shell, yaml, python = re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)
    (tmp_path / "lm-eval").mkdir()
    (tmp_path / "lm-eval" / "my_piqa.yaml").write_text(yaml)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "piqa.jsonl").write_text(random_items(8))
    (tmp_path / "OUT").symlink_to(tiny_model)
    command = shlex.split(shell.replace("\\\n", " "))
    assert command[0] == "python"
    env = {**os.environ, "HF_HOME": str(tmp_path / "cache")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, *arguments]
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    done = run(*command[1:])
    assert done.returncode == 0, done.stderr
    assert "acc_norm" in done.stdout
    assert list((tmp_path / "scored").rglob("samples_my_piqa_*.jsonl"))
    refused = run(*(word.replace("kv=4", "kv=5") for word in command[1:]))
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("crelle: ")
    local = python.replace('tasks=["piqa"]', 'tasks=["my_piqa"], task_manager=manager, device="cpu"')
    setup = 'from lm_eval.tasks import TaskManager\nmanager = TaskManager(include_path="lm-eval")\n'
    program = f"{setup}{local}print(results['results']['my_piqa']['acc,none'])"
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout.splitlines()[-1]) <= 1
