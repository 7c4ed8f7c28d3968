"""crelle bench: its JSON has the contract's keys, result files say how they were made."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from in_process import run

from crelle.bench import import_timer, startup
from crelle.bench.kernels import gemv
from crelle.bench.model_shapes import SHAPES
from crelle.eval import accuracy
from crelle.kernels import cpu
from crelle.quantizers.pipeline import quantize

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


def test_startup_writes_a_result_file(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/bench/test_startup.py starts the processes; this is what becomes of what they say."""

    def started(python: list[str], command: list[str], _: int) -> tuple[float, float, float, str]:
        assert command[:2] == ["generate", str(tiny_model)]
        said = {import_timer.BEGUN: 7.125, "torch": 1.5} if "-c" not in python else {}
        return 2.5, 3.0, 7.0, f"Hello you\n{json.dumps(said)}\n"

    monkeypatch.setattr(startup, "_run", started)
    done = run("bench", "startup", tiny_model, "--repeat", 1, "--out", tmp_path / "startup", "--json")
    assert done.code == 0, done.err
    assert (done.json["first_token_seconds"], done.json["process_seconds"]) == (2.5, 3.0)
    assert (done.json["parts"]["interpreter"], done.json["parts"]["torch"]) == (0.125, 1.5)
    result = (tmp_path / "startup.json").read_text()
    assert json.loads(result)["parts"] == done.json["parts"]
    assert str(tmp_path) not in result
    assert str(tiny_model) not in result


def test_speculate_compares_equal_answers_and_writes_a_result_file(tmp_path: Path) -> None:
    tiny_model = write_tiny_model(tmp_path / "m", max_position_embeddings=256)
    sizes = ("--rounds", "1", "--tokens", "24", "--prompt", "128", "--clients", "1,2", "--threads", "1")
    how = ("--speculate", "ngram:tokens=3,adaptive=false", "--device", "cpu", "--out", tmp_path / "s")
    done = run("bench", "speculate", tiny_model, *sizes, *how)
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    kinds = ("summary", "edit", "prose")
    assert [(r["clients"], r["prompts"]) for r in rows] == [(n, kind) for n in (1, 2) for kind in kinds]
    for r in rows:
        assert r["steps"] + r["accepted"] >= r["plain_steps"] / r["clients"]
        assert r["steps"] <= r["plain_steps"]
    assert sum(r["accepted"] for r in rows) > 0
    for wrong, says in (
        (("--speculate", "off"), "needs --speculate ngram"),
        (("--prompt", "250"), "must have more than"),
    ):
        assert says in run("bench", "speculate", tiny_model, *sizes[:2], *wrong).err


