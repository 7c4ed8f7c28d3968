"""A small acceptance run, and that one would notice wrong answers."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "server"))

import acceptance
from acceptance_checkpoint import write_checkpoint
from acceptance_clients import KINDS, Crowd, Known
from tiny_server import nested_llm, serving

from crelle import LLM, Sampling


def test_a_small_run_on_a_cpu_has_no_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--shape", "tiny", "--requests", "60", "--clients", "12", "--known", "8"]
    code = acceptance.main([*options, "--out", str(tmp_path / "result.json")])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    result = json.loads((tmp_path / "result.json").read_text())
    rows = {r["kind"]: r for r in result["rows"]}
    assert result["failures"] == 0
    assert rows["all under load"]["requests"] == 60
    assert all(rows[kind]["requests"] for kind in KINDS)
    assert rows["alone"]["compared"] == 16, "by both servers"
    assert rows["seed"]["compared"] == rows["seed"]["requests"]
    assert len(result["seconds"]["starts"]) == 2
    assert 0 < rows["stream"]["first_token_seconds"]["p50"] <= rows["stream"]["first_token_seconds"]["p99"]
    assert any("memory" in line and "(--memory to change)" in line for line in result["banner"])
    assert "first token ms" in shown.out


def test_the_runner_of_gpu_tests_passes_options_on() -> None:
    command = [sys.executable, str(ROOT / "tests" / "run_gpu.py"), "--acceptance", "--shape", "nonesuch", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "--clients" in done.stdout) == (0, True), done.stderr


def test_a_wrong_answer_is_a_failure() -> None:
    with serving(nested_llm("alone")) as server:
        right = server.llm.generate("Hello", Sampling(max_tokens=5)).text
        for text, failed in ((right, 0), (f"{right}!", 1)):
            crowd = Crowd(server.url, "tiny", [Known("Hello", 5, None, text)], 2048, exact=True)
            asyncio.run(crowd.alone())
            assert [o.error is not None for o in crowd.outcomes] == [bool(failed)]
        unknown = Crowd(server.url, "another", [Known("Hello", 5, None, right)], 2048, exact=True)
        asyncio.run(unknown.alone())
        assert "does not exist" in (unknown.outcomes[0].error or "")
        server.assert_empty()


def test_every_id_of_a_random_model_has_a_text_of_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "tiny", "rtn:bits=4,group=64", "cpu", layers=1)
    tokenizer = LLM.load(tmp_path / "m", device="cpu").tokenizer
    assert tokenizer.encode("abc w00300")[0] == 256
    assert len(tokenizer.encode("abc w00300")) == 11
    assert tokenizer.decode([300, 1023]) == " w00300 w01023"
