"""From a model on disk to a checkpoint: what is quantized, what is kept, and what a death in between leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_gguf as tiny
import torch
from conftest import TINY, write_tiny_model
from gguf import GGMLQuantizationType as Type

from crelle.errors import FormatError, SchemeError
from crelle.formats.base import nbytes
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.hf import HFDirectory
from crelle.quantizers import pipeline
from crelle.quantizers.first_writer import FirstWriter
from crelle.quantizers.pipeline import quantize
from crelle.quantizers.scheme import parse

SCHEME = "rtn:bits=3,group=16"
LINEARS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]


def contents(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(model / "model.safetensors")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A tiny model that is ours to change."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.mark.parametrize("scheme", [SCHEME, "bcq:bits=2,group=row", "fp16", "rtn:bits=4,group=32,symmetric=true"])
def test_layers_are_quantized_and_the_rest_is_kept(tiny_model: Path, tmp_path: Path, scheme: str) -> None:
    report = quantize(tiny_model, tmp_path / "out", scheme)
    made, source, quantizer = Checkpoint(tmp_path / "out"), tensors_of(tiny_model), parse(scheme)
    assert sorted(made.names()) == sorted(source)
    inside = [f"model.layers.{i}.{p}" for i in range(3) for p in LINEARS]
    for module in inside:
        want, got = quantizer.fit(source[f"{module}.weight"]), made.matrix(module)
        assert got.spec() == want.spec()
        assert all(torch.equal(t, got.tensors()[k]) for k, t in want.tensors().items())
    for module in ("model.embed_tokens", "lm_head"):
        assert torch.equal(made.matrix(module).dequantize(), source[f"{module}.weight"])
    norms = [n for n in source if "norm" in n]
    assert len(norms) == 7
    for name in norms:
        assert torch.equal(made.read(name), source[name])
    assert made.scheme == report.scheme == scheme
    assert report.bytes == sum(nbytes(made.matrix(m)) for m in inside)
    assert report.bits_per_weight == 8 * report.bytes / sum(source[f"{m}.weight"].numel() for m in inside)


def test_config_and_tokenizer_go_along(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "out", SCHEME)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "crelle"
    assert "Crelle" in config.pop("transformers_weights")  # what transformers says where crelle is not imported
    assert config == TINY
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_model / name).read_bytes()


def test_every_layer_is_a_shard_in_the_order_of_the_model(tmp_path: Path) -> None:
    many = write_tiny_model(tmp_path / "m", num_hidden_layers=11, hidden_size=24, intermediate_size=16, head_dim=4)
    quantize(many, tmp_path / "out", SCHEME)
    index = json.loads((tmp_path / "out" / "crelle.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(index.values()))
    assert len(shards) == 11 + 3  # the embedding, the head, the last norm
    layers = [{n.split(".")[2] for n, s in index.items() if s == shard and ".layers." in n} for shard in shards]
    assert [layer for layer in layers if layer] == [{str(i)} for i in range(11)]


def test_only_the_layer_at_hand_is_read(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    read, add = HFDirectory.read, FirstWriter.add

    def reading(self: HFDirectory, name: str) -> torch.Tensor:
        log.append(name)
        return read(self, name)

    def adding(self: FirstWriter, shard: str, encode: Any) -> None:
        add(self, shard, encode)
        log.append("written")

    monkeypatch.setattr(HFDirectory, "read", reading)
    monkeypatch.setattr(FirstWriter, "add", adding)
    quantize(tiny_model, tmp_path / "out", SCHEME)
    turns = " ".join(log).split("written")
    in_layers = [{n.split(".")[2] for n in turn.split() if ".layers." in n} for turn in turns]
    assert all(len(layers) <= 1 for layers in in_layers)
    names = [n for n in log if n != "written"]
    assert sorted(names) == sorted(tensors_of(tiny_model))  # each once


def test_progress_counts_every_weight(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    quantize(tiny_model, tmp_path / "out", SCHEME, progress=lambda *now: seen.append(now))
    done = [d for d, _, _ in seen]
    total = sum(t.numel() for t in tensors_of(tiny_model).values())
    assert done == sorted(done)
    assert {t for _, t, _ in seen} == {done[-1]} == {total}
    assert "model.layers.2" in [name for _, _, name in seen]


# Overrides


def test_overrides_apply_to_what_they_match_the_first_first(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {
        "*.down_proj": "bcq:bits=2,group=20",
        "model.layers.0.*": "rtn:bits=8,group=row",
        "model.embed_tokens": "rtn:bits=4,group=24",
    }
    quantize(tiny_model, tmp_path / "out", SCHEME, overrides=overrides)
    made = Checkpoint(tmp_path / "out")

    def kind(module: str) -> tuple[str, int, int]:
        w = made.matrix(module)
        return w.format, w.bits, w.group

    assert kind("model.layers.0.mlp.down_proj") == kind("model.layers.2.mlp.down_proj") == ("bcq", 2, 20)
    assert kind("model.layers.0.mlp.up_proj") == ("uniform", 8, 72)
    assert kind("model.layers.1.mlp.up_proj") == ("uniform", 3, 16)
    assert kind("model.embed_tokens") == ("uniform", 4, 24)
    assert kind("lm_head") == ("dense", 32, 72)
    assert made.quantization["overrides"] == overrides


def test_head_quantizes_what_is_outside_the_layers(tiny_model: Path, tmp_path: Path) -> None:
    head = "rtn:bits=5,group=24"
    quantize(tiny_model, tmp_path / "out", SCHEME, head=head, overrides={"lm_head": "rtn:bits=8,group=72"})
    made = Checkpoint(tmp_path / "out")
    assert made.matrix("model.embed_tokens").bits == 5
    assert made.matrix("lm_head").bits == 8  # an override goes before
    assert made.matrix("model.layers.0.mlp.up_proj").bits == 3
    assert made.quantization["overrides"] == {"lm_head": "rtn:bits=8,group=72", "model.embed_tokens": head}


def test_an_override_that_matches_nothing_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=r"the override '\*\.dwon_proj' matches no matrix; an example of a name is '"):
        quantize(tiny_model, tmp_path / "out", SCHEME, overrides={"*.dwon_proj": "fp16"})
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("options", [{"overrides": {"*": "rtn:bits=9"}}, {"head": "rtn:bits=9"}])
def test_a_bad_scheme_anywhere_is_refused_before_anything_is_written(
    tiny_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(SchemeError, match="bits must be 1 to 8, got 9"):
        quantize(tiny_model, tmp_path / "out", SCHEME, **options)
    assert not list(tmp_path.glob("out*"))


# Sources


def test_a_quantized_model_is_not_quantized_again(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "out", SCHEME)
    with pytest.raises(FormatError, match=f"is already quantized \\({SCHEME}\\); start from the original model"):
        quantize(tmp_path / "out", tmp_path / "twice", SCHEME)


def test_a_checkpoint_that_was_only_stored_is_quantized(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "wide", "fp32")
    for source, out in ((tiny_model, "at once"), (tmp_path / "wide", "in two steps")):
        quantize(source, tmp_path / out, SCHEME)
    at_once, in_two_steps = (
        {file.name: file.read_bytes() for file in (tmp_path / out).glob("*.safetensors")}
        for out in ("at once", "in two steps")
    )
    assert at_once == in_two_steps
    quantize(tiny_model, tmp_path / "partly", "fp16", overrides={"*.down_proj": SCHEME})
    with pytest.raises(FormatError, match="is already quantized"):
        quantize(tmp_path / "partly", tmp_path / "twice", SCHEME)


def test_a_broken_weight_is_named(model: Path, tmp_path: Path) -> None:
    tensors = tensors_of(model)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    with pytest.raises(FormatError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight': the weight contains NaN"):
        quantize(model, tmp_path / "out", SCHEME)
    assert not (tmp_path / "out").exists()


def test_a_model_without_layers_is_refused(model: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"head.weight": torch.zeros(4, 4)}, model / "model.safetensors")
    with pytest.raises(FormatError, match="has no numbered layers"):
        quantize(model, tmp_path / "out", SCHEME)


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (Type.F32, torch.float32),
        (Type.F16, torch.float16),
        (Type.BF16, torch.bfloat16),
        (Type.Q8_0, torch.float16),
    ],
    ids=lambda k: getattr(k, "name", None),
)
def test_what_is_kept_of_a_gguf_keeps_its_type(tmp_path: Path, kind: Type, stored: torch.dtype) -> None:
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", kind=kind)
    quantize(file, tmp_path / "out", SCHEME)
    made = Checkpoint(tmp_path / "out")
    assert made.matrix("lm_head").tensors()["weight"].dtype == stored
    assert made.matrix("model.layers.0.self_attn.q_proj").format == "uniform"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert made.config["model_type"] == "llama"


# Resuming


def stop_after(units: int, model: Path, out: Path, scheme: str = SCHEME, **options: Any) -> None:
    """Let a run end in the middle."""

    class StoppedError(Exception):
        pass

    left = units

    def progress(*_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize(model, out, scheme, progress=progress, **options)


def test_resume_takes_over_what_is_finished(model: Path, tmp_path: Path) -> None:
    stop_after(4, model, tmp_path / "a")
    report = quantize(model, tmp_path / "a", SCHEME, resume=True)
    assert report.resumed_units == 4
    assert quantize(model, tmp_path / "b", SCHEME).resumed_units == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_resume_without_anything_to_resume_just_runs(model: Path, tmp_path: Path) -> None:
    assert quantize(model, tmp_path / "a", SCHEME, resume=True).resumed_units == 0


def test_an_unfinished_run_is_neither_taken_over_nor_lost_unasked(model: Path, tmp_path: Path) -> None:
    stop_after(2, model, tmp_path / "a")
    before = contents(tmp_path / "a.partial")
    with pytest.raises(FormatError, match=r"contains an unfinished run: `resume=True` .* `overwrite=True`"):
        quantize(model, tmp_path / "a", SCHEME)
    assert contents(tmp_path / "a.partial") == before
    assert quantize(model, tmp_path / "a", "fp16", overwrite=True).resumed_units == 0


TWO = {"*.down_proj": "fp16", "*.layers.0.*": "bf16"}


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ("scheme", {"scheme": "rtn:bits=4,group=16"}),
        ("overrides", {"overrides": {}}),
        ("overrides", {"overrides": {**TWO, "*.up_proj": "fp16"}}),
        ("overrides", {"overrides": dict(reversed(TWO.items()))}),
        ("overrides", {"head": "fp16"}),
    ],
    ids=["scheme", "fewer", "more", "another order", "head"],
)
def test_resume_with_another_recipe_is_refused(
    model: Path, tmp_path: Path, changed: str, options: dict[str, Any]
) -> None:
    stop_after(3, model, tmp_path / "a", overrides=TWO)
    with pytest.raises(FormatError, match=f"cannot resume: .* was started with {changed} = "):
        quantize(model, tmp_path / "a", **{"scheme": SCHEME, "overrides": TWO, **options}, resume=True)


def test_resume_with_another_source_is_refused(model: Path, tmp_path: Path) -> None:
    stop_after(3, model, tmp_path / "a")
    write_tiny_model(model, seed=1)
    with pytest.raises(FormatError, match=r"cannot resume: .* was started with source = "):
        quantize(model, tmp_path / "a", SCHEME, resume=True)


def test_resume_with_another_version_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(3, model, tmp_path / "a")
    monkeypatch.setattr(pipeline, "__version__", "99.0")
    with pytest.raises(FormatError, match=r"was started with crelle = .*, now it is '99\.0'"):
        quantize(model, tmp_path / "a", SCHEME, resume=True)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_death_at_any_step_loses_nothing(every: int, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "m", num_hidden_layers=2, hidden_size=24, intermediate_size=40, head_dim=4)
    (tmp_path / "work").mkdir()
    script = Path(__file__).with_name("crash_points.py")
    command = [sys.executable, script, source, tmp_path / "work", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == {"fresh", "overwrite"}
    assert result["fresh"]["steps"] > 40
    assert result["overwrite"]["steps"] > result["fresh"]["steps"]
    assert all(found["deaths"] == (found["steps"] - 1) // every for found in result.values())
    assert {mode: found["wrong"] for mode, found in result.items()} == {"fresh": [], "overwrite": []}


STARTER = """
import os, sys
import crelle.quantize_job.run
from crelle.cli.main import main
for _ in range(3):
    if (pid := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            main()
        finally:
            os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    if not sys.stdin.readline():
        break
"""  # starts the command line three times, each in a process that need not load torch again


@pytest.mark.slow  # at the places of one step in five: above
def test_a_run_killed_at_three_places_ends_in_the_same_bytes(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 12, "hidden_size": 48, "intermediate_size": 64, "head_dim": 8}
    source, out = write_tiny_model(tmp_path / "m", **sizes), tmp_path / "out"
    scheme = "bcq:bits=2,group=24,rounds=5"
    options = ("--scheme", scheme, "--head", "none", "--threads", "1", "--resume")
    command = [sys.executable, "-c", STARTER, "quantize", source, out, *options]
    finished = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        for places in (3, 5, 8):
            run = int(starter.stdout.readline())  # type: ignore[union-attr]
            while len(list(tmp_path.glob("out.partial/*.safetensors"))) < places:
                os.kill(run, 0)  # raises if the run ended before it could be killed
                time.sleep(0.002)
            os.kill(run, signal.SIGKILL)
            assert starter.stdout.readline() == f"{-signal.SIGKILL}\n"  # type: ignore[union-attr]
            assert not out.exists()
            finished = places
            starter.stdin.write("\n")  # type: ignore[union-attr]
            starter.stdin.flush()  # type: ignore[union-attr]
    report = quantize(source, out, scheme, resume=True)
    assert report.resumed_units >= finished - 1  # the journal may not have got as far as the last shard
    quantize(source, tmp_path / "undisturbed", scheme)
    assert contents(out) == contents(tmp_path / "undisturbed")
