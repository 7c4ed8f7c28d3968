"""crelle bench: its JSON has the contract's keys, result files say how they were made."""

import json
from pathlib import Path

import pytest
from in_process import run

from crelle.eval import gemv
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
    ],
)
def test_gemv_bad_options_are_sentences(options: tuple[str, ...], words: str) -> None:
    done = run("bench", "gemv", *options)
    assert done.code == 2
    assert words in done.err


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
