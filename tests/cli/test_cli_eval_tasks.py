"""crelle eval --tasks and --against: figures, tables, resumption, and a sentence for every wrong option."""

import json
from pathlib import Path

import pytest
from conftest import quantized_copy
from in_process import run, succeed

from crelle import LLM
from crelle.eval.tasks.paired import mcnemar
from crelle.eval.tasks.scoring import score_task, summarize
from crelle.eval.tasks.spec import find_task

LINES = [{"query": f"Q {i}\n", "choices": ["one", "two, or so"], "gold": i % 2} for i in range(12)]
PLACES = [{"context_options": [f"{i} a", f"{i} b"], "continuation": "fell.", "gold": i % 2} for i in range(5)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, lines in (("piqa", LINES), ("winogrande", PLACES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def coded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_copy(tiny_model, tmp_path_factory.mktemp("coded") / "q", "rtn:bits=2,group=24")


def test_the_command_tells_what_the_function_does(tiny_model: Path, tasks: Path) -> None:
    options = ("--tasks", "piqa,winogrande,piqa", "--data", tasks, "--device", "cpu")
    seen = succeed("eval", tiny_model, *options, "--json").json
    llm = LLM.load(tiny_model, device="cpu")
    for name in ("piqa", "winogrande"):
        spec = find_task(name, tasks)
        figures = summarize(spec, score_task(llm, spec))
        assert seen["tasks"][name]["accuracy"] == figures.accuracy
        assert seen["tasks"][name]["stderr"] == pytest.approx(figures.stderr)
        assert seen["tasks"][name]["accuracy_norm"] == figures.accuracy_norm
    assert (seen["tasks"]["piqa"]["items"], seen["tasks"]["winogrande"]["items"]) == (12, 5)
    shown = succeed("eval", tiny_model, *options).out
    assert f"{100 * seen['tasks']['piqa']['accuracy']:.1f} ±" in shown


def test_two_models_are_compared_in_pairs(tiny_model: Path, coded: Path, tasks: Path, tmp_path: Path) -> None:
    options = ("--tasks", "piqa", "--data", tasks, "--device", "cpu", "--against", tiny_model, "--results", tmp_path)
    figures = succeed("eval", coded, *options, "--json").json["tasks"]["piqa"]
    pair = figures["against"]["paired"]
    assert pair["difference"] == pytest.approx(figures["accuracy"] - figures["against"]["accuracy"])
    assert pair["p_value"] == mcnemar(pair["only_model"], pair["only_other"])
    norm = figures["against"]["paired_norm"]["difference"]
    assert norm == pytest.approx(figures["accuracy_norm"] - figures["against"]["accuracy_norm"])
    kept = sorted(tmp_path.iterdir())
    assert [f.name.partition("-")[0] for f in kept] == ["piqa", "piqa"]  # one of each model
    before = [f.read_bytes() for f in kept]
    assert succeed("eval", coded, *options, "--json").json["tasks"]["piqa"] == figures
    assert [f.read_bytes() for f in kept] == before
    assert f"{100 * pair['difference']:+.1f}" in succeed("eval", coded, *options).out


def test_text_is_compared_by_divergence(tiny_model: Path, coded: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 6)
    options = ("--text", tmp_path / "text.txt", "--context", 64, "--device", "cpu", "--against", tiny_model)
    seen = succeed("eval", coded, *options, "--json").json
    alone = succeed("eval", coded, *options[:-2], "--json").json
    assert seen["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-5)
    found = seen["against"]
    assert 0 < found["kl_mean"] < found["kl_p99"] <= found["kl_max"]
    assert found["ratio"] == pytest.approx(seen["perplexity"] / found["perplexity"])
    shown = succeed("eval", coded, *options).out
    assert f"top-1 agreement {found['top1_agreement']:.2%}" in shown
    assert f"KL mean {found['kl_mean']:.4g}" in shown


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--tasks piqa", "--tasks needs --data"),
        ("--data DATA", "--data needs --tasks"),
        ("--limit 3", "--limit needs --tasks"),
        ("--results here", "--results needs --tasks"),
        ("--tasks piqa --data DATA --text a.txt", "--text applies to perplexity and --tasks to accuracy"),
        ("--tasks piqa --data DATA --kl", "--kl applies to perplexity"),
        ("--tasks piqa --data DATA --kl-limit 0", "--kl applies to perplexity"),
        ("--tasks piqa --data DATA --tokens 5", "--tokens applies to perplexity"),
        ("--tasks piqa --data DATA --no-bos", "--no-bos applies to perplexity"),
        ("--against MODEL --kl", "--against compares two models and --kl two caches"),
        (
            "--tasks piqa,hellaswag --data DATA",
            "there is no task 'hellaswag'; known are arc_challenge, arc_easy, boolq, lam",
        ),
        ("--tasks piqa --data nowhere", "nowhere is not a folder"),
        ("--tasks boolq --data DATA", "boolq.jsonl does not exist"),
        ("--tasks piqa --data DATA --limit 0", "--limit must be at least 1, got 0"),
        ("--tasks piqa --data DATA --against nowhere", "nowhere"),
    ],
)
def test_wrong_options_end_in_a_sentence(tiny_model: Path, tasks: Path, options: str, sentence: str) -> None:
    words = [{"DATA": tasks, "MODEL": tiny_model}.get(word, word) for word in options.split()]
    refused = run("eval", tiny_model, *words, "--device", "cpu")
    assert refused.code == 2
    assert sentence in refused.err
    assert "Traceback" not in refused.err
