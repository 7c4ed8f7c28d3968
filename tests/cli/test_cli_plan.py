"""crelle plan: the contract's keys, bad input in a sentence, the picture."""

from pathlib import Path

import pytest
from conftest import write_tiny_model
from in_process import run, succeed

from crelle.quantizers.pipeline import quantize

ARGS = ("plan", "llama3-8b", "--memory", "24GB", "--scheme", "bcq:bits=3,group=128", "--kv", "4")


def test_json_has_the_contract() -> None:
    found = succeed(*ARGS, "--gpus", 2, "--price", 30000, "--watt", 700, "--json").json
    assert found["fits"]
    assert found["bytes_per_gpu"] > 0
    assert found["tokens"] > 0
    assert found["estimate"]["cost"]["total"] > 0
    assert "estimate" in found["note"]
    assert found["vllm"]["command"].startswith("vllm serve DIR --tensor-parallel-size 2")


def test_one_gpu_next_to_several() -> None:
    """The question of the papers' Table 5: OPT-175B at fp16 needs several GPUs, at 3 bits one."""
    args = ("plan", "opt-175b", "--memory", "141GB", "--scheme", "bcq:bits=3,group=128", "--compare")
    found = succeed(*args, "--price", 30000, "--watt", 700, "--json").json["compare"]
    fits = {(row["scheme"].partition(":")[0], row["gpus"]): row["fits"] for row in found}
    assert fits == {(s, n): s == "bcq" or n > 2 for s in ("fp16", "bcq") for n in (1, 2, 4, 8)}
    times = {(row["scheme"].partition(":")[0], row["gpus"]): row["milliseconds_per_step"] for row in found}
    assert times["fp16", 2] is None
    assert times["bcq", 1] > times["bcq", 2] > times["bcq", 4]
    assert times["bcq", 4] < times["fp16", 4]
    costs = {row["gpus"]: row["cost_per_million"] for row in found if row["scheme"].startswith("bcq")}
    assert costs[1] < costs[8]
    shown = succeed(*args).out
    assert "does not fit" in shown
    assert "ms per step, estimated" in shown
    assert "not validated, links are assumed" in shown


def test_text_says_that_speed_is_an_estimate() -> None:
    shown = succeed(*ARGS).out
    assert "fits: " in shown
    assert "an estimate" in shown
    assert "vllm serve" in shown


def test_what_does_not_fit_is_an_answer() -> None:
    found = succeed(*ARGS[:2], "--memory", "10GB", "--json").json
    assert not found["fits"]
    assert "not even one fits" in found["why_not"]
    assert found["enough_gpus"] == 2
    assert "2 GPUs of this size are enough" in succeed(*ARGS[:2], "--memory", "10GB").out.replace("\n", " ")


def test_a_checkpoint_has_its_own_scheme(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "m")
    made = quantize(source, tmp_path / "q", "rtn:bits=4,group=32").out
    found = succeed("plan", made, "--memory", "1GB", "--json").json
    assert found["scheme"].startswith("rtn:bits=4")
    assert str(made) in found["vllm"]["command"]
    assert succeed("plan", source, "--memory", "1GB", "--json").json["scheme"] == "fp16"


def test_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for memory in ("24GB", "4GB"):  # one that holds no sequence is drawn too
        succeed(*ARGS, "--memory", memory, "--plot", tmp_path / f"{memory}.png")
        assert (tmp_path / f"{memory}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nope",), "shapes are: smollm2-135m"),
        (("llama3-8b", "--gpus", 0), "at least one GPU"),
        (("llama3-8b", "--scheme", "x:bits=3"), "unknown scheme 'x'"),
        (("llama3-8b", "--scheme", "keep"), "give the closest one"),
        (("llama3-8b", "--kv", 5), "a KV cache must be one of"),
        (("llama3-8b", "--price", 5), "needs both"),
        (("llama3-8b", "--price", 5, "--watt", -1), "must be at least 0"),
        (("llama3-8b", "--bandwidth", 0), "positive number"),
        (("llama3-405b", "--memory", "100MB"), "one layer of llama3-405b"),
    ],
)
def test_bad_input_is_one_sentence(args: tuple[object, ...], says: str) -> None:
    found = run("plan", *args)
    assert found.code == 2
    assert says in found.err.replace("\n", " ")
    assert "Traceback" not in found.err
