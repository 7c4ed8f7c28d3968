"""AlphaTuning on a task: scores rise, codes stay, scales alone change the task; bad tasks are a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import run, succeed
from random_models import write_random
from wordpiece import write_wordpiece

from crelle import LLM, Embedder, quantize
from crelle.errors import CrelleError, FormatError
from crelle.eval.embedding_task import spearman, task_score
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.formats.storage.task_scales import save_scales
from crelle.models.calibration_model import open_model
from crelle.quantize_job.task import Task, read_task, tune_task
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.embedding_task import embeddings
from crelle.quantizers.training.end_to_end import Network

LINES: dict[str, list[dict[str, Any]]] = {
    "labels": [
        {"text": f"{who} {what} {where}", "label": label}
        for who, label in (("cat", "a"), ("dog", "b"))
        for what in ("runs", "sleeps")
        for where in (".", "on the mat .", "on a mat .", "on mat")
    ],
    "pairs": [
        {"text": f"{a} runs .", "text2": f"the {b} sleeps on a mat", "score": float(a == b)}
        for a in ("cat", "dog", "c", "d")
        for b in ("cat", "dog", "c", "d")
    ],
}
TRAINING = Training(steps=40, batch=8, rate=2e-2, scale_rate=2e-2, warmup=2)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wordpiece(write_random(tmp_path_factory.mktemp("bert") / "m", "Bert"))


def write_task(to: Path, kind: str) -> Path:
    to.write_text("\n".join(json.dumps(line) for line in LINES[kind]))
    return to


def shards(path: Path) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in Checkpoint(path).quantization["shards"].items()}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("scheme", ["bcq:bits=2,group=32,rounds=2", "rtn:bits=3,group=32"])
@pytest.mark.sample(2)
def test_scales_learn_a_task_and_are_all_that_changes(bert: Path, tmp_path: Path, kind: str, scheme: str) -> None:
    base = quantize(bert, tmp_path / "base", scheme).out
    task = read_task(write_task(tmp_path / "task", kind))
    before = task_score(Embedder.load(base), task)
    report = tune_task(base, task, tmp_path / "tuned", TRAINING, device="cpu")
    tuned = Embedder.load(report.out)
    assert task_score(tuned, task) > before
    assert sum(report.losses[-8:]) < 0.7 * sum(report.losses[:8])
    size = save_scales(Checkpoint(report.out), Checkpoint(base), tmp_path / "scales")
    assert size < 0.5 * sum(f.stat().st_size for f in base.glob("*.safetensors"))
    assert size < 2 * report.trained + 20_000  # f16, and the names
    switched = Embedder.load(base, scales=tmp_path / "scales")
    assert torch.equal(switched.embed(task.texts), tuned.embed(task.texts))
    assert not torch.equal(switched.embed(task.texts), Embedder.load(base).embed(task.texts))


def test_training_sees_the_embeddings_that_are_served(bert: Path, tmp_path: Path) -> None:
    """Padded to one length, in f32, as `crelle embed` computes them from batches of other lengths."""
    base = quantize(bert, tmp_path / "q", "rtn:bits=4,group=32").out
    embedder, texts = Embedder.load(base), [line["text"] for line in LINES["labels"]]
    ids = [embedder.encode(text) for text in texts]
    padded = torch.tensor([row + [7] * (12 - len(row)) for row in ids])
    with torch.no_grad():
        found = embeddings(Network.of(open_model(open_weights(base))), padded, torch.tensor([len(row) for row in ids]))
    torch.testing.assert_close(found, embedder.embed(texts), rtol=1e-3, atol=1e-3)


def test_command_line(bert: Path, tmp_path: Path) -> None:
    base = quantize(bert, tmp_path / "base", "bcq:bits=2,group=32,rounds=0").out
    task = write_task(tmp_path / "task.jsonl", "labels")
    options = ("--steps", 20, "--batch", 8, "--rate", 0.04, "--length", 16, "--device", "cpu")
    scales = tmp_path / "task.safetensors"
    found = succeed(
        "tune", base, tmp_path / "t", "--task", task, "--test", task, "--scales", scales, *options, "--json"
    ).json
    assert found["metric"] == "accuracy"
    assert found["after"] > found["before"]
    assert found["scales_bytes"] == scales.stat().st_size
    assert (tmp_path / "t" / "training.png").exists()
    by_scales = succeed("embed", base, "cat runs", "--scales", scales, "--json").json
    assert by_scales == succeed("embed", tmp_path / "t", "cat runs", "--json").json
    shown = succeed("tune", base, tmp_path / "u", "--task", task, "--test", task, *options).out.replace("\n", " ")
    assert "parameters trained in" in shown
    assert "accuracy from" in shown


def test_a_decoder_exchanges_scales_too(tiny_model: Path, tmp_path: Path) -> None:
    base, scales = quantize(tiny_model, tmp_path / "base", "bcq:bits=2,group=16,rounds=2").out, tmp_path / "scales"
    (tmp_path / "text").write_text("abcdefgh" * 400)
    options = ("--steps", 8, "--batch", 2, "--length", 32, "--rate", 0.05, "--device", "cpu")
    text = tmp_path / "text"
    found = succeed("tune", base, tmp_path / "t", "--text", text, "--scales", scales, *options, "--json").json
    assert found["scales_bytes"] == scales.stat().st_size
    ids = torch.tensor([[1, 5, 9, 33]])
    tuned, switched, plain = (
        llm.model(ids, llm.model.new_cache())
        for llm in (LLM.load(tmp_path / "t", device="cpu"), LLM.load(base, device="cpu", scales=scales), LLM.load(base))
    )
    assert torch.equal(switched, tuned)
    assert not torch.equal(switched, plain)
    ends = ("--prompt", "abc", "--max-tokens", 8, "--temperature", 0, "--device", "cpu", "--json")
    by_scales = succeed("generate", base, "--scales", scales, *ends).json["text"]
    assert by_scales == succeed("generate", tmp_path / "t", *ends).json["text"]


def test_tuning_is_the_same_every_time(bert: Path, tmp_path: Path) -> None:
    base = quantize(bert, tmp_path / "base", "bcq:bits=2,group=32,rounds=0").out
    task = read_task(write_task(tmp_path / "task", "pairs"))
    made = [tune_task(base, task, tmp_path / name, Training(steps=3, batch=4), device="cpu").out for name in "ab"]
    assert shards(made[0]) == shards(made[1])


def test_scales_of_another_checkpoint_are_refused(bert: Path, tmp_path: Path) -> None:
    bases = [quantize(bert, tmp_path / f"base{b}", f"rtn:bits={b},group=32").out for b in (3, 4)]
    task = read_task(write_task(tmp_path / "task", "labels"))
    tuned = tune_task(bases[0], task, tmp_path / "t", Training(steps=1, batch=2), device="cpu").out
    save_scales(Checkpoint(tuned), Checkpoint(bases[0]), tmp_path / "scales")
    with pytest.raises(FormatError, match="does not contain scales of"):
        Embedder.load(bases[1], scales=tmp_path / "scales")
    with pytest.raises(FormatError, match="has other codes in"):
        save_scales(Checkpoint(tuned), Checkpoint(bases[1]), tmp_path / "none")
    with pytest.raises(FormatError, match="no scales belong to it"):
        Embedder.load(bert, scales=tmp_path / "scales")
    (tmp_path / "odd").write_bytes(b"no scales")
    with pytest.raises(FormatError, match="not a safetensors file"):
        Embedder.load(bases[0], scales=tmp_path / "odd")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("{", "line 1 is not JSON"),
        ('{"text": "a"}', "should have text, text2 and score, or text and label"),
        ('{"text": "a", "label": ""}', "texts and labels should be text"),
        ('{"text": "a", "text2": "b", "score": 5}', "the score should be from 0 to 1, got 5"),
        ('{"text": "a", "text2": "b", "score": NaN}', "the score should be from 0 to 1"),
        ('{"text": "a", "label": "x"}', "2 to 1000 different labels, not 1"),
        ('{"text": "a", "label": "x"}\n{"text": "a", "text2": "b", "score": 1}', "lines of one kind"),
        ("", "lines of one kind"),
    ],
)
def test_tasks_that_are_none_are_a_sentence(tmp_path: Path, lines: str, says: str) -> None:
    (tmp_path / "task").write_text(lines)
    with pytest.raises(CrelleError, match=says):
        read_task(tmp_path / "task")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--task", "TASK", "--text", "TASK"), "--text does not apply to --task"),
        (("--test", "TASK"), "--test needs --task"),
        (("--task", "TASK", "--scales", "S", "--train", "all"), "--scales needs --train scales"),
        (("--task", "TASK"), "is a decoder, and tasks are for encoders"),
    ],
)
def test_options_that_do_not_go_together(tiny_model: Path, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    base = quantize(tiny_model, tmp_path / "base", "rtn:bits=4,group=16").out
    names = {"TASK": write_task(tmp_path / "task", "labels"), "S": tmp_path / "scales"}
    found = run("tune", base, tmp_path / "out", *(names.get(o, o) for o in options))
    assert found.code != 0
    assert says in found.err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_test_set_with_new_labels_is_refused() -> None:
    task = Task(("cat",), ("c",), None)
    with pytest.raises(FormatError, match="the label 'c' is not one of a, b"):
        task.target(("a", "b"))


def test_rank_correlation() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert spearman(x, x.exp()) == pytest.approx(1)
    assert spearman(x, -x) == pytest.approx(-1)
    assert spearman(torch.tensor([1.0, 1.0, 2.0, 3.0]), x) == pytest.approx(0.9486833)  # ties share a rank
