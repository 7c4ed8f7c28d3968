"""The requests of another harness in token ids: what needs no lm-eval (tests/integrations/test_lm_eval.py does)."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import ROOT, write_tiny_model

from crelle import LLM, Sampling
from crelle.errors import CapacityError, SchemeError, UnsupportedError
from crelle.eval.tasks.harness import (
    encode_prompt,
    encode_request,
    fitted,
    prefix_id,
    rolling_windows,
    sampling_of,
)
from crelle.eval.tasks.loglikelihood import Ending, encode_pair

BOS = 256
MODULE = "crelle.integrations.lm_eval"


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


@pytest.fixture(scope="module")
def without_bos(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_tiny_model(tmp_path_factory.mktemp("without") / "m")
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "add_bos_token": False}))
    llm = LLM.load(path, device="cpu")
    assert llm.tokenizer.bos_id is None
    return llm


def test_a_pair_is_that_of_our_own_tasks(llm: LLM) -> None:
    for pair in (("Q: how?\nA:", " so"), ("x ", "y"), ("naïve", " 漢字")):
        assert encode_request(llm, *pair) == encode_pair(llm, *pair)


def test_without_context_the_prefix_token_stands_before(llm: LLM, without_bos: LLM) -> None:
    for model in (llm, without_bos):
        ids = model.tokenizer.encode("so", bos=False)
        assert prefix_id(model) == BOS
        assert encode_request(model, "", "so") == Ending((BOS, *ids), 1)
        spaced = model.tokenizer.encode("  so", bos=False)
        assert encode_request(model, "  ", "so") == Ending((BOS, *spaced), 1)


def test_a_text_that_begins_with_bos_has_it_once(llm: LLM, without_bos: LLM) -> None:
    token = llm.tokenizer._special["bos_token"]
    for model in (llm, without_bos):
        q, a = (model.tokenizer.encode(t, bos=False) for t in ("Q", " a"))
        assert encode_request(model, f"{token}Q", " a") == Ending((BOS, *q, *a), 1 + len(q))
        assert encode_request(model, "", f"{token}Q") == Ending((BOS, *q), 1)
        assert encode_prompt(model, f"{token}Q", 4, 64) == ([BOS, *q], False)
    assert encode_prompt(without_bos, "", 4, 64) == ([BOS], False)


def test_a_long_prompt_loses_its_beginning() -> None:
    pair = Ending(tuple(range(20)), 12)  # 12 tokens of prompt, 8 of the continuation
    assert fitted(pair, 19) is pair
    assert fitted(pair, 10) == Ending(tuple(range(9, 20)), 3)
    assert fitted(pair, 8) == Ending(tuple(range(11, 20)), 1)
    with pytest.raises(CapacityError, match=r"a continuation of 8 tokens does not fit the model's context of 7"):
        fitted(pair, 7)


def test_a_prompt_leaves_room_for_what_is_generated(llm: LLM) -> None:
    ids = llm.tokenizer.encode("one two three")
    assert encode_prompt(llm, "one two three", 4, len(ids) + 4) == (ids, False)
    assert encode_prompt(llm, "one two three", 4, 9) == (ids[-5:], True)
    with pytest.raises(CapacityError, match=r"64 tokens to generate leave no room .* lower max_gen_toks"):
        encode_prompt(llm, "one", 64, 64)


@pytest.mark.parametrize("limit", [1, 2, 7, 33, 200])
def test_windows_predict_each_token_once(llm: LLM, limit: int) -> None:
    text = "The quick brown fox jumps over the lazy dog; naïve café."
    windows, ids = rolling_windows(llm, text, limit), llm.tokenizer.encode(text, bos=False)
    assert [t for w in windows for t in w.ids[w.start :]] == ids
    assert all(len(w.row) <= limit for w in windows)
    assert windows[0].ids[0] == BOS
    assert all(len(w.row) == limit for w in windows[1:])  # as much context as there is room for
    assert rolling_windows(llm, "", limit) == []


def test_generation_options() -> None:
    assert sampling_of({}, 7) == Sampling(max_tokens=7)
    assert sampling_of({"until": "\n", "max_gen_toks": 3, "max_tokens": 9}, 7) == Sampling(max_tokens=3, stop=("\n",))
    assert sampling_of({"until": ["a", "", "b"], "do_sample": False, "temperature": 0.7}, 7).stop == ("a", "b")
    assert sampling_of({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, 7) == Sampling(max_tokens=7)
    torch.manual_seed(1)
    first = sampling_of({"do_sample": True, "top_k": -1, "top_p": 0.5}, 7)
    assert (first.temperature, first.top_k, first.top_p) == (1.0, 0, 0.5)
    second = sampling_of({"temperature": 0.7}, 7)
    assert second.temperature == 0.7
    assert second.seed != first.seed  # else repeats of an item would all be the same text
    torch.manual_seed(1)
    assert sampling_of({"do_sample": True}, 7).seed == first.seed
    with pytest.raises(SchemeError, match="the generation option 'num_beams' is not known to Crelle; known are until"):
        sampling_of({"num_beams": 2}, 7)


def test_an_empty_continuation_is_refused(llm: LLM) -> None:
    with pytest.raises(SchemeError, match="empty"):
        encode_request(llm, "Q", "")


def test_without_lm_eval_the_import_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(UnsupportedError, match=r"needs lm-eval 0.4.10 or newer .*; pip install lm-eval"):
        import_module(MODULE)


def test_without_lm_eval_the_command_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ImportError('none here')")  # also where lm-eval is installed
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", MODULE, "run"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"crelle: {MODULE} needs lm-eval 0.4.10 or newer (none here); pip install lm-eval\n"


def test_the_entry_point_names_the_class() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["crelle"].partition(":")
    assert module == MODULE
    assert f"class {name}(" in (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
