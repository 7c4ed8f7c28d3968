"""crelle bench: its JSON has the contract's keys, result files say how they were made."""

import json
from pathlib import Path

import pytest
from in_process import run

from crelle.eval import accuracy, gemv
from crelle.kernels import cpu
from crelle.quantizers.driver import quantize

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=f"the C++ core {cpu.available()}")

KEYS = {"microseconds", "baseline_microseconds", "speedup", "gb_per_s", "max_rel_err"}
CPU_KEYS = {"threads", "working_set", "roofline_gb_per_s", "share_of_roofline", "isa", "kernel"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "_ROUNDS", 3)
    monkeypatch.setattr(gemv, "_SLICE", 0.002)
    monkeypatch.setattr(gemv, "COLD_BYTES", 1_000_000)


def test_gemv_json_has_the_keys_of_the_contract() -> None:
    done = run("bench", "gemv", "--shape", "96x64", "--scheme", "rtn:bits=4,group=32", "--threads", "1", "--json")
    assert done.code == 0, done.err
    assert set(json.loads(done.out)) >= KEYS | CPU_KEYS


def test_gemv_writes_a_result_file_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "new" / "gemv"
    schemes = ("--scheme", "rtn:bits=4,group=32", "--scheme", "bcq:bits=2,group=32")
    command = ("bench", "gemv", "--shape", "96x64", *schemes, "--threads", "1,2", "--working-set", "both", "--out", out)
    done = run(*command)
    assert done.code == 0, done.err
    result = json.loads(out.with_suffix(".json").read_text())
    assert len(result["rows"]) == 2 * 2 * 2
    assert {r["working_set"] for r in result["rows"]} == {"hot", "cold"}
    assert "torch" in result["versions"]
    assert result["command"].startswith("crelle bench gemv")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shape", "96"), "96"),
        (("--shape", "0x5"), "0x5"),
        (("--threads", "none"), "none"),
        (("--scheme", "fp16"), "takes the formats"),
        (("--working-set", "tepid"), "tepid"),
        (("--isa", "abacus"), "abacus"),
    ],
)
def test_gemv_bad_options_are_sentences(options: tuple[str, ...], words: str) -> None:
    done = run("bench", "gemv", *options)
    assert done.code == 2
    assert words in done.err


def test_gemv_on_a_chosen_instruction_set() -> None:
    for isa in cpu.core().isas():
        before = cpu.core().isa()
        small = ("--shape", "96x64", "--scheme", "rtn:bits=4,group=32", "--threads", "1")
        done = run("bench", "gemv", *small, "--isa", isa, "--json")
        assert done.json["isa"] == isa
        assert cpu.core().isa() == before


def test_accuracy_writes_a_result_file(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "BITS", (4,))
    monkeypatch.setattr(accuracy, "_K", 128)
    quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=24")
    text = tmp_path / "text.txt"
    text.write_text("One matrix product after another. " * 9)
    short = ("--text", text, "--tokens", "96", "--context", "48", "--step-tokens", "24")
    done = run("bench", "accuracy", tmp_path / "q", *short, "--out", tmp_path / "accuracy")
    assert done.code == 0, done.err
    assert "token by token" in done.out
    result = (tmp_path / "accuracy.json").read_text()
    assert json.loads(result).keys() >= {"machine", "versions", "command", "model", "perplexity", "products"}
    assert str(tmp_path) not in result


def test_startup_writes_a_result_file(tiny_model: Path, tmp_path: Path) -> None:
    done = run("bench", "startup", tiny_model, "--repeat", 1, "--out", tmp_path / "startup", "--json")
    assert done.code == 0, done.err
    assert done.json["first_token_seconds"] > 0
    result = (tmp_path / "startup.json").read_text()
    assert json.loads(result)["parts"] == done.json["parts"]
    assert str(tmp_path) not in result
    assert str(tiny_model) not in result


def test_decode_measures_both_phases(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=32")
    short = ("--tokens", "4", "--prompt", "8", "--rounds", "1", "--threads", "1")
    done = run("bench", "decode", tmp_path / "q", *short, "--json")
    assert done.code == 0, done.err
    row = json.loads(done.out)
    assert row["decode_tokens_per_second"] > 0
    assert row["prefill_tokens_per_second"] > 0


def test_decode_peer_model_needs_its_program(tiny_model: Path) -> None:
    done = run("bench", "decode", tiny_model, "--llama-model", "m.gguf")
    assert done.code == 2
    assert "--llama-bench" in done.err