def test_decode_measures_both_phases(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=32")
    short = ("--tokens", "4", "--prompt", "8", "--rounds", "1", "--threads", "1")
    done = run("bench", "decode", tmp_path / "q", *short, "--json")
    assert done.code == 0, done.err
    row = json.loads(done.out)
    assert row["decode_tokens_per_second"] > 0
    assert row["prefill_tokens_per_second"] > 0


def test_decode_defaults_fit_a_short_context(tiny_model: Path) -> None:
    done = run("bench", "decode", tiny_model, "--rounds", "1", "--threads", "1", "--json")
    assert done.code == 0, done.err
    assert (done.json["decode_tokens"], done.json["prefill_tokens"]) == (64, 95)


@pytest.mark.parametrize(("option", "most", "need"), [("--prompt", 95, 97), ("--tokens", 94, 98)])
def test_decode_sizes_beyond_the_context_name_the_remedy(tiny_model: Path, option: str, most: int, need: int) -> None:
    done = run("bench", "decode", tiny_model, option, 96, "--rounds", "1", "--threads", "1")
    assert done.code == 2
    assert f"{need} tokens do not fit the model's context of 96; {option} must be at most {most}" in done.err


def test_decode_peer_model_needs_its_program(tiny_model: Path) -> None:
    done = run("bench", "decode", tiny_model, "--llama-model", "m.gguf")
    assert done.code == 2
    assert "--llama-bench" in done.err


GEMV_ROW = {
    "scheme": "bcq:bits=2,group=128",
    "shape": [4096, 4096],
    "batch": 1,
    "device": "A GPU",
    "baseline": "cuBLAS float16",
    "baseline_microseconds": 10.0,
    "speedup": 4.0,
    "product_speedup": None,
}
DECODE_ROW = {
    "model": "llama2-7b",
    "scheme": "fp16",
    "device": "A GPU",
    "batch": 1,
    "tokens": 128,
    "context": 128,
    "milliseconds_per_token": 3.3,
    "weight_bytes": 13_000_000_000,
    "read_ceiling_gb_per_s": 4300.0,
}


def test_gemv_of_several_shapes_has_a_row_for_each() -> None:
    small = ("--shape", "96x64,32x64", "--shape", "64x32", "--scheme", "rtn:bits=4,group=32", "--threads", "1")
    done = run("bench", "gemv", *small, "--json")
    assert [r["shape"] for r in done.json["rows"]] == [[96, 64], [32, 64], [64, 32]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", [("gemv",), ("decode", "--shape", "llama2-7b")])
def test_cuda_without_a_gpu_is_a_sentence(command: tuple[str, ...]) -> None:
    done = run("bench", *command, "--device", "cuda")
    assert done.code == 2
    assert "no CUDA device" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("as_json", [True, False])
def test_refused_rows_do_not_take_the_others_along(tmp_path: Path, as_json: bool) -> None:
    schemes = ("--scheme", "fp16", "--scheme", "rtn:bits=4,group=32", "--scheme", "bf16")
    command = ("bench", "gemv", "--shape", "96x64", *schemes, "--threads", "1", "--out", tmp_path / "g")
    done = run(*command, *(["--json"] if as_json else []))
    assert done.code == 2
    said = str(done.json["refused"]) if as_json else done.err
    assert "takes the formats" in said
    result = json.loads((tmp_path / "g.json").read_text())
    assert [r["scheme"] for r in result["rows"]] == ["rtn:bits=4,group=32"]
    assert len(result["refused"]) == 2


def test_decode_of_a_shape_has_figures_beside_f16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES["opt-125m"], "vocab_size", 1000)  # most of one layer's model is its vocabulary
    small = ("--layers", 1, "--tokens", 4, "--context", 4, "--rounds", 1, "--threads", 1, "--device", "cpu")
    done = run("bench", "decode", "--shape", "opt-125m", *small, "--out", tmp_path / "d")
    assert done.code == 0, done.err
    assert "ms/token" in done.out
    result = json.loads((tmp_path / "d.json").read_text())
    assert [r["scheme"] for r in result["rows"]] == ["fp16", "bcq:bits=3,group=128"]
    assert result["rows"][1]["speedup"] > 0
    assert result["rows"][1]["weight_bytes"] < result["rows"][0]["weight_bytes"]
    assert (tmp_path / "d.png").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "either MODEL"),
        (("m", "--shape", "opt-125m"), "either MODEL"),
        (("--shape", "llama9-1b"), "llama2-7b"),
        (("--shape", "opt-125m", "--scheme", "nonsense"), "nonsense"),
        (("--shape", "opt-125m", "--layers", 99), "1 to 12 layers"),
        (("--shape", "opt-125m", "--prompt", 8), "--prompt"),
        (("--shape", "opt-125m", "--tokens", 4000), "context of 2048"),
        (("--shape", "opt-125m", "--tokens", 0), "at least 3 tokens"),
        (("m", "--scheme", "fp16"), "--scheme"),
        (("--shape", "opt-175b"), "GB are free"),
    ],
)
def test_decode_bad_options_are_sentences(
    options: tuple[object, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES["opt-125m"], "vocab_size", 1000)  # some are found when the model is there
    done = run("bench", "decode", *options, "--device", "cpu", "--no-baseline")
    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize("row", [GEMV_ROW, DECODE_ROW], ids=["gemv", "decode"])
def test_plot_draws_a_result_file_of_another_machine(row: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"rows": [row, row]}))
    done = run("bench", "plot", file, "--json")
    assert done.json == {"picture": "result.png"}
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ['{"rows": []}', '{"rows": [{"scheme": "fp16"}]}', "{}"])
def test_plot_refuses_other_files(content: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    done = run("bench", "plot", file)
    assert done.code == 2
    assert "rows" in done.err


def test_without_matplotlib_figures_are_kept_and_the_picture_can_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    small = ("--shape", "96x64", "--scheme", "rtn:bits=4,group=32", "--threads", "1")
    done = run("bench", "gemv", *small, "--results", tmp_path / "g")
    assert done.code == 0, done.err
    assert "bench plot g.json" in done.err
    assert (tmp_path / "g.json").is_file()
